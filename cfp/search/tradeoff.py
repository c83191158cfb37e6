"""The frontier of step time and memory.

A choice is on the frontier if no other is as fast in less memory, or faster in as
much. It is found by solving under one budget after another: the cheapest choice that
fits, and the leanest of those that cost as little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cfp.search.problem import Assignment, Problem
from cfp.search.solver import leanest, solve_within

# Budgets are told apart to this many bytes: a solver's tolerances are no finer.
_GRAIN_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """The frontier.

    Attributes:
        points: choices, the leanest and slowest first. No choice is as fast as one of
            them in less memory.
        complete: whether these are known to be all.
    """

    points: tuple[Assignment, ...]
    complete: bool


def trade_off(problem: Problem, most: int = 20) -> TradeOff:
    """The frontier of a problem, whatever its budget.

    Args:
        most: how many points to find, two or more. Where there are more on the
            frontier, those that are found are spread over memory.
    """
    assert most >= 2, "the ends"
    free = solve_within(problem, None)
    low = solve_within(problem, leanest(problem).memory_bytes)
    high = solve_within(problem, free.memory_bytes)
    points = {point.memory_bytes: point for point in (low, high)}
    gaps = [_Gap(low.memory_bytes, high.memory_bytes, empty_bytes=low.memory_bytes)]
    while True:
        gaps = [gap for gap in gaps if gap.unknown_bytes > _GRAIN_BYTES]
        if not gaps or len(points) >= most:
            break
        gap = max(gaps, key=lambda gap: gap.unknown_bytes)
        gaps.remove(gap)
        budget_bytes = gap.next_budget_bytes
        found = solve_within(problem, budget_bytes)
        size = found.memory_bytes
        if size > gap.low_bytes:
            points[size] = found
            gaps.append(_Gap(gap.low_bytes, size, empty_bytes=gap.low_bytes))
            gaps.append(_Gap(size, gap.high_bytes, empty_bytes=budget_bytes))
        elif not gap.closing:
            gaps.append(replace(gap, empty_bytes=budget_bytes, closing=True))
    return TradeOff(
        points=tuple(points[memory] for memory in sorted(points)),
        complete=not gaps,
    )


@dataclass(frozen=True, slots=True)
class _Gap:
    """Two points, by their memory, and what is known of the budgets between them.

    Attributes:
        low_bytes, high_bytes: of the points.
        empty_bytes: up to this budget nothing is better than the low one.
        closing: whether to ask next right below the high one, and no longer in the
            middle: most gaps are empty, which is known after that.
    """

    low_bytes: int
    high_bytes: int
    empty_bytes: int
    closing: bool = False

    @property
    def unknown_bytes(self) -> int:
        """The unexplored range of budgets, in bytes."""
        return self.high_bytes - self.empty_bytes

    @property
    def next_budget_bytes(self) -> int:
        """The budget to ask for next."""
        if self.closing:
            return self.high_bytes - _GRAIN_BYTES
        return (self.empty_bytes + self.high_bytes) // 2
