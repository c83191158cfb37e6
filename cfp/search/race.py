"""The race: whole programs, compiled and timed in turn; the fastest is the answer."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime

from jax.sharding import Mesh

from cfp.profiling.builder import BuildEnvironment, Built, Job, build
from cfp.profiling.deaths import bury
from cfp.profiling.marks import Limits, Marks
from cfp.profiling.record import ProfileRecord, is_to_retry, utc_now
from cfp.profiling.runner import TimingOptions, run
from cfp.profiling.store import ProfileStore
from cfp.profiling.threads import default_threads, with_settings
from cfp.program.graph import Program
from cfp.search.answers import keep_race, of_one_race
from cfp.search.finalist import Finalist, RaceResult
from cfp.search.spread import is_tie

# What one finalist gets in a turn: a look at first, which tells who is far behind,
# then more. Turns are short, so that a drift of the clocks meets all alike.
_LOOK_ON_CPUS = TimingOptions(
    warmup_seconds=0.1, min_samples=2, max_samples=3, budget_seconds=0.4
)
_TURN_ON_CPUS = TimingOptions(
    warmup_seconds=0.15, min_samples=2, max_samples=6, budget_seconds=0.7
)
# Devices at their power limit slow down as they work: on 2 H200 the same step took
# 141 ms after 0.4 s, 151 ms after 0.9 s and 146 ms in the long run. Times compare that
# are as long after the beginning: everybody gets one sample, of as many executions
# after as many; in a turn they last so long.
_LOOK_ELSEWHERE = TimingOptions(
    warmup_seconds=0.0,
    min_samples=1,
    max_samples=1,
    budget_seconds=0.0,
    min_sample_ms=60.0,
    min_repeat=3,
)
_TURN_MS_ELSEWHERE = 500.0

# Who is slower than this many times the fastest of a turn sits out: after the look, and
# after every turn.
_HOPE_AT_FIRST = 1.08
_HOPE = 1.04
# How many more turns there may be until the fastest took part in the last two, so that
# most of its samples are of the same time as those of the others, and until it is clear
# that it is faster than the next one.
_MORE_ROUNDS = 3


def race(
    program: Program,
    mesh: Mesh,
    finalists: Sequence[Finalist],
    store: ProfileStore,
    *,
    budget_bytes: int | None = None,
    rounds: int = 3,
    end: float = math.inf,
    programs: dict[str, Built] | None = None,
    retry_failures: bool | datetime = False,
    progress: Callable[[str], None] | None = None,
    limits: Limits | None = None,
) -> list[RaceResult]:
    """Compiles the finalists whole and times them in turn, A B C A B C.

    Who is far behind after a turn sits out, so that turns go to those between whom it
    is close. Where all others become slower meanwhile, because the devices did, who sat
    out takes part again: nobody wins by having sat out.
    Finalists with one key run once. If all of them are in the store already, from one
    race, nothing runs; otherwise all run again, because only times of one run compare.
    A race that was run with this budget has its answer, whatever ran since; but what
    failed since is out. What failed before is not tried again unless asked.

    Args:
        program: the program.
        mesh: the devices.
        finalists: who takes part.
        store: where records are kept.
        budget_bytes: who needs more memory is not run and cannot win.
        rounds: how many turns there are; a few more where it takes them to tell.
        end: from this moment on (`time.monotonic`) nothing else is compiled, once one
            program is, and no other turn begins.
        programs: compiled programs by the names of finalists: used, and added to.
        retry_failures: run again what failed before, or before a moment.
        progress: told what is being done.
        limits: what counts as hung.

    Returns:
        One result for each finalist, in their order.
    """
    jobs = {f.job.key.digest: f.job for f in finalists}
    bury(store, about=jobs)

    def still_good(found: Mapping[str, ProfileRecord]) -> dict[str, ProfileRecord]:
        return {
            digest: record
            for digest, record in found.items()
            if not is_to_retry(record, retry_failures)
            and not _fits_by_now(record, budget_bytes)
        }

    known = still_good(store.get_many(jobs))
    # What is known to be too large need not be compiled to find that out again.
    out = {d: r for d, r in known.items() if not (r.ok and _fits(r, budget_bytes))}
    raced = {**of_one_race(jobs, budget_bytes, store), **out}

    def is_answer(found: Mapping[str, ProfileRecord]) -> bool:
        # Times of two races do not compare. All of one ended at one moment.
        ended = {r.created for digest, r in found.items() if digest not in out}
        return len(found) == len(jobs) and len(ended) <= 1

    records = next(filter(is_answer, (raced, known)), None)
    cached = records is not None
    if records is None:
        again = {digest: job for digest, job in jobs.items() if digest not in out}
        expected = {f.job.key.digest: f.predicted_ms or 0.0 for f in finalists}
        places = {f.job.key.digest: f.place or (program, mesh) for f in finalists}
        ratios = {f.job.key.digest: f.whole.time_ratio for f in finalists}
        with Marks(store.path, limits, program.name) as marks:
            built = {} if programs is None else programs
            names = defaultdict(list)
            for finalist in finalists:
                names[finalist.job.key.digest].append(finalist.name)
            turns = _Turns(places, mesh, again, expected, marks, names, built, ratios)
            ran = turns.run(store, budget_bytes, rounds, progress, end)
            records = {**out, **ran}
    if records is not raced:
        ran = {digest: r for digest, r in records.items() if digest not in out}
        keep_race(jobs, budget_bytes, ran, store)
    late = {d: _late(job) for d, job in jobs.items() if d not in records}
    records = {**records, **late}
    results = []
    for finalist in finalists:
        record = records[finalist.job.key.digest]
        results.append(
            RaceResult(
                name=finalist.name,
                predicted_ms=finalist.predicted_ms,
                record=record,
                peak_bytes=round(finalist.whole.bytes_ratio * record.peak_bytes),
                fits=_fits(record, budget_bytes),
                cached=cached,
                whole=finalist.whole,
            )
        )
    return results


def _late(job: Job) -> ProfileRecord:
    """What a race says of a program for which there was no time; it is not stored."""
    reason = "not compiled, since the time for planning was over"
    key = job.key
    return ProfileRecord(
        key=key.digest, parts=key.parts, status="timeout", reason=reason
    )


def _fits(record: ProfileRecord, budget_bytes: int | None) -> bool:
    return budget_bytes is None or record.peak_bytes <= budget_bytes


def _fits_by_now(record: ProfileRecord, budget_bytes: int | None) -> bool:
    """Whether something was refused for its size alone, and the budget has grown."""
    return _is_refused(record) and _fits(record, budget_bytes)


def _is_refused(record: ProfileRecord) -> bool:
    compiled = record.peak_bytes > 0 and not record.run_seconds
    return record.status == "out_of_memory" and compiled


def _keep(records: Sequence[ProfileRecord], store: ProfileStore) -> None:
    """Keeps what became of finalists together, since half a race is none.

    What another process measured meanwhile, with a larger budget, says more than that
    it is too large for this one.
    """
    known = store.get_many(record.key for record in records if _is_refused(record))
    measured = {digest for digest, record in known.items() if record.ok}
    news = [record for record in records if record.key not in measured]
    store.put_all(news, replace=True)


def first_that_fits(
    program: Program,
    mesh: Mesh,
    finalists: Iterable[Finalist],
    store: ProfileStore,
    *,
    budget_bytes: int,
    retry_failures: bool | datetime = False,
    progress: Callable[[str], None] | None = None,
    limits: Limits | None = None,
) -> tuple[list[RaceResult], int | None]:
    """Compiles finalists one after another until one fits in memory; none runs.

    What was compiled for a race before is known from the store.

    Args:
        program, mesh, store, retry_failures, limits: as for :func:`race`.
        finalists: the best first.
        budget_bytes: memory of one device.
        progress: told what is being done.

    Returns:
        Those before the first that fits: too large, or failures. And what that one
        needs on each device, or None if there is none.
    """
    refused = []
    for finalist in finalists:
        job = finalist.job
        bury(store, about={job.key.digest})
        outcome: Built | ProfileRecord | None = store.get(job.key.digest)
        if (
            outcome is None
            or is_to_retry(outcome, retry_failures)
            or _fits_by_now(outcome, budget_bytes)
        ):
            with Marks(store.path, limits, program.name) as marks:
                place = {job.key.digest: (program, mesh)}
                turns = _Turns(place, mesh, {job.key.digest: job}, {}, marks)
                [(_, outcome)] = turns._built(store, progress or (lambda _: None))
            if isinstance(outcome, Built):
                if outcome.peak_bytes <= budget_bytes:
                    return refused, outcome.peak_bytes
                reason = f"needs {outcome.peak_bytes} bytes of {budget_bytes}"
                outcome = outcome.record("out_of_memory", reason=reason)
            outcome = replace(outcome, choice=job.choice)
            _keep([outcome], store)
        fits = outcome.peak_bytes <= budget_bytes
        if fits and outcome.ok:
            return refused, outcome.peak_bytes
        refused.append(
            RaceResult(
                name=finalist.name,
                predicted_ms=finalist.predicted_ms,
                record=outcome,
                peak_bytes=outcome.peak_bytes,
                fits=fits,
                cached=False,
            )
        )
    return refused, None


@dataclass(frozen=True, slots=True)
class _Turns:
    """Finalists that are built and run, in turn."""

    places: Mapping[str, tuple[Program, Mesh]]
    mesh: Mesh
    jobs: Mapping[str, Job]
    expected_ms: Mapping[str, float]
    marks: Marks
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    programs: dict[str, Built] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)

    def run(
        self,
        store: ProfileStore,
        budget_bytes: int | None,
        rounds: int,
        progress: Callable[[str], None] | None,
        end: float,
    ) -> dict[str, ProfileRecord]:
        tell = progress or (lambda _: None)
        records: dict[str, ProfileRecord] = {}
        ready: dict[str, Built] = {}
        for digest, outcome in self._built(store, tell, end):
            if isinstance(outcome, ProfileRecord):
                records[digest] = outcome
            elif budget_bytes is not None and outcome.peak_bytes > budget_bytes:
                reason = f"needs {outcome.peak_bytes} bytes of {budget_bytes}"
                records[digest] = outcome.record("out_of_memory", reason=reason)
            else:
                ready[digest] = outcome
        order = before = list(ready)
        platform = self.mesh.devices.flat[0].platform
        most = rounds + _MORE_ROUNDS
        for turn in range(most):
            known = [records[d].time_ms for d in order if turn]
            timing = _timing(platform, min(known, default=None))
            of = f"{rounds}" if turn < rounds else f"at most {most}"
            for place in range(len(order)):
                digest = order[(place + turn) % len(order)]
                tell(f"timing {self.jobs[digest].label}, turn {turn + 1} of {of}")
                found = self._time(digest, ready[digest], timing)
                records[digest] = _join(records.get(digest), found)
            times = {d: self._time_of(records)(d) for d in ready}
            best = min((times[d] for d in order), default=0.0)
            steady = min((times[d] for d in order if d in before), default=0.0)
            if time.monotonic() > end:
                break
            settled = steady == min(times.values(), default=0.0)
            if turn + 1 >= rounds and settled and not self._is_close(order, records):
                break
            hope = _HOPE if turn else _HOPE_AT_FIRST
            before = order
            order = [d for d in ready if times[d] <= hope * best]
        ended = utc_now()
        records = {
            d: replace(r, choice=self.jobs[d].choice, created=ended)
            for d, r in records.items()
        }
        _keep(list(records.values()), store)
        return records

    def _is_close(
        self, order: Sequence[str], records: Mapping[str, ProfileRecord]
    ) -> bool:
        """Whether more turns may tell which of the two fastest is faster."""
        able = sorted((d for d in order if records[d].ok), key=self._time_of(records))
        if len(able) < 2 or self.mesh.devices.flat[0].platform == "cpu":
            return False  # Virtual devices are there to try things out.
        one, two = (
            [self.ratios.get(d, 1.0) * ms for ms in records[d].samples_ms]
            for d in able[:2]
        )
        return is_tie(one, two)

    def _time_of(self, records: Mapping[str, ProfileRecord]) -> Callable[[str], float]:
        return lambda digest: self.ratios.get(digest, 1.0) * records[digest].time_ms

    def _built(
        self,
        store: ProfileStore,
        tell: Callable[[str], None],
        end: float = math.inf,
    ) -> Iterator[tuple[str, Built | ProfileRecord]]:
        environment = BuildEnvironment.beside(store.path)
        platform = self.mesh.devices.flat[0].platform
        # Of several builds nobody knows which one a process died of.
        suspects = self.marks.folder.suspects().keys() & self.jobs.keys()
        threads = 1 if suspects else default_threads(platform)
        cache = environment.compilation_cache(platform)
        with cache, ThreadPoolExecutor(threads) as pool:
            works: list[str] = []

            def build_in_time(digest: str) -> Built | ProfileRecord | None:
                if works and time.monotonic() > end:
                    return None
                outcome = self._build(self.jobs[digest], environment)
                works.extend([digest] if isinstance(outcome, Built) else [])
                return outcome

            built = pool.map(with_settings(build_in_time), self.jobs)
            for job in self.jobs.values():
                tell(f"compiling {job.label}")
                if (outcome := next(built)) is not None:
                    yield job.key.digest, outcome

    def _build(self, job: Job, environment: BuildEnvironment) -> Built | ProfileRecord:
        names = self.names.get(job.key.digest, ())
        for name in self.programs.keys() & names:
            return replace(self.programs[name], key=job.key)
        with self.marks.doing(job.key, job.label, "build"):
            outcome = build(*self.places[job.key.digest], job, environment)
        if isinstance(outcome, Built):
            self.programs.update(dict.fromkeys(names, outcome))
        return outcome

    def _time(self, digest: str, built: Built, timing: TimingOptions) -> ProfileRecord:
        job = self.jobs[digest]
        with self.marks.doing(job.key, job.label, "run", self.expected_ms[digest]):
            return run(built, job, *self.places[digest], timing=timing)


def _timing(platform: str, fastest_ms: float | None) -> TimingOptions:
    """How to time everybody in a turn; in a look, where nothing is known of any yet.

    Args:
        platform: of the devices.
        fastest_ms: the fastest step of those in it, or None for a look.
    """
    if platform == "cpu":
        return _LOOK_ON_CPUS if fastest_ms is None else _TURN_ON_CPUS
    if fastest_ms is None:
        return _LOOK_ELSEWHERE
    steps = max(3, math.ceil(_TURN_MS_ELSEWHERE / max(fastest_ms, 1e-3)))
    return replace(_LOOK_ELSEWHERE, min_sample_ms=0.0, min_repeat=steps)


def _join(before: ProfileRecord | None, found: ProfileRecord) -> ProfileRecord:
    if before is None or not (before.ok and found.ok):
        return found
    return replace(
        found,
        samples_ms=before.samples_ms + found.samples_ms,
        run_seconds=before.run_seconds + found.run_seconds,
    )
