"""Measures jobs: known records come from the store, other jobs are built and run.

Threads build jobs in batches. After each batch, its jobs run one at a time in the given
order: a compile beside a run would slow it (docs/decisions.md, "Building does not
overlap running").

Each build and run is noted in the store before it begins, so that a process that dies
leaves a trace (`cfp.profiling.tasks`). If another process measures the same jobs, this
one waits for a minute at most, and uses the other's records.

XLA's GPU compiler times several kernels for each matrix product, and stores the
outcome. Two programs that time kernels on one device block each other: a kernel waits
0.1 s each time. So the first program with a product tunes it, one program at a time on
each device, and others wait for it (docs/decisions.md, "Each product is tuned by one
program"). XLA tunes on the first device of a mesh. So each of the programs that tune at
once is compiled for the mesh with another device first, and is built afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from cfp.profiling.builder import Built, CompilePool, Job
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import Place
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import InFlight, MeasureOptions, Phase, Progress, Task, settle

# Largest number of builds in a batch, for each thread. Batches have equal sizes, as
# threads are idle at the end of each: on 2 H200 with 12 threads, the last two of 26
# programs took 5 s after a batch of 24.
_BUILT_BY_EACH_THREAD = 4
_LOOK_AGAIN_SECONDS = 0.2
_PATIENCE_SECONDS = 60.0  # Longest wait for another process, which may hang.
_TELL_SECONDS = 5.0  # Between reports of a wait for a build.


AnyTask = TypeVar("AnyTask", bound=Task)
Outcome = Built | ProfileRecord


@dataclass(slots=True)
class Measurer:
    """Looks jobs up in the store, and measures the others at a place.

    Attributes:
        measure: True to measure; False only looks up.
        program: name of the jobs' program, for messages.
        end: deadline (`time.monotonic`), after which no job begins.
        known: keys of the records found that this object did not measure.
    """

    place: Place
    store: ProfileStore
    measure: bool
    options: MeasureOptions
    program: str = ""
    end: float = math.inf
    known: set[str] = field(default_factory=set)
    _measured: set[str] = field(default_factory=set)

    @property
    def has_end(self) -> bool:
        """True if there is a deadline."""
        return math.isfinite(self.end)

    @property
    def is_over(self) -> bool:
        """True after the deadline."""
        return time.monotonic() > self.end

    def look_up(self, jobs: Iterable[Job]) -> dict[str, ProfileRecord]:
        """Returns stored records by key; if `measure`, without failures to retry."""
        options = self.options if self.measure else MeasureOptions()
        found = options.known(self.store, {job.key.digest for job in jobs})
        self.known |= found.keys() - self._measured
        return found

    def __call__(
        self, jobs: Sequence[Job], ignore_end: bool = False
    ) -> Mapping[str, ProfileRecord]:
        """Returns records by key; measures missing ones, and failures to retry.

        Without `measure`, or after the deadline unless ignored, none are measured.
        """
        # May add failures of processes that died.
        settle(self.store)
        known = self.look_up(jobs)
        if not self.measure:
            return known
        self._measured |= {job.key.digest for job in jobs} - known.keys()
        return run_jobs(
            self.place,
            jobs,
            self.store,
            self.options,
            program=self.program,
            is_late=lambda: self.is_over and not ignore_end,
        )


def run_jobs(
    place: Place,
    jobs: Iterable[Task],
    store: ProfileStore,
    options: MeasureOptions | None = None,
    *,
    program: str = "",
    is_late: Callable[[], bool] = lambda: False,
) -> dict[str, ProfileRecord]:
    """Returns jobs' records; measures missing ones, and failures to retry.

    Every record is stored at once, so that an interrupt (`KeyboardInterrupt`) loses
    only the current measurement.

    Args:
      jobs: jobs to measure; of jobs with one key the first counts.
      program: name of the jobs' program, for messages.
      is_late: True after the deadline: no further job begins.

    Returns:
      ``{key: record}`` in the order of the jobs, failures included. Jobs that the
      deadline left unmeasured are absent.

    Raises:
      CfpError: the devices do not work after a crash.
    """
    options = options or MeasureOptions()
    by_key: dict[str, Task] = {}
    for job in jobs:
        by_key.setdefault(job.key.digest, job)
    with InFlight(store, options.limits, program) as in_flight:
        run = _Run(place, by_key, store, in_flight, options, is_late)
        run.measure()
    return {key: run.records[key] for key in by_key if key in run.records}


def build_all(
    jobs: Sequence[AnyTask],
    build: Callable[[AnyTask], Outcome | None],
    in_flight: InFlight,
    *,
    threads: int,
    tell: Callable[[AnyTask, int, int, float], object],
    is_late: Callable[[], bool] = lambda: False,
    tune: Callable[[AnyTask], object] | None = None,
    tuners: int = 1,
    tuned: set[Hashable] | None = None,
) -> dict[str, Outcome]:
    """Builds jobs side by side; one at a time if one may have killed a process.

    Args:
      tell: called when a job is awaited, and every few seconds during the wait, with
        the job, its number, the number of unfinished builds, and the seconds so far.
      is_late: called before each build; after True there is no outcome.
      tune: tunes a job's kernels. Called for the first job with a key in
        `Task.kernels`, `tuners` jobs at a time; builds of jobs with the key wait.
        Not called with one thread.
      tuned: keys that are tuned already; extended.

    Returns ``{key: outcome}``.
    """

    def tune_ahead(job: AnyTask) -> None:
        if tune is not None and not is_late():
            with in_flight.doing(job.key, job.label, "build"):
                tune(job)

    def built(job: AnyTask, needed: Sequence[Future[None]]) -> Outcome | None:
        for one in needed:
            one.exception()  # Raises if it is cancelled, where `wait` would not end.
        if is_late():
            return None
        with in_flight.doing(job.key, job.label, "build"):
            return build(job)

    found: dict[str, Outcome] = {}
    threads = in_flight.at_once([job.key.digest for job in jobs], threads)
    numbers, first = dict[Hashable, int](), list[AnyTask]()
    for job in jobs if tune and threads > 1 else ():
        if new := job.kernels - numbers.keys() - (tuned or set()):
            numbers |= dict.fromkeys(new, len(first))
            first.append(job)

    if tuned is not None:
        tuned.update(numbers)

    def needs(job: AnyTask) -> list[int]:
        return sorted({numbers[one] for one in job.kernels & numbers.keys()})

    # No thread waits for kernels while another job could be built.
    jobs = sorted(jobs, key=lambda job: needs(job)[-1:])
    with CompilePool(threads) as pool, CompilePool(tuners) as ahead:
        begun = [ahead.start(job.label, partial(tune_ahead, job)) for job in first]
        builds = list[Future[Outcome | None]]()
        for job in jobs:
            work = partial(built, job, [begun[number] for number in needs(job)])
            builds.append(pool.start(job.label, work))

        def say(job: AnyTask, number: int, seconds: float) -> None:
            tell(job, number, sum(not one.done() for one in builds), seconds)

        for number, (job, building) in enumerate(zip(jobs, builds, strict=True), 1):
            say(job, number, 0.0)
            began = time.monotonic()
            while not wait([building], timeout=_TELL_SECONDS).done:
                say(job, number, time.monotonic() - began)
            if (outcome := building.result()) is not None:
                found[job.key.digest] = outcome
    return found


def _batch(threads: int, jobs: int) -> int:
    if threads == 1:
        return 1
    batches = math.ceil(jobs / (_BUILT_BY_EACH_THREAD * threads))
    return math.ceil(jobs / max(1, batches))


@dataclass(slots=True)
class _Run:
    place: Place
    jobs: Mapping[str, Task]
    store: ProfileStore
    in_flight: InFlight
    options: MeasureOptions
    is_late: Callable[[], bool]
    records: dict[str, ProfileRecord] = field(default_factory=dict)
    cached: int = 0
    failed: int = 0
    best_ms: float = math.inf
    started: float = field(default_factory=time.perf_counter)

    def measure(self) -> None:
        """Builds and runs unknown jobs, batch by batch.

        Before each batch, looks for records that another process made meanwhile.
        """
        waiting = self._unknown([*self.jobs.values()])
        self.tell("", "look up")
        size = _batch(self.place.threads, len(waiting))
        first = next(iter(waiting), None)

        def build(job: Task) -> Outcome:
            return self._build(job, opens=job is first)

        def say(job: Task, number: int, left: int, seconds: float) -> None:
            self.tell(job.label, "build", left if seconds else 0, seconds)

        patient_until = time.monotonic() + _PATIENCE_SECONDS
        while waiting and not self.is_late():
            with self.store.alone(self.jobs) as is_alone:
                if not is_alone and time.monotonic() < patient_until:
                    self.tell(waiting[0].label, "wait")
                    time.sleep(_LOOK_AGAIN_SECONDS)
                    continue
                waiting = self._unknown(waiting)
                batch, waiting = waiting[:size], waiting[size:]
                built = build_all(
                    batch,
                    build,
                    self.in_flight,
                    threads=self.place.threads,
                    tell=say,
                    is_late=self.is_late,
                    tune=self.place.tune,
                    tuners=self.place.tuners,
                    tuned=self.place.tuned,
                )
                for job in batch:
                    if self.is_late():
                        return
                    # Without a name here, the program is freed after its turn.
                    self._take_turn(job, built.pop(job.key.digest))

    def _unknown(self, jobs: Sequence[Task]) -> list[Task]:
        """Takes stored records, but no failures to retry; returns the other jobs."""
        found = self.options.known(self.store, [job.key.digest for job in jobs])
        self.records |= found
        self.cached += len(found)
        self.best_ms = min([self.best_ms, *(one.time_ms for one in found.values())])
        return [job for job in jobs if job.key.digest not in found]

    def _build(self, job: Task, opens: bool) -> Outcome:
        """Builds a job, and stores a failure; `opens` opens links with the program."""
        outcome = self.place.build(job)
        if isinstance(outcome, ProfileRecord):
            self._keep(outcome)
        elif opens and self.place.open_links is not None:
            with self.in_flight.doing(job.key, job.label, "run"):
                self.place.open_links(job, outcome)
        return outcome

    def _take_turn(self, job: Task, outcome: Outcome) -> None:
        if isinstance(outcome, Built):
            self.tell(job.label, "run")
            with self.in_flight.doing(job.key, job.label, "run", job.expected_ms):
                outcome = self.place.run(job, outcome)
            self._keep(outcome)
        self.records[job.key.digest] = outcome
        self.failed += not outcome.ok
        self.best_ms = min(self.best_ms, outcome.time_ms)
        self.tell(job.label, "done")
        if outcome.status == "crashed":
            # If the devices stopped working, further records would be false.
            self.place.check(outcome)

    def _keep(self, record: ProfileRecord) -> None:
        # A newer failure replaces the older one that was tried again.
        kept = self.store.get(record.key) if self.options.retry_failures else None
        self.store.put(record, replace=kept is not None and not kept.ok)

    def tell(
        self, label: str, phase: Phase, awaited: int = 0, awaited_seconds: float = 0.0
    ) -> None:
        self.options.tell(
            Progress(
                done=len(self.records),
                cached=self.cached,
                failed=self.failed,
                total=len(self.jobs),
                best_ms=self.best_ms,
                label=label,
                phase=phase,
                elapsed_seconds=time.perf_counter() - self.started,
                awaited=awaited,
                awaited_seconds=awaited_seconds,
            )
        )
