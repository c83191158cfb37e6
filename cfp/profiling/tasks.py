"""Measurement tasks, their options and their progress.

How tasks are measured is in `cfp.profiling.jobs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from cfp.profiling.in_flight import Limits
from cfp.profiling.key import ProfileKey
from cfp.profiling.record import ProfileRecord

Phase = Literal["look up", "build", "run", "wait", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One measurement.

    Attributes:
      key: key of its record. Tasks with equal keys are the same.
      label: text for progress, such as "segment 1: 3 of 24".
      expected_ms: expected time of one execution; 0 if unknown.
      is_last: True builds it after others with the same kernels, so that the compiler
        tunes these once.
    """

    key: ProfileKey
    label: str
    expected_ms: float = 0.0
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of measuring.

    Attributes:
      done: tasks with a record: `cached`, plus measured, plus `failed`.
      cached: tasks answered from the store, good or failed.
      failed: tasks that failed now.
      total: all tasks, each key once.
      best_ms: the smallest time among good records; infinite before the first.
      label: the task of the event; "" before the first.
      phase: "look up" after the store's answer; "build" while a task's build is
        awaited; "run" when it starts to run; "wait" if another process with the same
        store has all remaining tasks; "done" when it has its record.
      elapsed_seconds: time since the beginning.
      awaited: number of awaited compiles; 0 if unknown.
      awaited_seconds: time of waiting for them.
    """

    done: int
    cached: int
    failed: int
    total: int
    best_ms: float
    label: str
    phase: Phase
    elapsed_seconds: float
    awaited: int = 0
    awaited_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of builds and timings.

    Attributes:
        retry_failures: whether what failed before now is tried again, or what failed
            before a moment: a process that was started again keeps to the first's.
        progress: called with what is being done.
        began: now.
    """

    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def retries(self, record: ProfileRecord) -> bool:
        """True if a record is of a failure that is tried again."""
        again = self.retry_failures
        moment = again if isinstance(again, datetime) else self.began
        is_before = datetime.fromisoformat(record.created) < moment
        return not record.ok and bool(again) and is_before

    def tell(self, event: Progress | str) -> None:
        """Passes an event on."""
        if self.progress is not None:
            self.progress(event)

    @property
    def of_rates(self) -> MeasureOptions:
        """These, for timing devices: of different probes there is no best."""

        def tell(event: Progress | str) -> None:
            assert isinstance(event, Progress)
            label = f"rates of the devices: {event.label}" if event.label else ""
            self.tell(replace(event, label=label, best_ms=math.inf))

        return replace(self, progress=tell)
