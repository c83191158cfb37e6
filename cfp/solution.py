"""Results of the search: candidates for the plan, and predictions of their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.profiling.collectives import Rates
from cfp.profiling.record import CompiledBytes
from cfp.search.choices import picks_of
from cfp.search.requests import Profiles
from cfp.search.solver import Problem
from cfp.settings import ConstraintLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated cost of the best choice for a program.

    Attributes:
        fits: True if the choice fits in the memory budget, by estimate.
        profiles: result of the profile pass if estimates alone decide; otherwise None.
    """

    time_ms: float
    fits: bool
    profiles: Profiles | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Candidate:
    """A whole program that may become the plan.

    Attributes:
        predicted_ms: step time by the profiles; None if parts were not measured.
        options: XLA compiler options.
    """

    name: str
    choice: Choice = field(repr=False)
    predicted_ms: float | None = None
    level: ConstraintLevel = ConstraintLevel.EVERYTHING
    options: Mapping[str, str] = field(default_factory=dict)
    is_preset: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Key, equal for candidates that compile to the same program."""
        return self.choice, self.level, tuple(sorted(self.options.items()))


# Key of a plan's or solution's counts: seconds of all races so far.
RACE_SECONDS = "race_seconds"


class Stage(StrEnum):
    """Stages of a search; the next begins if no candidate fits when compiled."""

    PREDICTED = "predicted"  # Choices that fit by predicted memory.
    CORRECTED = "corrected"  # The same, corrected by the memory of compiled programs.
    SMALLEST = "smallest"  # Choices of least memory, compiled one by one.


@dataclass(frozen=True)
class Solution:
    """Result of the search.

    Attributes:
        candidates: the best by prediction, then presets and other promising choices.
        unraced: ``{preset that does not race: reason}``.
        problem: the searched problem; None for a preset by name on real devices.
        counts: counts and seconds of the passes so far.
        rates: rates of the devices (compute, memory, collectives); None if not read.
        named: presets and propagated choices among the candidates, with their kernels
            and without rematerialization, by name.
        profiles: the searched profiles; None for a preset by name.
    """

    candidates: Sequence[Candidate]
    unraced: Mapping[str, str] = field(default_factory=dict)
    problem: Problem | None = field(default=None, repr=False)
    counts: Mapping[str, float] = field(default_factory=dict)
    rates: Rates | None = field(default=None, repr=False)
    named: Mapping[str, Choice] = field(default_factory=dict, repr=False)
    profiles: Profiles | None = field(default=None, repr=False)
    stage: Stage = Stage.PREDICTED


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step time and memory of a choice; None if parts were not measured.

    Attributes:
        size: memory of each device. Values that live during the whole step count as
            arguments, also results that reuse no donated argument.
    """

    time_ms: float | None = None
    size: CompiledBytes | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that the choice needs on each device; None if unknown."""
        return self.size and self.size.peak_bytes


def prediction_of(
    analysis: Analysis, problem: Problem | None, choice: Choice
) -> Prediction:
    """Predicts a choice's cost for a whole program."""
    picks = None if problem is None else picks_of(analysis, problem, choice)
    if problem is None or picks is None:
        return Prediction()
    held = problem.fixed_bytes + problem.state_bytes(picks)
    rest = problem.memory_bytes(picks) - held
    size = CompiledBytes(argument_bytes=held, temp_bytes=rest)
    return Prediction(problem.cost_ms(picks), size)
