"""Results of the search: candidates, a solution, and what it predicts."""

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
        profiles: what the profile pass would find again, where estimates decide.
    """

    time_ms: float
    fits: bool
    profiles: Profiles | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Candidate:
    """A whole program that may become the plan.

    Attributes:
        predicted_ms: its step time by the profiles, or None.
    """

    name: str
    choice: Choice = field(repr=False)
    predicted_ms: float | None = None
    level: ConstraintLevel = ConstraintLevel.EVERYTHING
    options: Mapping[str, str] = field(default_factory=dict)
    is_preset: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that tells whole programs apart."""
        return self.choice, self.level, tuple(sorted(self.options.items()))


# Of a plan's counts how long the races took, and of a solution's those before it.
RACE_SECONDS = "race_seconds"


class Stage(StrEnum):
    """The stages of a search while nothing fits as compiled."""

    PREDICTED = "predicted"  # What fits by prediction.
    CORRECTED = "corrected"  # What fits by what was compiled, too.
    SMALLEST = "smallest"  # What needs least; candidates are compiled one by one.


@dataclass(frozen=True)
class Solution:
    """Result of the search.

    Attributes:
        candidates: the best by prediction, then presets and other promising choices.
        unraced: reason against each preset that does not race.
        problem: the searched problem; None for a preset by name.
        counts: counts and seconds of the passes so far.
        rates: the devices' rates, or None.
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
    """Predicted time and memory of a choice; empty if parts were not measured.

    Attributes:
        size: memory on each device. Values that live from the first op to the last
            count as arguments, also results without a donated argument's place.
    """

    time_ms: float | None = None
    size: CompiledBytes | None = None

    @property
    def peak_bytes(self) -> int | None:
        """All memory that it needs on each device."""
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
