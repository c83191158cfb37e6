"""Measurement tasks, their progress and their summary.

How tasks are measured is in `cfp.profiling.scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from cfp.profiling.key import ProfileKey
from cfp.profiling.record import ProfileRecord

Phase = Literal["look up", "build", "run", "wait", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to measure.

    Attributes:
      key: what its record is kept under. Tasks with equal keys are taken for the same.
      label: what progress shows, such as "segment 1: 3 of 24".
      expected_ms: how long one execution should take; 0 where it is not known.
      after: digests of tasks that share its kernels: if they are built at the same
        time, it waits for them, and the compiler tries those kernels out once. Of these
        none may wait itself.
    """

    key: ProfileKey
    label: str
    expected_ms: float = 0.0
    after: frozenset[str] = frozenset()


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


ProgressCallback = Callable[[Progress], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """Summary of all tasks.

    Attributes:
      records: by key digest, in the order of the tasks.
      measured: built, run and timed now.
      cached: answered from the store, whether good or failures.
      failed: failed now. The three add up to the number of records.
      build_seconds: of all builds, side by side ones added up.
    """

    records: Mapping[str, ProfileRecord]
    measured: int
    cached: int
    failed: int
    build_seconds: float
    run_seconds: float
