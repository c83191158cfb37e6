"""The search problem as pure data, and its solution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cfp.cost.costs import SegmentChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A choice for a kind of segment with its cost, measured or expected.

    Attributes:
        time_ms: what the segment adds to a step.
        residual_bytes: values kept from the forward to the backward pass.
        temp_bytes: the most that the segment needs besides, while it runs.
    """

    candidate: SegmentChoice
    time_ms: float
    state_bytes: int
    residual_bytes: int
    temp_bytes: int

    @property
    def held_bytes(self) -> int:
        """State and residuals together."""
        return self.state_bytes + self.residual_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Pick one option for every segment.

    Attributes:
        kinds: for each segment its kind.
        options: for each kind its options.
        edge_ms: for a pair of kinds that follow each other, ``[option][option]``
            milliseconds to reshard what passes between them.
        far_ms: the same for two places that do not follow each other, the first before
            the second: tied weights, skips, what a decoder reads of an encoder.
        fixed_ms: time that every choice takes, beside that of its segments.
        fixed_bytes: memory that every choice needs.
        kept: for each kind the indices of the options that may be picked, or None if
            all may.
    """

    kinds: tuple[int, ...]
    options: tuple[tuple[Option, ...], ...]
    edge_ms: Mapping[tuple[int, int], Sequence[Sequence[float]]]
    far_ms: Mapping[tuple[int, int], Sequence[Sequence[float]]] = field(
        default_factory=dict
    )
    fixed_ms: float = 0.0
    fixed_bytes: int = 0
    budget_bytes: int | None = None
    kept: tuple[tuple[int, ...], ...] | None = None
    looked_for: dict[Any, Any] = field(init=False, default_factory=dict, compare=False)

    def with_options(self, change: Callable[[Option], Option]) -> Problem:
        """The problem with something else in the place of each option."""
        return replace(
            self, options=tuple(tuple(map(change, row)) for row in self.options)
        )

    def picked(self, picks: Sequence[int]) -> list[Option]:
        """The options that one index per segment stands for."""
        pairs = zip(self.kinds, picks, strict=True)
        return [self.options[kind][pick] for kind, pick in pairs]

    def cost_ms(self, picks: Sequence[int]) -> float:
        """The predicted time of one option index per segment."""
        total = sum((option.time_ms for option in self.picked(picks)), self.fixed_ms)
        for i in range(len(picks) - 1):
            matrix = self.edge_ms.get((self.kinds[i], self.kinds[i + 1]))
            if matrix is not None:
                total += matrix[picks[i]][picks[i + 1]]
        for (i, j), matrix in self.far_ms.items():
            total += matrix[picks[i]][picks[j]]
        return total

    def state_bytes(self, picks: Sequence[int]) -> int:
        """Returns the bytes of parameters and optimizer state."""
        return sum(option.state_bytes for option in self.picked(picks))

    def memory_bytes(self, picks: Sequence[int]) -> int:
        """Computes the predicted peak.

        State is there all the time. A segment's residuals live from its forward pass to
        its backward pass, so a segment runs beside the residuals of all segments before
        it.
        """
        kept = peak = 0
        for option in self.picked(picks):
            kept += option.residual_bytes
            peak = max(peak, kept + option.temp_bytes)
        return self.fixed_bytes + self.state_bytes(picks) + peak

    def fits(self, picks: Sequence[int]) -> bool:
        """True if a choice stays within the budget."""
        return self.budget_bytes is None or (
            self.memory_bytes(picks) <= self.budget_bytes
        )

    def solution(self, picks: Sequence[int]) -> Assignment:
        """A choice with what it costs."""
        return Assignment(
            picks=tuple(picks),
            cost_ms=self.cost_ms(picks),
            memory_bytes=self.memory_bytes(picks),
        )

    def among(self, kept: Sequence[Sequence[int]]) -> Problem:
        """Returns the problem with some of the options only.

        Args:
            kept: for each kind the indices of the allowed options. Options keep their
                numbers, so that picks mean the same in both problems.
        """
        return replace(self, kept=tuple(map(tuple, kept)))

    def allowed(self, kind: int) -> Sequence[int]:
        """The indices of the options of a kind that may be picked."""
        return range(len(self.options[kind])) if self.kept is None else self.kept[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The outcome of a solver.

    Attributes:
        picks: the option index for each segment.
        memory_bytes: its predicted peak memory on each device.
    """

    picks: tuple[int, ...]
    cost_ms: float
    memory_bytes: int


def scale_memory(problem: Problem, factor: float) -> Problem:
    """The problem as if all memory that is no state were so many times as much."""

    def scaled(option: Option) -> Option:
        return replace(
            option,
            residual_bytes=round(factor * option.residual_bytes),
            temp_bytes=round(factor * option.temp_bytes),
        )

    return problem.with_options(scaled)
