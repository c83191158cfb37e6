"""Measurement tasks, their options and their progress.

How tasks are measured is in `cfp.profiling.jobs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from cfp.profiling.in_flight import Limits
from cfp.profiling.key import ProfileKey

Phase = Literal["look up", "build", "run", "wait", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to measure.

    Attributes:
      key: what its record is kept under. Tasks with equal keys are taken for the same.
      label: what progress shows, such as "segment 1: 3 of 24".
      expected_ms: how long one execution should take; 0 where it is not known.
      is_last: it is built after others, whose kernels it has, so that the compiler
        tries these out once.
    """

    key: ProfileKey
    label: str
    expected_ms: float = 0.0
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of measuring.

    Attributes:
      done: tasks that have a record: `cached`, plus measured, plus `failed`.
      cached: of these, answered from the store, whether good or failures.
      failed: of these, those that failed now.
      total: all tasks, each key once.
      best_ms: the smallest time among the good records; infinite before the first.
      label: the task that the event is about; "" before the first.
      phase: "look up" once the store has answered; "build" when a task's build has
        to be awaited; "run" when it starts to run; "wait" when only another process
        with the same store is at what is left; "done" when it has its record.
      elapsed_seconds: since the beginning.
      awaited: programs whose compiles are awaited; 0 if that is not known.
      awaited_seconds: how long they have been.
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
        retry_failures: whether what failed before is tried again, or what failed before
            a moment: a process that was started again keeps to the first start's.
        progress: called with what is being done.
    """

    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None

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
