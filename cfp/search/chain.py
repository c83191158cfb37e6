"""A problem's segments in a row, as arrays, and what a choice costs at least.

*To go.* What the segments behind a pick cost at least is a shortest path, found from
last to first at once.

*A price of memory.* With a budget every byte of state and of residuals is given a price
in ms, and the budget is worth as much: whatever fits costs no more at any price, so the
shortest path at a price is a bound, too (Lagrangian relaxation).

*What passes further than to the next segment.* What its maker chose has to be
remembered until its last reader has chosen. A maker's options that hand over alike are
one *class*; of most makers there are a few. Bounds count the least that such a value
may cost its reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cfp.search.problem import Problem

# Costs that differ by less, of the cost, are the same sum in another order.
ROUNDING = 1e-12
# At a price at which all bytes cost so many times what the step takes, or more, costs
# would be lost in rounding.
_STEEPEST = 1e6


class Place(NamedTuple):
    """A segment: its options, as arrays, and what passes to them and on.

    Attributes:
        time_ms: what each option takes.
        state: bytes of each option's parameters and optimizer state.
        held: bytes of that and of residuals.
        temp: bytes that it needs besides, while it runs.
        edge_ms: ``[option before][option]`` milliseconds to reshard what comes from
            the segment before; of the first segment one row of zeros.
        alike: for each option a number, equal where the next resharding costs alike.
            Options that differ in storage, or in what is kept, often hand on alike.
        far_ms: by maker what comes from further away: ``[its class][option]``.
        last_of: makers whose values are read here for the last time.
        classes: for each option the class of what it passes far; None if nothing.
        least_ms: what each option takes, with the least for what comes from far.
    """

    time_ms: np.ndarray
    state: np.ndarray
    held: np.ndarray
    temp: np.ndarray
    edge_ms: np.ndarray
    alike: np.ndarray
    far_ms: dict[int, np.ndarray]
    last_of: frozenset[int]
    classes: np.ndarray | None
    least_ms: np.ndarray


class Chain:
    """A problem's segments, with the options that may be picked.

    Attributes:
        places: the segments.
        room: the budget without what every choice needs; None if there is no budget.
    """

    def __init__(self, problem: Problem) -> None:
        self._kinds = problem.kinds
        self._allowed = [problem.allowed(kind) for kind in range(len(problem.options))]
        self.places = [*_places(problem, self._allowed)]
        budget = problem.budget_bytes
        self.room = None if budget is None else budget - problem.fixed_bytes

    def numbered(self, picks: Sequence[int]) -> list[int]:
        """Picks of what is allowed, as they are numbered among all options."""
        pairs = zip(self._kinds, picks, strict=True)
        return [self._allowed[kind][pick] for kind, pick in pairs]

    def to_go_ms(self, price: float) -> list[np.ndarray]:
        """Computes lower bounds of the cost to go, with a price on held bytes.

        That is what it costs, if nothing passes further than to the next segment.

        Returns:
            For each number of segments that are decided, from none to all, an array
            over the options of the last of them. Of none it is one number.
        """
        to_go = np.zeros(len(self.places[-1].time_ms) if self.places else 1)
        found = [to_go]
        for place in reversed(self.places):
            cost = to_go + place.least_ms + price * place.held
            to_go = (place.edge_ms + cost).min(axis=1)
            found.append(to_go)
        return found[::-1]

    def fastest(self, price: float = 0.0) -> list[int]:
        """The fastest choice without a budget, with bytes that are held at a price.

        What passes further than to the next segment counts as in the bound.
        """
        picks, last = [], 0
        for place, to_go in zip(self.places, self.to_go_ms(price)[1:], strict=True):
            cost = to_go + place.least_ms + price * place.held
            last = int((cost + place.edge_ms[last]).argmin())
            picks.append(last)
        return picks

    def least_ms(self, price: float) -> float:
        """Computes a lower bound of the cost of choices that fit.

        Args:
            price: of a byte, in ms; any is right, some bound better than others.
                Without a budget it does not matter.
        """
        if self.room is None:
            price = 0.0
        return float(self.to_go_ms(price)[0][0]) - price * (self.room or 0)

    def best_price(self) -> float:
        """The price that bounds best: 0 if memory does not matter.

        Over the price, what a choice costs is a line, and the bound follows the lowest.
        It is highest where that changes from a choice that holds too much to one that
        does not. Of one of each, which price makes them equal is found; what is lower
        at that price takes the place of one of them, until nothing is.
        """
        if self.room is None:
            return 0.0
        fast = self._line(self.fastest())
        lean = self._line([int(place.held.argmin()) for place in self.places])
        price, highest = 0.0, _STEEPEST * fast.cost_ms / max(1, self.room)
        while max(self.room, lean.held) < fast.held:
            price = (lean.cost_ms - fast.cost_ms) / (fast.held - lean.held)
            found = self._line(self.fastest(price))
            if fast.at(price) - found.at(price) <= ROUNDING * abs(fast.at(price)):
                break
            if found.held <= self.room:
                lean = found
            else:
                fast = found
        return min(price, highest)

    def _line(self, picks: Sequence[int]) -> _Line:
        cost_ms, held, last = 0.0, 0, 0
        for place, pick in zip(self.places, picks, strict=True):
            cost_ms += float(place.least_ms[pick] + place.edge_ms[last, pick])
            held += int(place.held[pick])
            last = pick
        return _Line(cost_ms, held)


class _Line(NamedTuple):
    """The bound on a choice's cost as a line: its cost and the bytes that it holds."""

    cost_ms: float
    held: int

    def at(self, price: float) -> float:
        """Returns the cost with bytes at a price."""
        return self.cost_ms + price * self.held


