"""What a choice costs at least, found at once.

Without a budget the cheapest choice is a shortest path. With one, the budget is relaxed
to a price: every byte of state and of kept values costs so many milliseconds, and the
budget is worth as much. Whoever stays within the budget costs no more at any price, so
the cheapest choice at a price is a bound (Lagrangian relaxation). The price that bounds
best is found once, and does well for problems that differ little, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cfp.search.distant import Distant, cheapest
from cfp.search.problem import Option, Problem, Solution, solution

# A price is found to one part in 2^20.
_HALVINGS = 20


def costs_to_go(problem: Problem) -> list[np.ndarray]:
    """For each segment and option what the segments behind it cost at least, in ms.

    That is what they cost, if nothing passes further than to the next segment.
    """
    distant, found = Distant(problem), []
    behind = np.zeros(0)
    for place in reversed(range(len(problem.kinds))):
        kind = problem.kinds[place]
        to_go = np.zeros(len(problem.options[kind]))
        if found:
            matrix = problem.edge_ms.get((kind, problem.kinds[place + 1]))
            edges = 0.0 if matrix is None else np.asarray(matrix, float)
            to_go = (to_go[:, None] + edges + behind).min(axis=1)
        found.append(to_go)
        times = np.array([option.time_ms for option in problem.options[kind]])
        behind = to_go + times + distant.least_ms(place)
    return found[::-1]


def unlimited(problem: Problem) -> Solution:
    """The fastest choice without a budget."""
    behind = costs_to_go(problem)
    if problem.far_ms:
        return cheapest(problem, behind)
    picks: list[int] = []
    for place, to_go in enumerate(behind):
        kind = problem.kinds[place]
        cost = to_go + [option.time_ms for option in problem.options[kind]]
        if picks:
            matrix = problem.edge_ms.get((problem.kinds[place - 1], kind))
            if matrix is not None:
                cost = cost + np.asarray(matrix[picks[-1]], float)
        picks.append(int(cost.argmin()))
    return solution(problem, picks)


def at_price(problem: Problem, price: float) -> Problem:
    """The problem with memory at a price, in ms for a byte, and no budget."""
    priced = tuple(
        tuple(replace(o, time_ms=o.time_ms + price * _bytes(o)) for o in options)
        for options in problem.options
    )
    return replace(problem, options=priced, budget_bytes=None)


def holding_least(problem: Problem) -> Solution:
    """The choice that holds the least memory, temporaries left out."""
    held = tuple(
        tuple(replace(o, time_ms=float(_bytes(o))) for o in options)
        for options in problem.options
    )
    found = unlimited(replace(problem, options=held, edge_ms={}, far_ms={}))
    return solution(problem, found.picks)


def memory_price(problem: Problem) -> float:
    """What a byte should cost, in ms, for a tight bound: 0 if memory does not matter.

    The higher the price, the less the cheapest choice needs. Where it begins to fit is
    the best price; if it never does, there is none, and a high one is returned.
    """
    if problem.budget_bytes is None or _fits(problem, 0.0):
        return 0.0
    high = unlimited(problem).cost_ms / max(1, problem.budget_bytes)
    doublings = 0
    while not _fits(problem, high) and doublings < _HALVINGS:
        high, doublings = high * 2 or 1.0, doublings + 1
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(problem, middle) else (middle, high)
    return high


def least_cost_ms(problem: Problem, price: float) -> float:
    """What a choice that fits costs at least.

    Args:
        problem: the problem.
        price: of a byte, in ms; any price is right, some bound better than others.
    """
    if problem.budget_bytes is None:
        return unlimited(problem).cost_ms
    return unlimited(at_price(problem, price)).cost_ms - price * _room(problem)


def _room(problem: Problem) -> int:
    assert problem.budget_bytes is not None
    return problem.budget_bytes - problem.fixed_bytes


def _fits(problem: Problem, price: float) -> bool:
    """Whether the cheapest choice at a price fits, temporaries left out."""
    picks = unlimited(at_price(problem, price)).picks
    return held_bytes(problem, picks) <= _room(problem)


def held_bytes(problem: Problem, picks: Sequence[int]) -> int:
    """All state, and all that forward passes keep: less than the peak."""
    return sum(
        _bytes(problem.options[kind][pick])
        for kind, pick in zip(problem.kinds, picks, strict=True)
    )


def _bytes(option: Option) -> int:
    return option.state_bytes + option.residual_bytes
