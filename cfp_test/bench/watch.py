"""Marks what is done with competitors, so that a process that dies of one is not lost.

`cfp.cli.supervise` runs the command in a child, and records what that died of; the
next child finds it here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cfp.errors import CfpError
from cfp.profiling.builder import is_out_of_memory, reason_of
from cfp.profiling.crashes import record_crashes
from cfp.profiling.in_flight import Doing, InFlightLog, Limits
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.record import ProfileRecord, Status, is_to_retry
from cfp.profiling.store import ProfileStore


class Died(CfpError):
    """A process died of something, which is not tried again.

    Attributes:
      status: as records have it.
    """

    def __init__(self, record: ProfileRecord) -> None:
        super().__init__(record.reason)
        self.status: Status = record.status


def status_and_reason(error: Exception) -> tuple[str, str]:
    """Describes a competitor that failed, or died, for its row."""
    if isinstance(error, Died):
        return error.status, str(error)
    status = "out_of_memory" if is_out_of_memory(error) else "compile_error"
    return status, reason_of(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Marks of things.

    Attributes:
      store_path: the store that knows what processes died of.
      limits: what counts as hung.
      retry_failures: try again what failed before, or before a moment.
    """

    store_path: Path
    limits: Limits | None = None
    retry_failures: bool | datetime = False

    @contextlib.contextmanager
    def doing(
        self, what: Parts, stage: str, label: str, doing: Doing, expected_ms: float = 0
    ) -> Iterator[None]:
        """Marks something for as long as the body takes.

        Not for a body that marks what it does itself: that would be blamed twice.

        Args:
          what: it is done with, and where.
          stage: what is done with it.
          label: what messages call it.
          doing: whether it compiles or runs.
          expected_ms: how long one step should take.

        Raises:
          Died: a process has died of it, and the body is left out.
        """
        key = ProfileKey((*what, ("stage", stage)))
        with ProfileStore(self.store_path) as store:
            record_crashes(store)
            record = store.get(key.digest)
        if record is not None and not is_to_retry(record, self.retry_failures):
            raise Died(record)
        with (
            InFlightLog(self.store_path, self.limits) as marks,
            marks.doing(key, label, doing, expected_ms),
        ):
            yield
