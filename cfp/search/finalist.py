"""Who takes part in a race (`cfp.search.race`), and how they did."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from jax.sharding import Mesh

from cfp.profiling.builder import Job
from cfp.profiling.record import ProfileRecord
from cfp.program.graph import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What a program that runs says about the one that it stands for.

    Attributes:
        time_ratio: that one takes so many times as long.
        bytes_ratio: and needs so many times as much memory on each device.
    """

    time_ratio: float = 1.0
    bytes_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A program that takes part.

    Attributes:
        name: what it is called in the table.
        job: the whole program under one choice, or what stands for it.
        predicted_ms: what the profiles say, or None.
        place: the program and the mesh, where they are not those of the race.
        whole: what it says about the whole program.
    """

    name: str
    job: Job
    predicted_ms: float | None = None
    place: tuple[Program, Mesh] | None = None
    whole: Whole = Whole()


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """How a finalist did.

    Attributes:
        name, predicted_ms, whole: as in :class:`Finalist`.
        record: what was measured; a failure is a record, too.
        peak_bytes: memory that the compiled program needs on each device, or by
            `whole` the one that it stands for.
        fits: whether that is within the budget.
        cached: whether it was answered from the store.
    """

    name: str
    predicted_ms: float | None
    record: ProfileRecord
    peak_bytes: int
    fits: bool
    cached: bool
    whole: Whole = Whole()

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
        return tuple(self.whole.time_ratio * ms for ms in self.record.samples_ms)
