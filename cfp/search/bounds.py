"""What a choice costs at least, found at once, and what passes over other segments.

Without a budget the cheapest choice is a shortest path. With one, the budget is relaxed
to a price: every byte of state and of kept values costs so many milliseconds, and the
budget is worth as much. Whatever stays within the budget costs no more at any price, so
the cheapest choice at a price is a bound (Lagrangian relaxation). The price that bounds
best is found once, and does well for problems that differ little, too.

Where a value passes over other segments, what its maker chose has to be remembered
until its last reader has chosen. A maker's options that hand over alike are one
*class*; of most makers there are a few. The makers whose values are under way are
*open*: a partial choice is told apart by its last pick and the classes of those. Nested
skips, as in a U-net, have several open at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cfp.search.problem import Problem, Solved, solution

# Of more partial choices the best by bound stay: a dozen nested skips have millions.
MOST_STATES = 50_000
# A price is found to one part in 2^20.
_HALVINGS = 20


class Distant:
    """What passes further than to the next segment of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._classes: dict[int, np.ndarray] = {}
        self._last: dict[int, int] = {}
        self._matrices: dict[int, list[tuple[int, np.ndarray]]] = {}
        for maker in sorted({i for i, _ in problem.far_ms}):
            readers = sorted(j for i, j in problem.far_ms if i == maker)
            matrices = [np.asarray(problem.far_ms[maker, j], float) for j in readers]
            _, firsts, numbers = np.unique(
                np.hstack(matrices), axis=0, return_index=True, return_inverse=True
            )
            self._classes[maker] = numbers.ravel()
            self._last[maker] = readers[-1]
            for reader, matrix in zip(readers, matrices, strict=True):
                found = self._matrices.setdefault(reader, [])
                found.append((maker, matrix[firsts]))

    def least_ms(self, place: int) -> np.ndarray | float:
        """For each option at a place what reaches it from afar takes at least."""
        return sum(m.min(axis=0) for _, m in self._matrices.get(place, ()))

    def none_open(self) -> np.ndarray:
        """The open classes of the one partial choice that chooses nothing."""
        return np.zeros((1, 0), np.int32)

    def cost_ms(self, place: int, open_: np.ndarray) -> np.ndarray | float:
        """``[partial choice][option at a place]`` milliseconds of what reaches it."""
        columns = {maker: i for i, maker in enumerate(self._open_at(place))}
        return sum(
            matrix[open_[:, columns[maker]]]
            for maker, matrix in self._matrices.get(place, ())
        )

    def after(self, place: int, open_: np.ndarray, picks: np.ndarray) -> np.ndarray:
        """The open classes once a place has picked."""
        makers = self._open_at(place)
        kept = [i for i, maker in enumerate(makers) if self._last[maker] > place]
        open_ = open_[:, kept]
        if place not in self._classes:
            return open_
        return np.column_stack([open_, self._classes[place][picks]]).astype(np.int32)

    def _open_at(self, place: int) -> list[int]:
        """The makers that are open before a place picks, in order."""
        return [m for m, last in self._last.items() if m < place <= last]


def states(picks: np.ndarray, open_: np.ndarray) -> np.ndarray:
    """A number for each partial choice, equal where all that follows costs the same."""
    if not open_.shape[1]:
        return picks
    rows = np.column_stack([picks, open_])
    return np.unique(rows, axis=0, return_inverse=True)[1].ravel()


def times_ms(problem: Problem, place: int) -> np.ndarray:
    """What each option at a place takes."""
    return np.array([o.time_ms for o in problem.options[problem.kinds[place]]], float)


def resharding_ms(problem: Problem, place: int) -> np.ndarray:
    """``[option before][option]`` milliseconds between a place and the one before."""
    kinds = problem.kinds[place - 1], problem.kinds[place]
    nothing = np.zeros([len(problem.options[kind]) for kind in kinds])
    return np.asarray(problem.edge_ms.get(kinds, nothing), float)


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
            edges = resharding_ms(problem, place + 1)
            to_go = (to_go[:, None] + edges + behind).min(axis=1)
        found.append(to_go)
        behind = to_go + times_ms(problem, place) + distant.least_ms(place)
    return found[::-1]


def unlimited(problem: Problem) -> Solved:
    """The fastest choice without a budget."""
    behind = costs_to_go(problem)
    if problem.far_ms:
        return cheapest(problem, behind)
    picks: list[int] = []
    for place, to_go in enumerate(behind):
        cost = to_go + times_ms(problem, place)
        if picks:
            cost = cost + resharding_ms(problem, place)[picks[-1]]
        picks.append(int(cost.argmin()))
    return solution(problem, picks)


def cheapest(problem: Problem, to_go: Sequence[np.ndarray]) -> Solved:
    """The fastest choice without a budget.

    Args:
        problem: the problem.
        to_go: for each segment and option what the segments behind it cost at least.
    """
    distant = Distant(problem)
    cost, pick, open_ = np.zeros(1), np.zeros(1, int), distant.none_open()
    stages: list[tuple[np.ndarray, np.ndarray]] = []
    for place in range(len(problem.kinds)):
        times = times_ms(problem, place)
        grown = cost[:, None] + times + distant.cost_ms(place, open_)
        if place:
            grown = grown + resharding_ms(problem, place)[pick]
        rows, pick = (index.ravel() for index in np.indices(grown.shape))
        cost, open_ = grown.ravel(), distant.after(place, open_[rows], pick)
        order = np.argsort(cost + to_go[place][pick], kind="stable")
        # Of equal states what follows costs the same: the cheapest comes first.
        _, firsts = np.unique(states(pick, open_)[order], return_index=True)
        best = order[np.sort(firsts)[:MOST_STATES]]
        cost, pick, open_ = cost[best], pick[best], open_[best]
        stages.append((pick, rows[best]))
    picks = []
    row = int(cost.argmin())
    for stage, before in reversed(stages):
        picks.append(int(stage[row]))
        row = int(before[row])
    return solution(problem, picks[::-1])


def at_price(problem: Problem, price: float) -> Problem:
    """The problem with memory at a price, in ms for a byte, and no budget."""
    priced = problem.with_options(
        lambda o: replace(o, time_ms=o.time_ms + price * o.held_bytes)
    )
    return replace(priced, budget_bytes=None)


def holding_least(problem: Problem) -> Solved:
    """The choice that holds the least memory, temporaries left out."""
    held = problem.with_options(lambda o: replace(o, time_ms=float(o.held_bytes)))
    return solution(problem, unlimited(replace(held, edge_ms={}, far_ms={})).picks)


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
    room = problem.budget_bytes - problem.fixed_bytes
    return unlimited(at_price(problem, price)).cost_ms - price * room


def _fits(problem: Problem, price: float) -> bool:
    """Whether the cheapest choice at a price fits, temporaries left out."""
    picks = unlimited(at_price(problem, price)).picks
    held = sum(option.held_bytes for option in problem.picked(picks))
    return problem.fixed_bytes + held <= (problem.budget_bytes or 0)
