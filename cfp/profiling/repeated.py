"""One task that runs again and again between the others; see `cfp.profiling.drift`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from cfp.profiling.builder import Built
from cfp.profiling.marks import Marks
from cfp.profiling.processes import Agreement
from cfp.profiling.record import ProfileRecord, is_to_retry
from cfp.profiling.store import ProfileStore

if TYPE_CHECKING:
    from cfp.profiling.tasks import Task


@dataclass(slots=True)
class Repeated:
    """Runs a task as often as it is asked, until it fails, which is kept.

    Attributes:
      task: what to run, or None for nothing.
      retry_failures: run it although it failed before, or before a moment.
      last_ms: what it took the last time; None before the first, and if it failed.
    """

    task: Task | None
    store: ProfileStore
    marks: Marks
    agreement: Agreement
    retry_failures: bool | datetime = False
    last_ms: float | None = None
    _built: Built | ProfileRecord | None = field(default=None, init=False)

    def run(self) -> None:
        """Runs it once more."""
        task = self.task
        if task is None:
            return
        if self._built is None:
            self._built = self._known_failure(task) or self._build(task)
            [ready] = self.agreement.everywhere([isinstance(self._built, Built)])
            if not ready:
                self.task = None
        if self.task is None or not isinstance(self._built, Built):
            return
        with self.marks.doing(task.key, task.label, "run", task.expected_ms):
            record = task.run(self._built)
        self._keep(record)
        self.last_ms = record.time_ms if record.ok else None
        if not record.ok:
            self.task = None

    def _known_failure(self, task: Task) -> ProfileRecord | None:
        known = self.store.get(task.key.digest)
        if known is None or known.ok or is_to_retry(known, self.retry_failures):
            return None
        return known

    def _build(self, task: Task) -> Built | ProfileRecord:
        with self.marks.doing(task.key, task.label, "build"):
            outcome = task.build()
        if isinstance(outcome, ProfileRecord):
            self._keep(outcome)
        return outcome

    def _keep(self, record: ProfileRecord) -> None:
        # The first good time stays, and a newer failure takes an older one's place:
        # that one was tried again.
        kept = self.store.get(record.key)
        self.store.put(record, replace=kept is not None and not kept.ok)
