"""Candidates as programs that are compiled and timed, and how they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.profiling.builder import Job
from cfp.profiling.key import Parts
from cfp.profiling.record import ProfileRecord
from cfp.program.graph import Program
from cfp.race.truncated import WHOLE, Ratios, Truncated
from cfp.search.measure import whole_job
from cfp.solution import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceProgram:
    """A program that is compiled, and timed if it fits.

    Attributes:
        name: what it is called in the table.
        job: the whole program under one choice, or a truncated one.
        predicted_ms: what the profiles say, or None.
        place: the program and the mesh, where they are not those of the race.
        ratios: what it says about the whole program.
    """

    name: str
    job: Job
    predicted_ms: float | None = None
    place: tuple[Program, Mesh] | None = None
    ratios: Ratios = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """How a program did.

    Attributes:
        name, predicted_ms, ratios: as in :class:`RaceProgram`.
        record: what was measured; a failure is a record, too.
        peak_bytes: memory that the compiled program needs on each device, or by
            `ratios` the whole one.
        fits: whether that is within the budget.
        cached: whether it was answered from the store.
    """

    name: str
    predicted_ms: float | None
    record: ProfileRecord
    peak_bytes: int
    fits: bool
    cached: bool
    ratios: Ratios = WHOLE

    @property
    def ran(self) -> bool:
        """Whether it fits, and nothing failed."""
        return self.fits and self.record.ok

    @property
    def time_ms(self) -> float:
        """Median step time; infinite for what failed or does not fit."""
        return median(self.samples_ms) if self.ran else float("inf")

    @property
    def samples_ms(self) -> tuple[float, ...]:
        """Step times of the whole program."""
        return tuple(self.ratios.time * ms for ms in self.record.samples_ms)


# A candidate, and how it did.
TimedCandidate = tuple[Candidate, RaceResult]


def programs_of(
    analysis: Analysis,
    candidates: Sequence[Candidate],
    environment: Parts,
    truncated: Truncated | None = None,
) -> list[RaceProgram]:
    """Candidates as programs: whole, or truncated."""
    return [
        RaceProgram(
            name=one.name,
            job=whole_job(
                analysis.frame,
                analysis.segments,
                one.choice,
                environment,
                one.name,
                one.level,
                one.options,
                truncated and truncated.programs[one.choice],
            ),
            predicted_ms=one.predicted_ms,
            ratios=truncated.ratios_of(one.choice) if truncated else WHOLE,
        )
        for one in candidates
    ]
