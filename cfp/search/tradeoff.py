"""How fast a step can be in how much memory: the frontier of both.

A choice is on the frontier if no other is as fast in less memory, or faster in as
much. It is found by solving under one budget after another: the cheapest choice that
fits, and the leanest of those that cost as little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cfp.search.bounds import unlimited
from cfp.search.dynamic import smallest_budget, solve_dynamically
from cfp.search.problem import Problem, Solved

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

    points: tuple[Solved, ...]
    complete: bool


def trade_off(problem: Problem, most: int = 20) -> TradeOff:
    """The frontier of a problem, whatever its budget.

    Args:
        problem: the problem.
        most: how many points to find, two or more. Where there are more on the
            frontier, those that are found are spread over memory.
    """
    assert most >= 2, "the ends"
    low = _point(problem, smallest_budget(problem))
    high = _point(problem, unlimited(problem).memory_bytes)
    points = {low.memory_bytes: low, high.memory_bytes: high}
    gaps: list[_Gap] = []

    def add(low: Solved, high: Solved, empty_bytes: int, closing: bool) -> None:
        if high.memory_bytes - empty_bytes > _GRAIN_BYTES:
            gap = _Gap(low=low, high=high, empty_bytes=empty_bytes, closing=closing)
            gaps.append(gap)

    add(low, high, low.memory_bytes, False)
    while gaps and len(points) < most:
        gap = max(gaps, key=lambda gap: gap.high.memory_bytes - gap.empty_bytes)
        gaps.remove(gap)
        found = _point(problem, gap.budget_bytes)
        if found.memory_bytes > gap.low.memory_bytes:
            points[found.memory_bytes] = found
            add(gap.low, found, gap.low.memory_bytes, False)
            add(found, gap.high, gap.budget_bytes, False)
        elif not gap.closing:
            add(gap.low, gap.high, gap.budget_bytes, True)
    return TradeOff(
        points=tuple(points[memory] for memory in sorted(points)),
        complete=not gaps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Two points, and what is known of the budgets between them.

    Attributes:
        low, high: the points.
        empty_bytes: up to this budget there is nothing better than `low`.
        closing: whether to ask next right below `high`, and no longer in the middle:
            most gaps are empty, which is known after that.
    """

    low: Solved
    high: Solved
    empty_bytes: int
    closing: bool

    @property
    def budget_bytes(self) -> int:
        """The budget to ask for next."""
        if self.closing:
            return self.high.memory_bytes - _GRAIN_BYTES
        return (self.empty_bytes + self.high.memory_bytes) // 2


def _point(problem: Problem, budget_bytes: int) -> Solved:
    """The fastest choice within a budget, and the leanest of those."""
    found = solve_dynamically(replace(problem, budget_bytes=budget_bytes), lean=True)
    assert found is not None, "the leanest choice fits"
    return found
