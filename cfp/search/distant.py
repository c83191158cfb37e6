"""Choices that matter further than to the next segment, for a search along the chain.

Where a value passes over other segments, what its maker chose has to be remembered
until its last reader has chosen. A maker's options that hand over alike are one
*class*; of most makers there are a few. The makers whose values are under way are
*open*: a partial choice is told apart by its last pick and the classes of those. Nested
skips, as in a U-net, have several open at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cfp.search.problem import Problem, Solution, solution

# Of more partial choices the best by bound stay: a dozen nested skips have millions.
MOST_STATES = 50_000


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


def cheapest(problem: Problem, to_go: Sequence[np.ndarray]) -> Solution:
    """The fastest choice without a budget.

    Args:
        problem: the problem.
        to_go: for each segment and option what the segments behind it cost at least.
    """
    distant = Distant(problem)
    cost, pick, open_ = np.zeros(1), np.zeros(1, int), distant.none_open()
    stages: list[tuple[np.ndarray, np.ndarray]] = []
    for place, kind in enumerate(problem.kinds):
        times = np.array([option.time_ms for option in problem.options[kind]])
        grown = cost[:, None] + times + distant.cost_ms(place, open_)
        if place:
            matrix = problem.edge_ms.get((problem.kinds[place - 1], kind))
            if matrix is not None:
                grown = grown + np.asarray(matrix, float)[pick]
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
