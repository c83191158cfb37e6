"""Compiles whole programs, in threads, and says which of them fit in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from jax.sharding import Mesh

from cfp.devices.described import DescribedMesh
from cfp.printable import waiting_text
from cfp.profiling.builder import BuildEnvironment, Built, Job, build
from cfp.profiling.compile_pool import default_threads
from cfp.profiling.in_flight import InFlight, settle
from cfp.profiling.jobs import build_all
from cfp.profiling.record import CompiledBytes, ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import MeasureOptions
from cfp.program.graph import Program
from cfp.race.programs import (
    TOO_LATE,
    RaceProgram,
    RaceResult,
    Untimed,
    is_compiled_too_large,
)
from cfp.settings import TUNED_FIRST, TUNING_AT_ONCE, defaults_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Compiles candidate programs for the devices of the race.

    Attributes:
        program: the program, for candidates without one of their own.
        budget_bytes: memory of each device that a program may need, or None.
        end: time (`time.monotonic`) after which no further compile begins, once one
            has, and no program is timed again.
    """

    program: Program
    mesh: Mesh | DescribedMesh
    store: ProfileStore
    budget_bytes: int | None = None
    end: float = math.inf
    options: MeasureOptions = field(default_factory=MeasureOptions)
    built: dict[str, Built] = field(default_factory=dict, repr=False)

    @property
    def devices(self) -> Mesh:
        """The mesh that programs run on."""
        assert isinstance(self.mesh, Mesh), "nothing runs on described devices"
        return self.mesh

    @property
    def platform(self) -> str:
        """Platform of the compiler: for described devices this machine's."""
        is_here = isinstance(self.mesh, Mesh)
        return self.devices.devices.flat[0].platform if is_here else "cpu"

    @property
    def is_measured(self) -> bool:
        """True if steps are timed on devices whose times decide."""
        return not defaults_of(self.platform).estimates

    @property
    def at_once(self) -> int:
        """Programs that compile side by side, at most."""
        return default_threads(self.platform)

    def build(self, one: RaceProgram) -> Built | ProfileRecord:
        """Compiles a program; for described devices in a child."""
        program, mesh = one.stands_on or (self.program, self.mesh)
        if isinstance(mesh, Mesh):
            kept = BuildEnvironment.beside(self.store.path)
            return build(program, mesh, one.job, kept)
        from cfp.devices.elsewhere import build_elsewhere

        limit = self.options.limits.build_seconds
        return build_elsewhere(program, mesh, one.job, limit)

    @property
    def in_flight(self) -> InFlight:
        """To be entered while something is built or run."""
        return InFlight(self.store, self.options.limits, self.program.name)


def compile_programs(
    builder: Builder, programs: Sequence[RaceProgram]
) -> list[RaceResult]:
    """Compiles programs without running them, and keeps those that fail.

    Results of earlier races come from the store. Programs that are too large, or fail,
    are stored.

    Returns:
        A result for each program, in order; without samples if it fits.
    """
    known = known_records(builder, [one.job.key.digest for one in programs])
    new = [one for one in programs if one.job.key.digest not in known]
    with builder.in_flight as in_flight:
        fresh = build_each(builder, new, in_flight)
    failed = [one for one in fresh.values() if isinstance(one, ProfileRecord)]
    keep(failed, builder.store)
    return results_of(programs, {**fresh, **known}, builder.budget_bytes, known)


def build_each(
    builder: Builder, programs: Sequence[RaceProgram], in_flight: InFlight
) -> dict[str, Built | ProfileRecord]:
    """Builds programs side by side, each once.

    When time is over, one program is begun if none was before.

    Returns:
        By key: programs that fit, and records of those that fail or do not fit.
    """
    wanted = {one.job.key.digest: one for one in programs}
    built, most_bytes, threads = builder.built, builder.budget_bytes, builder.at_once
    there = {
        digest: replace(ready, key=one.job.key)
        for digest, one in wanted.items()
        if (ready := built.get(one.identity)) is not None
    }
    jobs = [one.job for digest, one in wanted.items() if digest not in there]
    batches, begun, over = [jobs], count(), count(1)
    if BuildEnvironment.beside(builder.store.path).is_untuned(builder.platform):
        threads = min(TUNING_AT_ONCE, threads)
        batches = [jobs[:TUNED_FIRST], jobs[TUNED_FIRST:]]

    def is_late() -> bool:
        return bool(there or next(begun)) and time.monotonic() > builder.end

    def build_one(job: Job) -> Built | ProfileRecord:
        one = wanted[job.key.digest]
        outcome = builder.build(one)
        if isinstance(outcome, Built):
            built[one.identity] = outcome
        return outcome

    def tell(job: Job, number: int, left: int, seconds: float) -> None:
        if not seconds:
            which = f", {next(over)} of {len(jobs)}" if len(jobs) > 1 else ""
            builder.options.tell(f"compiling {job.label}{which}")
        elif left == 1:
            builder.options.tell(waiting_text(job.label, seconds))

    outcomes: dict[str, Built | ProfileRecord] = {**there}
    for batch in batches:
        outcomes |= build_all(
            batch, build_one, in_flight, threads=threads, tell=tell, is_late=is_late
        )
    found: dict[str, Built | ProfileRecord] = {}
    for digest, one in wanted.items():
        if (outcome := outcomes.get(digest)) is None:
            continue
        if isinstance(outcome, Built) and not fits(outcome, most_bytes):
            reason = f"needs {outcome.peak_bytes} bytes of {most_bytes}"
            outcome = outcome.record("out_of_memory", reason=reason)
        if isinstance(outcome, ProfileRecord):
            outcome = replace(outcome, choice=one.job.choice)
        found[digest] = outcome
    return found


def results_of(
    programs: Sequence[RaceProgram],
    outcomes: Mapping[str, ProfileRecord | Built],
    budget_bytes: int | None,
    cached: Collection[str],
) -> list[RaceResult]:
    """Returns programs' results; a program without an outcome came too late.

    Args:
        programs: in the order of the results.
        cached: keys of results from the store.
    """
    found = []
    for one in programs:
        digest = one.job.key.digest
        outcome = outcomes.get(digest, Untimed(reason=TOO_LATE))
        if isinstance(outcome, Built):
            outcome = Untimed(size=outcome.size, collectives=outcome.collectives)
        found.append(
            RaceResult(
                program=one,
                outcome=outcome,
                fits=fits(outcome.size, budget_bytes),
                cached=digest in cached,
            )
        )
    return found


def known_records(
    builder: Builder, digests: Collection[str]
) -> dict[str, ProfileRecord]:
    """Records of programs, by key, that need not be made again."""
    settle(builder.store)
    return {
        digest: record
        for digest, record in builder.store.get_many(digests).items()
        if not builder.options.retries(record)
        # Something was refused for its size alone, and the budget has grown.
        and not (is_compiled_too_large(record) and fits(record, builder.budget_bytes))
    }


def fits(size: CompiledBytes, budget_bytes: int | None) -> bool:
    """True if a program needs no more memory than the budget."""
    return budget_bytes is None or size.peak_bytes <= budget_bytes


def keep(records: Sequence[ProfileRecord], store: ProfileStore) -> None:
    """Stores the results of a race in one transaction; a part of a race is unusable.

    A measurement that another process made meanwhile, with a larger budget, is not
    replaced by the result that the program is too large for this one.
    """
    known = store.get_many(
        record.key for record in records if is_compiled_too_large(record)
    )
    measured = {digest for digest, record in known.items() if record.ok}
    news = [record for record in records if record.key not in measured]
    store.put_all(news, replace=True)
