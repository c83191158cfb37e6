"""The race: whole programs, compiled and timed in turn; the fastest is the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from cfp.profiling.builder import Built, Job, build
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import run
from cfp.profiling.store import ProfileStore
from cfp.program.graph import Program


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
        known if cached else _run(program, mesh, jobs, store, budget_bytes, rounds, progress)
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
    for digest, job in jobs.items():
        if progress is not None:
            progress(f"compiling {job.label}")
        outcome = build(program, mesh, job)
        if isinstance(outcome, ProfileRecord):
            records[digest] = outcome
        else:
            ready[digest] = outcome
    order = list(ready)
    for turn in range(rounds):
        for digest in order[turn % len(order) :] + order[: turn % len(order)]:
            if digest in records and not records[digest].ok:
                continue
            job = jobs[digest]
            if progress is not None:
                progress(f"timing {job.label}, turn {turn + 1} of {rounds}")
            found = _turn(ready[digest], job, program, mesh, budget_bytes)
            records[digest] = _join(records.get(digest), found)
    for record in records.values():
        store.put(record, replace=True)
    return records


def _turn(
    built: Built, job: Job, program: Program, mesh: Mesh, budget_bytes: int | None
) -> ProfileRecord:
    started = time.perf_counter()
    needed = built.peak_bytes
    if budget_bytes is not None and needed > budget_bytes:
        return built.record(
            "out_of_memory",
            reason=f"needs {needed} bytes, the budget is {budget_bytes}",
            run_seconds=time.perf_counter() - started,
        )
    return run(built, job, program, mesh)


def _join(before: ProfileRecord | None, found: ProfileRecord) -> ProfileRecord:
    if before is None or not found.ok:
        return found
    return replace(
        found,
        samples_ms=before.samples_ms + found.samples_ms,
        run_seconds=before.run_seconds + found.run_seconds,
    )
