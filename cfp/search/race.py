"""The race: whole programs, compiled and timed in turn; the fastest is the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from cfp.profiling.builder import BuildEnvironment, Built, Job, build
from cfp.profiling.pipeline import default_threads
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import TimingOptions, run
from cfp.profiling.store import ProfileStore
from cfp.program.graph import Program

# What one finalist gets in a turn: a look at first, which tells who is far behind,
# then more. Turns are short, so that a drift of the clocks meets all alike.
_LOOK = TimingOptions(
    warmup_seconds=0.15, min_samples=2, max_samples=3, budget_seconds=0.5
)
_TURN = TimingOptions(
    warmup_seconds=0.3, min_samples=3, max_samples=10, budget_seconds=1.5
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A whole program that takes part.

    Attributes:
        name: what it is called in the table.
        job: the whole program under one choice.
        predicted_ms: what the profiles say, or None.
    """

    name: str
    job: Job
    predicted_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """How a finalist did.

    Attributes:
        name, predicted_ms: as in :class:`Finalist`.
        record: what was measured; a failure is a record, too.
        peak_bytes: memory that the compiled program needs on each device.
        fits: whether that is within the budget.
        cached: whether it was answered from the store.
    """

    name: str
    predicted_ms: float | None
    record: ProfileRecord
    peak_bytes: int
    fits: bool
    cached: bool

    @property
    def time_ms(self) -> float:
        """Median step time; infinite for what failed or does not fit."""
        return self.record.time_ms if self.fits and self.record.ok else float("inf")


# Who is slower than this many times the fastest, after a turn, gets no more turns.
_HOPE = 1.1


def peak_bytes(record: ProfileRecord) -> int:
    """Memory that a compiled program needs: arguments, results, temporaries, code."""
    return (
        record.argument_bytes
        + record.output_bytes
        - record.alias_bytes
        + record.temp_bytes
        + record.code_bytes
    )


def race(
    program: Program,
    mesh: Mesh,
    finalists: Sequence[Finalist],
    store: ProfileStore,
    *,
    budget_bytes: int | None = None,
    rounds: int = 3,
    progress: Callable[[str], None] | None = None,
) -> list[RaceResult]:
    """Compiles the finalists whole and times them in turn, A B C A B C.

    Who is far behind after a turn takes no further part, so that turns go to those
    between whom it is close.
    Finalists with one key run once. If all of them are in the store already, nothing
    runs; otherwise all run again, because only times of one run compare.

    Args:
        program: the program.
        mesh: the devices.
        finalists: who takes part.
        store: where records are kept.
        budget_bytes: who needs more memory is not run and cannot win.
        rounds: how many turns each gets.
        progress: told what is being done.

    Returns:
        One result for each finalist, in their order.
    """
    jobs = {f.job.key.digest: f.job for f in finalists}
    known = store.get_many(list(jobs))
    cached = len(known) == len(jobs)
    records: Mapping[str, ProfileRecord] = (
        known
        if cached
        else _run(program, mesh, jobs, store, budget_bytes, rounds, progress)
    )
    results = []
    for finalist in finalists:
        record = records[finalist.job.key.digest]
        peak = peak_bytes(record)
        results.append(
            RaceResult(
                name=finalist.name,
                predicted_ms=finalist.predicted_ms,
                record=record,
                peak_bytes=peak,
                fits=budget_bytes is None or peak <= budget_bytes,
                cached=cached,
            )
        )
    return results


def _run(
    program: Program,
    mesh: Mesh,
    jobs: Mapping[str, Job],
    store: ProfileStore,
    budget_bytes: int | None,
    rounds: int,
    progress: Callable[[str], None] | None,
) -> dict[str, ProfileRecord]:
    records: dict[str, ProfileRecord] = {}
    ready: dict[str, Built] = {}
    environment = BuildEnvironment.beside(store.path)
    platform = mesh.devices.flat[0].platform
    with (
        environment.compilation_cache(platform),
        ThreadPoolExecutor(default_threads(platform)) as pool,
    ):
        builds = {
            digest: pool.submit(build, program, mesh, job, environment)
            for digest, job in jobs.items()
        }
        for digest, pending in builds.items():
            if progress is not None:
                progress(f"compiling {jobs[digest].label}")
            outcome = pending.result()
            if isinstance(outcome, ProfileRecord):
                records[digest] = outcome
            elif budget_bytes is not None and outcome.peak_bytes > budget_bytes:
                reason = f"needs {outcome.peak_bytes} bytes of {budget_bytes}"
                records[digest] = outcome.record("out_of_memory", reason=reason)
            else:
                ready[digest] = outcome
    order = list(ready)
    for turn in range(rounds):
        for place in range(len(order)):
            digest = order[(place + turn) % len(order)]
            if progress is not None:
                progress(f"timing {jobs[digest].label}, turn {turn + 1} of {rounds}")
            timing = _TURN if turn else _LOOK
            found = run(ready[digest], jobs[digest], program, mesh, timing=timing)
            records[digest] = _join(records.get(digest), found)
        best = min((records[d].time_ms for d in order), default=0.0)
        order = [d for d in order if records[d].time_ms <= _HOPE * best]
    for record in records.values():
        store.put(record, replace=True)
    return records


def _join(before: ProfileRecord | None, found: ProfileRecord) -> ProfileRecord:
    if before is None or not (before.ok and found.ok):
        return found
    return replace(
        found,
        samples_ms=before.samples_ms + found.samples_ms,
        run_seconds=before.run_seconds + found.run_seconds,
    )
