"""One task that runs again and again between the others; see `cfp.profiling.drift`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cfp.profiling.builder import Built
from cfp.profiling.marks import Marks
from cfp.profiling.processes import Agreement
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore

if TYPE_CHECKING:
    from cfp.profiling.pipeline import Task


@dataclass(slots=True)
class Repeated:
    """Runs a task as often as it is asked, until it fails, which is kept.

    Attributes:
      task: what to run, or None for nothing.
      last_ms: what it took the last time; None before the first, and if it failed.
    """

    task: Task | None
    store: ProfileStore
    marks: Marks
    agreement: Agreement
    last_ms: float | None = None
    _built: Built | ProfileRecord | None = field(default=None, init=False)

    def run(self) -> None:
        """Runs it once more."""
        task = self.task
        if task is None:
            return
        if self._built is None:
            known = self.store.get(task.key.digest)
            if known is not None and not known.ok:
                self._built = known
            else:
                with self.marks.doing(task.key, task.label, "build"):
                    self._built = task.build()
            [ready] = self.agreement.everywhere([isinstance(self._built, Built)])
            if not ready:
                self.task = None
        if self.task is None or not isinstance(self._built, Built):
            return
        with self.marks.doing(task.key, task.label, "run", task.expected_ms):
            record = task.run(self._built)
        self.store.put(record)
        self.last_ms = record.time_ms if record.ok else None
        if not record.ok:
            self.task = None