def _places(problem: Problem, allowed: Sequence[Sequence[int]]) -> Iterator[Place]:
    """The segments of a problem with the options that are allowed."""
    kinds = problem.kinds

    def matrix(a: int, b: int, rows: Sequence[Sequence[float]]) -> np.ndarray:
        return np.asarray(rows, float)[np.ix_(allowed[a], allowed[b])]

    options = []
    for numbers, every in zip(allowed, problem.options, strict=True):
        several = [every[number] for number in numbers]
        options.append(
            {
                "time_ms": np.array([o.time_ms for o in several], float),
                "state": np.array([o.state_bytes for o in several], np.int64),
                "held": np.array([o.held_bytes for o in several], np.int64),
                "temp": np.array([o.temp_bytes for o in several], np.int64),
            }
        )
    edges = {
        (a, b): matrix(a, b, problem.edge_ms[a, b])
        if (a, b) in problem.edge_ms
        else np.zeros((len(allowed[a]), len(allowed[b])))
        for a, b in {*pairwise(kinds)}
    }
    alike = {pair: _equal_rows(edge)[1] for pair, edge in edges.items()}
    far_ms: list[dict[int, np.ndarray]] = [{} for _ in kinds]
    classes: dict[int, np.ndarray] = {}
    last_reader: dict[int, int] = {}
    for maker in sorted({i for i, _ in problem.far_ms}):
        readers = sorted(j for i, j in problem.far_ms if i == maker)
        read = [
            matrix(kinds[maker], kinds[j], problem.far_ms[maker, j]) for j in readers
        ]
        firsts, classes[maker] = _equal_rows(np.hstack(read))
        last_reader[maker] = readers[-1]
        for reader, rows in zip(readers, read, strict=True):
            far_ms[reader][maker] = rows[firsts]
    for i, kind in enumerate(kinds):
        count = len(allowed[kind])
        far = far_ms[i].values()
        yield Place(
            **options[kind],
            edge_ms=edges[kinds[i - 1], kind] if i else np.zeros((1, count)),
            alike=alike[kind, kinds[i + 1]]
            if i + 1 < len(kinds)
            else np.zeros(count, int),
            far_ms=far_ms[i],
            last_of=frozenset(maker for maker, j in last_reader.items() if j == i),
            classes=classes.get(i),
            least_ms=options[kind]["time_ms"] + sum(m.min(axis=0) for m in far),
        )


def _equal_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first index of each different row, and each row's number."""
    _, firsts, numbers = np.unique(
        matrix, axis=0, return_index=True, return_inverse=True
    )
    return firsts, numbers.ravel()
