"""Answers from the store what it knows, and builds, runs and keeps the rest.

Building, running and keeping are three things that know nothing of each other. Tasks
are built in threads, a few ahead, and run one at a time in the order given.

What is about to be built or run is logged beside the store, so that a process that
dies of it leaves a record (`cfp.profiling.crashes`), and so that two processes with one
store share the work instead of doing it twice.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from cfp.profiling.builder import Built
from cfp.profiling.compile_pool import CompilePool, awaited
from cfp.profiling.in_flight import InFlight, Limits, settle
from cfp.profiling.record import ProfileRecord, is_to_retry
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import Phase, ProfileSummary, Progress, ProgressCallback, Task

# Built programs hold code in the devices' memory while they wait.
_WAITING_BESIDE_THREADS = 2
# At the end of each batch of builds fewer and fewer threads have something to do: on 2
# H200, with 12 of them, the last two of 26 programs took 5 s after a batch of 24. So
# batches are of one size, at most this.
_BUILT_BY_EACH_THREAD = 4
_LOOK_AGAIN_SECONDS = 0.2

AnyTask = TypeVar("AnyTask", bound=Task)
Outcome = Built | ProfileRecord
Building = Future[Outcome]


def run_tasks(
    tasks: Iterable[AnyTask],
    store: ProfileStore,
    *,
    build: Callable[[AnyTask], Outcome],
    run: Callable[[AnyTask, Built], ProfileRecord],
    threads: int = 1,
    overlap: bool = True,
    retry_failures: bool | datetime = False,
    progress: ProgressCallback | None = None,
    limits: Limits | None = None,
    program: str = "",
    is_late: Callable[[], bool] | None = None,
    open_links: Callable[[AnyTask, Built], object] | None = None,
) -> ProfileSummary:
    """Measures what the store does not know.

    Every record is put into the store the moment it exists, so that an interrupt
    (`KeyboardInterrupt`, which passes through) loses only what is being measured.

    Args:
      tasks: what to measure. Of tasks with one key the first is taken.
      build: builds a task, in a thread; a record if it cannot be built.
      run: runs what was built, in this thread.
      overlap: build while a task runs, which is faster, and disturbs what runs
        where building needs the devices. Otherwise tasks are built and then run in
        batches of one size, of at most four times the number of threads.
      retry_failures: measure again what failed before, or before a moment: a
        process that was started again keeps to the moment of the first start.
      progress: called with every event, in this thread.
      is_late: whether time is over, so that nothing else is begun: what was not
        measured by then has no record.
      open_links: called with the first task once it is built, in its thread, while
        others are built: the first run on devices may take seconds before it begins.
        Not where it would disturb what runs.
    """
    by_key: dict[str, AnyTask] = {}
    for task in tasks:
        by_key.setdefault(task.key.digest, task)
    # By how processes died before, something may be in the store by now.
    settle(store)
    with InFlight(store, limits, program) as in_flight:
        state = _State(
            tasks=by_key,
            build=build,
            run=run,
            store=store,
            in_flight=in_flight,
            retry_failures=retry_failures,
            progress=progress,
            is_late=is_late,
        )
        state.look_up()
        if not overlap:
            state.open_links = open_links
        _measure(state, threads, overlap)
        return state.summary()


def _measure(state: _State, threads: int, overlap: bool) -> None:
    waiting = deque(task for task in state.tasks.values() if not state.has(task))
    ahead: deque[tuple[Task, Building]] = deque()
    room = threads + _WAITING_BESIDE_THREADS if overlap else _batch(threads, waiting)
    room = state.in_flight.at_once(state.tasks, room)
    with CompilePool(threads) as pool:
        try:
            while (waiting or ahead) and not state.ends:
                if overlap or not ahead:
                    claimed = state.claim(waiting, room, len(ahead))
                    ahead.extend(
                        zip(claimed, _started(pool, state, claimed), strict=True)
                    )
                    if not ahead:
                        if waiting:
                            state.tell(waiting[0].label, "wait")
                            time.sleep(_LOOK_AGAIN_SECONDS)
                        continue
                    if not overlap:
                        state.tell(ahead[0][0].label, "build")
                        for task, building in ahead:
                            state.await_build(task, building, ahead)
                # No name here: what was built goes when its turn is over.
                if not state.ends:
                    state.take_turn(*ahead.popleft())
        except CancelledError:
            assert state.ends, "only what is late is not built"


def _batch(threads: int, waiting: Sized) -> int:
    """Returns the number of programs that are built before they run."""
    if threads == 1:
        return 1
    batches = math.ceil(len(waiting) / (_BUILT_BY_EACH_THREAD * threads))
    return math.ceil(len(waiting) / max(1, batches))


def _started(pool: CompilePool, state: _State, tasks: Sequence[Task]) -> list[Building]:
    """Builds of tasks, in their order; those that are to come after others wait."""
    digests = {task.key.digest for task in tasks}
    builds: dict[str, Building] = {}
    for task in sorted(tasks, key=lambda task: not task.after.isdisjoint(digests)):
        before = [builds[digest] for digest in task.after if digest in builds]
        opens, state.open_links = state.open_links, None  # By the first alone.
        build = partial(_build, state, task, opens)
        builds[task.key.digest] = pool.start(task.label, build, before)
    return [builds[task.key.digest] for task in tasks]


def _build(
    state: _State, task: Task, opens: Callable[[Any, Built], object] | None
) -> Outcome:
    """Builds a task, in a thread, and opens links by it where that is asked for."""
    if state.ends:
        raise CancelledError  # Nothing waits for it any more.
    with state.in_flight.doing(task.key, task.label, "build", then_wait=True):
        outcome = state.build(task)
        if isinstance(outcome, ProfileRecord):
            state.keep(outcome)
    if opens is not None and isinstance(outcome, Built):
        with state.in_flight.doing(task.key, task.label, "run", then_wait=True):
            opens(task, outcome)
    return outcome


@dataclass(slots=True)
class _State:
    tasks: Mapping[str, Task]
    build: Callable[[Any], Outcome]
    run: Callable[[Any, Built], ProfileRecord]
    store: ProfileStore
    in_flight: InFlight
    retry_failures: bool | datetime
    progress: ProgressCallback | None
    is_late: Callable[[], bool] | None = None
    open_links: Callable[[Any, Built], object] | None = None
    records: dict[str, ProfileRecord] = field(default_factory=dict)
    to_retry: dict[str, ProfileRecord] = field(default_factory=dict)
    cached: int = 0
    measured: int = 0
    failed: int = 0
    best_ms: float = math.inf
    build_seconds: float = 0.0
    run_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def ends(self) -> bool:
        """True if nothing else is to begin."""
        return self.is_late is not None and self.is_late()

    def has(self, task: Task) -> bool:
        return task.key.digest in self.records

    def look_up(self) -> None:
        known = self.store.get_many(self.tasks)
        self.to_retry = {
            digest: record
            for digest, record in known.items()
            if is_to_retry(record, self.retry_failures)
        }
        for digest in self.tasks:
            if digest in known and digest not in self.to_retry:
                self._answer(known[digest])
        self.tell("", "look up")

    def _answer(self, record: ProfileRecord) -> None:
        self.records[record.key] = record
        self.cached += 1
        self.best_ms = min(self.best_ms, record.time_ms)

    def claim(self, waiting: deque[Task], room: int, used: int) -> list[Task]:
        """Takes tasks that no other process has claimed out of the queue, to be built.

        What another process has measured meanwhile is answered.
        """
        while waiting and room > used:
            keys = [task.key for task in waiting]
            # What was claimed is no other process's, so that this is final.
            ours = {key.digest for key in self.in_flight.claim(keys, room - used)}
            known = {
                digest: record
                for digest, record in self.store.get_many(ours).items()
                if record != self.to_retry.get(digest)
            }
            taken = [task for task in waiting if task.key.digest in ours]
            for task in taken:
                waiting.remove(task)
                if task.key.digest in known:
                    self._answer(known[task.key.digest])
                    self.in_flight.release(task.key)
                    self.tell(task.label, "done")
            if len(known) < len(taken) or not taken:
                return [task for task in taken if task.key.digest not in known]
        return []

    def await_build(
        self, task: Task, built: Building, among: Iterable[tuple[Task, Building]]
    ) -> Outcome:
        """Waits for a build, and tells how many are awaited, and how long that takes.

        Args:
            among: builds that are awaited one after another.
        """

        def say(seconds: float) -> None:
            left = sum(not building.done() for _, building in among)
            self.tell(task.label, "build", left, seconds)

        return awaited(built, say)

    def take_turn(self, task: Task, built: Building) -> None:
        if not built.done():
            self.tell(task.label, "build")
        outcome = self.await_build(task, built, [(task, built)])
        if isinstance(outcome, Built):
            self.tell(task.label, "run")
            with self.in_flight.doing(
                task.key, task.label, "run", task.expected_ms, then_wait=True
            ):
                outcome = self.run(task, outcome)
            self.keep(outcome)
        self.in_flight.release(task.key)
        self.records[task.key.digest] = outcome
        if outcome.ok:
            self.measured += 1
        else:
            self.failed += 1
        self.best_ms = min(self.best_ms, outcome.time_ms)
        self.build_seconds += outcome.build_seconds
        self.run_seconds += outcome.run_seconds
        self.tell(task.label, "done")

    def keep(self, record: ProfileRecord) -> None:
        # A newer failure takes the place of the older one that was tried again.
        kept = self.store.get(record.key) if self.retry_failures else None
        self.store.put(record, replace=kept is not None and not kept.ok)

    def tell(
        self, label: str, phase: Phase, awaited: int = 0, awaited_seconds: float = 0.0
    ) -> None:
        if self.progress is None:
            return
        self.progress(
            Progress(
                done=len(self.records),
                cached=self.cached,
                failed=self.failed,
                total=len(self.tasks),
                best_ms=self.best_ms,
                label=label,
                phase=phase,
                elapsed_seconds=time.perf_counter() - self.started,
                awaited=awaited,
                awaited_seconds=awaited_seconds,
            )
        )

    def summary(self) -> ProfileSummary:
        return ProfileSummary(
            records={k: self.records[k] for k in self.tasks if k in self.records},
            measured=self.measured,
            cached=self.cached,
            failed=self.failed,
            build_seconds=self.build_seconds,
            run_seconds=self.run_seconds,
        )
