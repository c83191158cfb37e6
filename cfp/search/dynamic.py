"""The search by dynamic programming along the chain of segments, as in CFP.

Segments are decided from first to last. What later segments need to know of earlier
ones is the last pick (for the resharding behind it), the cost so far, and under a
budget the memory kept so far and the peak so far. Of partial choices with the
same last pick those stay that no other beats in all of these (arXiv 2504.00598 keeps
the cost alone, and has no budget). Where something passes further than to the next
segment, partial choices are told apart by that as well (:mod:`cfp.search.bounds`).
Exact, but for the rare program with more than `MOST_STATES` of them, where the most
promising stay, and if none of these fits, what passes further is left out of account.
Without a budget the time is linear in the number of segments.

With a budget the partial choices that stay would grow too many. So those are left out
that cannot end below a cost, by a bound on what is still to come
(:mod:`cfp.search.bounds`). That cost is first little more than the bound for the whole
program, and is raised until something ends below it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cfp.search.bounds import (
    MOST_STATES,
    Distant,
    at_price,
    costs_to_go,
    holding_least,
    least_cost_ms,
    memory_price,
    resharding_ms,
    states,
    times_ms,
    unlimited,
)
from cfp.search.problem import Problem, Solved, solution

# How far above the bound to look first, of the bound; and how to go on.
_FIRST_SLACK = 2.5e-4
_MORE_SLACK = 2.0
# Partial choices that are compared one by one, before those that are left of the rest.
_FIRST_ROWS = 64
# Costs that differ by less, of the cost, are the same sum in another order.
_ROUNDING = 1e-12


def solve_dynamically(problem: Problem, *, lean: bool = False) -> Solved | None:
    """The cheapest choice that fits, or None if none does.

    Args:
        problem: the problem.
        lean: whether to find, of several that cost the same, the one that needs the
            least memory. There must be a budget then.
    """
    free = unlimited(problem)
    if not lean and problem.fits(free.picks):
        return free
    assert problem.budget_bytes is not None
    if not can_fit(problem):
        return None
    price = memory_price(problem)
    least = least_cost_ms(problem, price)
    chain = _Chain(problem, price)
    slack = _FIRST_SLACK * max(abs(least), free.cost_ms)
    while True:
        picks, is_all = chain.search(least + slack)
        if picks is not None:
            return solution(problem, picks)
        if is_all:  # As something fits, it was among too many states.
            near = solve_dynamically(replace(problem, far_ms={}), lean=lean)
            return near and solution(problem, near.picks)
        slack = slack * _MORE_SLACK or 1.0


def solve_among(problem: Problem, kept: Sequence[Sequence[int]]) -> Solved | None:
    """The cheapest choice that fits among some options of each kind.

    Args:
        problem: the problem.
        kept: for each kind the numbers of its options.
    """
    found = solve_dynamically(problem.keep(kept))
    if found is None:
        return None
    picked = zip(problem.kinds, found.picks, strict=True)
    return solution(problem, [kept[kind][pick] for kind, pick in picked])


def best_solutions(problem: Problem, count: int) -> list[Solved]:
    """The best solution, and others that differ from it where it matters.

    Each next one may not use what the one before chose for the kind of segment that
    takes most of the time.
    """
    found: list[Solved] = []
    banned: set[tuple[int, int]] = set()
    while len(found) < count:
        kept = [
            [i for i in range(len(options)) if (kind, i) not in banned]
            for kind, options in enumerate(problem.options)
        ]
        if not all(kept):
            break
        best = solve_among(problem, kept)
        if best is None:
            break
        found.append(best)
        spent: dict[tuple[int, int], float] = {}
        for kind, pick in zip(problem.kinds, best.picks, strict=True):
            time_ms = problem.options[kind][pick].time_ms
            spent[kind, pick] = spent.get((kind, pick), 0.0) + time_ms
        if not spent:  # a program without segments leaves nothing to choose
            break
        banned.add(max(spent, key=lambda choice: spent[choice]))
    return found


def can_fit(problem: Problem) -> bool:
    """Whether any choice fits: to find out by the search would take trying them all."""
    budget = problem.budget_bytes
    return (
        budget is None
        or problem.fits(holding_least(problem).picks)
        or smallest_budget(problem) <= budget
    )


def smallest_budget(problem: Problem) -> int:
    """The smallest budget in bytes that some choice fits in; see :func:`leanest`."""
    return leanest(problem).memory_bytes


def leanest(problem: Problem) -> Solved:
    """The choice that needs the least memory, whatever the budget and the time."""
    room = replace(
        problem.with_options(lambda option: replace(option, time_ms=0.0)),
        edge_ms={},
        far_ms={},
        budget_bytes=holding_least(problem).memory_bytes,
    )
    picks, _ = _Chain(room, 0.0).search(0.0)
    assert picks is not None, "what holds least fits in what it needs"
    return solution(problem, picks)


class _Partials(NamedTuple):
    """Choices for the first few segments, as columns.

    Attributes:
        cost_ms: their time, resharding included.
        kept: state and residuals of all, in bytes.
        peak: state of all, and the most that any needs besides while it runs.
        pick: the last pick.
        before: which row of those one segment shorter they go on from.
        open: classes of the picks that later ones still depend on, as columns.
    """

    cost_ms: np.ndarray
    kept: np.ndarray
    peak: np.ndarray
    pick: np.ndarray
    before: np.ndarray
    open: np.ndarray

    def take(self, rows: np.ndarray) -> _Partials:
        return _Partials(*(column[rows] for column in self))


class _Chain:
    """The segments of a problem with a budget, with bounds on what is still to come."""

    def __init__(self, problem: Problem, price: float) -> None:
        assert problem.budget_bytes is not None
        self._problem = problem
        self._room = problem.budget_bytes - problem.fixed_bytes
        self._price = price
        self._distant = Distant(problem)
        self._free = costs_to_go(problem)
        self._priced = costs_to_go(at_price(problem, price))
        self._alike = [_alike(problem, place) for place in range(len(problem.kinds))]
        least = [min(o.state_bytes for o in options) for options in problem.options]
        behind = np.cumsum([0, *(least[kind] for kind in reversed(problem.kinds))])
        # What state of the segments behind each place leaves of the room at most.
        self._left = self._room - behind[-2::-1]

    def search(self, most_ms: float) -> tuple[list[int] | None, bool]:
        """The cheapest choice that costs no more, and whether that left nothing out."""
        problem, is_all = self._problem, True
        stages: list[_Partials] = []
        none = np.zeros(1)
        zero = np.zeros(1, np.int64)
        now = _Partials(none, zero, zero, zero, zero, self._distant.none_open())
        for place in range(len(problem.kinds)):
            grown = self._grow(place, now)
            grown = grown.take(np.flatnonzero(grown.peak <= self._left[place]))
            bound = self._bound(place, grown)
            good = np.flatnonzero(bound <= most_ms)
            is_all = is_all and len(good) == len(bound)
            if len(good) > MOST_STATES and grown.open.shape[1]:
                good = good[np.argsort(bound[good], kind="stable")[:MOST_STATES]]
            grown = grown.take(good)
            now = grown.take(_unbeaten_of_all(grown, self._alike[place][grown.pick]))
            stages.append(now)
        if not len(now.cost_ms):
            return None, is_all
        same = now.cost_ms <= now.cost_ms.min() * (1 + _ROUNDING)
        row = int(np.where(same, now.peak, np.iinfo(np.int64).max).argmin())
        picks = []
        for stage in reversed(stages):
            picks.append(int(stage.pick[row]))
            row = int(stage.before[row])
        return picks[::-1], is_all

    def _grow(self, place: int, now: _Partials) -> _Partials:
        """All partial choices with every option of one segment more."""
        problem = self._problem
        options = problem.options[problem.kinds[place]]
        state = np.array([o.state_bytes for o in options], np.int64)
        residual = np.array([o.residual_bytes for o in options], np.int64)
        temp = np.array([o.temp_bytes for o in options], np.int64)
        distant_ms = self._distant.cost_ms(place, now.open)
        cost = now.cost_ms[:, None] + times_ms(problem, place) + distant_ms
        if place:
            cost = cost + resharding_ms(problem, place)[now.pick]
        kept = now.kept[:, None] + state + residual
        peak = np.maximum(now.peak[:, None] + state, kept + temp)
        rows, picks = (index.ravel() for index in np.indices(cost.shape))
        open_ = self._distant.after(place, now.open[rows], picks)
        return _Partials(cost.ravel(), kept.ravel(), peak.ravel(), picks, rows, open_)

    def _bound(self, place: int, grown: _Partials) -> np.ndarray:
        """What choices that begin like these and fit cost at least."""
        paid = self._price * (self._room - grown.kept)
        priced = self._priced[place][grown.pick] - paid
        return grown.cost_ms + np.maximum(self._free[place][grown.pick], priced)


def _alike(problem: Problem, place: int) -> np.ndarray:
    """A number for each option at a place, equal where the next resharding costs alike.

    Those that differ in storage, or in what is kept, often hand on alike.
    """
    if place + 1 == len(problem.kinds):
        return np.zeros(len(problem.options[problem.kinds[place]]), int)
    matrix = resharding_ms(problem, place + 1)
    return np.unique(matrix, axis=0, return_inverse=True)[1].ravel()


def _unbeaten_of_all(grown: _Partials, alike: np.ndarray) -> np.ndarray:
    """The rows that no other beats of those that all that follows costs as much for.

    Args:
        grown: partial choices.
        alike: for each, a number for what the next resharding costs.
    """
    numbers = states(alike, grown.open)
    order = np.argsort(numbers, kind="stable")
    ends = np.flatnonzero(np.diff(numbers[order])) + 1
    kept = [_unbeaten(grown, rows) for rows in np.split(order, ends)]
    return np.concatenate(kept)


def _unbeaten(grown: _Partials, rows: np.ndarray) -> np.ndarray:
    """Of some rows those that no other beats in everything that counts."""
    order = rows[np.lexsort((grown.peak[rows], grown.kept[rows], grown.cost_ms[rows]))]
    held, peak = grown.kept[order], grown.peak[order]
    kept: list[int] = []
    # Those so far that need least: the more is kept, the lower the peak.
    stairs: list[int] = []
    peaks: list[int] = []
    start, length = 0, _FIRST_ROWS
    while start < len(order):
        # Most rows are beaten by much cheaper ones, which arrays tell at once.
        some = np.arange(start, min(start + length, len(order)))
        at = np.searchsorted(stairs, held[some], side="right") - 1
        lowest = np.array([*peaks, np.iinfo(np.int64).max])[at]
        for row in some[lowest > peak[some]]:
            if _climb(stairs, peaks, int(held[row]), int(peak[row])):
                kept.append(int(order[row]))
        start, length = start + length, length * 2
    return np.array(kept, np.int64)


def _climb(stairs: list[int], peaks: list[int], held: int, peak: int) -> bool:
    """Adds what no step beats, and takes away the steps that it beats."""
    at = bisect_right(stairs, held)
    if at and peaks[at - 1] <= peak:
        return False
    if at and stairs[at - 1] == held:
        at -= 1
    end = at
    while end < len(peaks) and peaks[end] >= peak:
        end += 1
    stairs[at:end], peaks[at:end] = [held], [peak]
    return True
