"""Finds the fastest choice that fits: dynamic programming along the chain of segments.

A segment is a run of blocks, such as a layer; a choice has one option per segment. The
memory budget is in bytes per device. A *partial choice* picks options for the first
segments. Later segments depend on its last pick (for the next resharding), its cost,
and under a budget its kept memory and its peak. Some values have readers beyond the
next segment. Such a value is *open* from its maker to its last reader. Later costs
depend on its maker's *class*: the maker's options with equal resharding costs. Most
makers have a few classes. Nested skips, as in a U-net, are several open values at once.

Two partial choices compare if all later costs are the same after both. A partial choice
stays if no other is as good in cost and, under a budget, kept memory and peak (arXiv
2504.00598 has no budget). A partial choice is dropped if a bound shows that it cannot
end below a cost limit. The limit starts a little above the bound for the whole
program, and rises until a choice ends below it. The bounds:

- The least cost of the segments after a pick is a shortest path, computed from last to
  first. Without a budget and without open values, this bound is exact.
- Under a budget, each byte of state and of residuals gets a price in ms, and the price
  of the whole budget is subtracted. For a choice that fits, the sum is at most its
  cost. So the shortest path at any price is a bound, too (Lagrangian relaxation).
- An open value counts with its least cost for each reader.

The result is exact, unless values are open and more than `MOST_STATES` partial choices
remain. Then those with the lowest bounds stay. If none of them fits, the search repeats
without the costs of open values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cfp.cost.costs import SegmentChoice
from cfp.program.graph import searched_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A choice for a kind of segment with its cost, measured or expected.

    Bytes are per device.

    Attributes:
        time_ms: time that the segment adds to a step.
        state_bytes: bytes for the whole step, such as parameters and optimizer state.
        residual_bytes: values kept from the forward to the backward pass.
        temp_bytes: peak of further memory while the segment runs.
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
    """Input of `solve`: options of segments, costs between them, a memory budget.

    Attributes:
        kinds: ``[segment]`` its kind; equal segments have one kind.
        options: ``[kind]`` its options.
        edge_ms: ``{(kind, next kind): [option][option]}``, milliseconds to reshard
            values between adjacent segments.
        far_ms: ``{(segment, later segment): [option][option]}``, the same for segments
            that are not adjacent: tied weights, skips, encoder outputs.
        fixed_ms: time of a step outside segments.
        fixed_bytes: memory outside segments.
        budget_bytes: largest memory per device; None for no limit.
        kept: ``[kind]`` indices of the options that may be picked; None for all.
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
        """Returns the problem with `change` applied to each option."""
        return replace(
            self, options=tuple(tuple(map(change, row)) for row in self.options)
        )

    def picked(self, picks: Sequence[int]) -> list[Option]:
        """Returns the picked option of each segment."""
        pairs = zip(self.kinds, picks, strict=True)
        return [self.options[kind][pick] for kind, pick in pairs]

    def cost_ms(self, picks: Sequence[int]) -> float:
        """Computes the predicted step time of one option index per segment, ms."""
        total = sum((option.time_ms for option in self.picked(picks)), self.fixed_ms)
        for i, pair in enumerate(pairwise(self.kinds)):
            if pair in self.edge_ms:
                total += self.edge_ms[pair][picks[i]][picks[i + 1]]
        for (i, j), matrix in self.far_ms.items():
            total += matrix[picks[i]][picks[j]]
        return total

    def state_bytes(self, picks: Sequence[int]) -> int:
        """Returns the sum of the picks' `state_bytes`."""
        return sum(option.state_bytes for option in self.picked(picks))

    def memory_bytes(self, picks: Sequence[int]) -> int:
        """Computes the predicted peak, bytes per device.

        State lives during the whole step. A segment's residuals live from its forward
        pass to its backward pass, so a segment runs beside all earlier residuals.
        """
        kept = peak = 0
        for option in self.picked(picks):
            kept += option.residual_bytes
            peak = max(peak, kept + option.temp_bytes)
        return self.fixed_bytes + self.state_bytes(picks) + peak

    def fits(self, picks: Sequence[int]) -> bool:
        """True if a choice stays within the budget, or there is no budget."""
        budget = self.budget_bytes
        return budget is None or self.memory_bytes(picks) <= budget

    def solution(self, picks: Sequence[int]) -> Assignment:
        """Returns the picks with their time and memory."""
        return Assignment(
            picks=tuple(picks),
            cost_ms=self.cost_ms(picks),
            memory_bytes=self.memory_bytes(picks),
        )

    def among(self, kept: Sequence[Sequence[int]]) -> Problem:
        """Returns the problem in which only some options may be picked.

        Args:
            kept: ``[kind]`` indices of the allowed options, in place of earlier ones.
                Options keep their indices, so picks mean the same in both problems.
        """
        return replace(self, kept=tuple(map(tuple, kept)))

    def allowed(self, kind: int) -> Sequence[int]:
        """Indices of the options of a kind that may be picked."""
        return range(len(self.options[kind])) if self.kept is None else self.kept[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A choice, with its predicted cost.

    Attributes:
        picks: ``[segment]`` option index.
        cost_ms: its predicted step time.
        memory_bytes: its predicted peak memory on each device.
    """

    picks: tuple[int, ...]
    cost_ms: float
    memory_bytes: int


def scale_memory(problem: Problem, factor: float) -> Problem:
    """Returns the problem with residual and temporary bytes times a factor."""

    def scaled(option: Option) -> Option:
        return replace(
            option,
            residual_bytes=round(factor * option.residual_bytes),
            temp_bytes=round(factor * option.temp_bytes),
        )

    return problem.with_options(scaled)


# Costs with a smaller relative difference may be equal sums in another order.
ROUNDING = 1e-12
# Largest ratio of the budget's price to the step's cost. At higher prices, rounding
# would hide differences of cost.
_STEEPEST = 1e6


class SegmentArrays(NamedTuple):
    """A segment's options as arrays, with the values that pass in and out.

    Attributes:
        time_ms: time of each option.
        state: `state_bytes` of each option.
        held: bytes of state and residuals.
        temp: further bytes while the segment runs.
        edge_ms: ``[option before][option]`` milliseconds of resharding between the
            segment before and this; one row of zeros for the first segment.
        alike: for each option a number, equal for options with equal next reshardings.
        far_ms: ``{maker: [maker's class][option]}``, resharding of open values, ms.
        last_of: makers (segment indices) whose open values have their last reader here.
        classes: class of each option as a maker; None if it makes no open value.
        least_ms: time of each option, with the least resharding of open values.
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
    """A problem as arrays of allowed options, with lower bounds of its cost.

    Attributes:
        room: bytes of the budget that are left for segments; None without a budget.
    """

    def __init__(self, problem: Problem) -> None:
        self._kinds = problem.kinds
        self._allowed = [problem.allowed(kind) for kind in range(len(problem.options))]
        self.segments = [*_arrays(problem, self._allowed)]
        budget = problem.budget_bytes
        self.room = None if budget is None else budget - problem.fixed_bytes

    def numbered(self, picks: Sequence[int]) -> list[int]:
        """Converts indices among allowed options to indices among all options."""
        pairs = zip(self._kinds, picks, strict=True)
        return [self._allowed[kind][pick] for kind, pick in pairs]

    def to_go_ms(self, price: float) -> list[np.ndarray]:
        """Computes the least cost of later segments, with a price on held bytes.

        A lower bound: open values count with their least. `price` is in ms per byte.

        Returns:
            ``[number of decided segments][option of the last one]``; the first array
            has a single number.
        """
        to_go = np.zeros(len(self.segments[-1].time_ms) if self.segments else 1)
        found = [to_go]
        for segment in reversed(self.segments):
            cost = to_go + segment.least_ms + price * segment.held
            to_go = (segment.edge_ms + cost).min(axis=1)
            found.append(to_go)
        return found[::-1]

    def fastest(self, price: float = 0.0) -> list[int]:
        """Picks, among allowed options, the least cost with a price on held bytes.

        The budget does not count. Open values count with their least cost.
        """
        picks, last = [], 0
        for segment, to_go in zip(self.segments, self.to_go_ms(price)[1:], strict=True):
            cost = to_go + segment.least_ms + price * segment.held
            last = int((cost + segment.edge_ms[last]).argmin())
            picks.append(last)
        return picks

    def least_ms(self, price: float) -> float:
        """Computes a lower bound of the segments' cost in choices that fit, ms.

        Args:
            price: ms per byte. Every price gives a valid bound; `best_price` finds the
                largest. Ignored without a budget.
        """
        if self.room is None:
            price = 0.0
        return float(self.to_go_ms(price)[0][0]) - price * (self.room or 0)

    def best_price(self) -> float:
        """Finds the price (ms per byte) of the largest bound; 0 if no budget binds.

        A choice's cost at a price is a line over the price. The bound at a price is the
        lowest line. Its maximum lies where two lines cross: one of a choice that holds
        too much, one of a choice that fits. A cheaper choice at the crossing replaces
        one of the two, until no choice is cheaper.
        """
        if self.room is None:
            return 0.0
        fast = self._line(self.fastest())
        lean = self._line([int(segment.held.argmin()) for segment in self.segments])
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
        for segment, pick in zip(self.segments, picks, strict=True):
            cost_ms += float(segment.least_ms[pick] + segment.edge_ms[last, pick])
            held += int(segment.held[pick])
            last = pick
        return _Line(cost_ms, held)


class _Line(NamedTuple):
    """A choice's cost as a line over the price of a held byte: cost_ms at price 0."""

    cost_ms: float
    held: int

    def at(self, price: float) -> float:
        return self.cost_ms + price * self.held


def _arrays(
    problem: Problem, allowed: Sequence[Sequence[int]]
) -> Iterator[SegmentArrays]:
    """Yields each segment's arrays over its allowed options."""
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
        yield SegmentArrays(
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
    """Returns the first row index of each class of equal rows, and each row's class."""
    _, firsts, numbers = np.unique(
        matrix, axis=0, return_index=True, return_inverse=True
    )
    return firsts, numbers.ravel()


# Largest number of partial choices after a segment with open values. A dozen nested
# skips would have millions.
MOST_STATES = 50_000
# First cost limit above the bound, relative to the bound, and its growth per search.
_FIRST_SLACK = 2.5e-4
_MORE_SLACK = 2.0
# Largest number of partial choices that are compared pairwise.
_FEW_ROWS = 128
_BEFORE = np.triu(np.ones((_FEW_ROWS, _FEW_ROWS), bool), 1)


@searched_once
def solve(problem: Problem) -> Assignment | None:
    """Returns the choice of least cost that fits; None if no choice fits.

    May be inexact with many open values. Of equal costs, a budget takes the leanest.
    """
    budget = problem.budget_bytes
    # The search below would have to try all choices to find that none fits.
    if budget is not None and leanest(problem).memory_bytes > budget:
        return None
    chain = Chain(problem)
    if problem.budget_bytes is None and not problem.far_ms:
        return problem.solution(chain.numbered(chain.fastest()))
    price = chain.best_price()
    least = chain.least_ms(price)
    slack = _FIRST_SLACK * max(abs(least), chain.least_ms(0.0))
    while True:
        picks, is_all = _walk(chain, least + slack, price)
        if picks is not None:
            return problem.solution(picks)
        if is_all:  # A choice fits, but `MOST_STATES` dropped it.
            near = solve(replace(problem, far_ms={}))
            return near and problem.solution(near.picks)
        slack = slack * _MORE_SLACK or 1.0


def fastest(problem: Problem) -> Assignment:
    """Returns the choice of least cost, ignoring the budget."""
    found = solve(replace(problem, budget_bytes=None))
    assert found is not None, "everything fits"
    return found


def leanest(problem: Problem) -> Assignment:
    """Returns the choice of least peak memory, ignoring the budget and time."""
    # Memory of any choice is enough; least state and residuals give a close start.
    least = [
        min(problem.allowed(kind), key=lambda number, row=row: row[number].held_bytes)
        for kind, row in enumerate(problem.options)
    ]
    enough = problem.memory_bytes([least[kind] for kind in problem.kinds])
    free = problem.with_options(lambda option: replace(option, time_ms=0.0))
    same_cost = replace(free, edge_ms={}, far_ms={}, budget_bytes=enough)
    picks, _ = _walk(Chain(same_cost), 0.0, 0.0)
    assert picks is not None, "a budget of all choices fits"
    return problem.solution(picks)


class _Partials(NamedTuple):
    """Partial choices, one per row.

    Attributes:
        cost_ms: time, resharding included.
        kept: bytes of state and residuals of decided segments.
        peak: largest bytes so far: state, earlier residuals, and a running segment.
        pick: option of the last decided segment.
        before: row of the same choice in the stage one segment shorter.
        open: ``{maker: class}`` of open values.
    """

    cost_ms: np.ndarray
    kept: np.ndarray
    peak: np.ndarray
    pick: np.ndarray
    before: np.ndarray
    open: dict[int, np.ndarray]

    def take(self, rows: np.ndarray) -> _Partials:
        *columns, open_ = self
        taken = {maker: classes[rows] for maker, classes in open_.items()}
        return _Partials(*(column[rows] for column in columns), open=taken)


def _walk(chain: Chain, most_ms: float, price: float) -> tuple[list[int] | None, bool]:
    """Finds the choice of least cost that fits and costs at most `most_ms`.

    Lower bounds take `price` ms per byte. Returns the picks, or None; and True if no
    partial choice was dropped for its cost: some may be for `MOST_STATES`.
    """
    free, priced = chain.to_go_ms(0.0), chain.to_go_ms(price)
    # Least state of the later segments.
    state = sum(int(segment.state.min()) for segment in chain.segments)
    zero = np.zeros(1, np.int64)
    now, is_all = _Partials(np.zeros(1), zero, zero, zero, zero, {}), True
    stages: list[_Partials] = []
    for i, segment in enumerate(chain.segments):
        now = _grow(now, i, segment)
        to_go = free[i + 1][now.pick]
        if chain.room is not None:
            state -= int(segment.state.min())
            fits = np.flatnonzero(now.peak <= chain.room - state)
            now = now.take(fits)
            at_price = priced[i + 1][now.pick] - price * (chain.room - now.kept)
            to_go = np.maximum(to_go[fits], at_price)
        bound = now.cost_ms + to_go
        rows = np.flatnonzero(bound <= most_ms)
        is_all = is_all and len(rows) == len(bound)
        # Comparing takes long, so the worst bounds are dropped before.
        rows = _lowest(rows, bound, 4 * MOST_STATES) if now.open else rows
        rows = rows[_unbeaten(now.take(rows), segment, chain.room is not None)]
        rows = _lowest(rows, bound, MOST_STATES) if now.open else rows
        now = now.take(rows)
        stages.append(now)
    if not len(now.cost_ms):
        return None, is_all
    same = now.cost_ms <= now.cost_ms.min() * (1 + ROUNDING)
    row = int(np.where(same, now.peak, np.iinfo(np.int64).max).argmin())
    picks = []
    for stage in reversed(stages):
        picks.append(int(stage.pick[row]))
        row = int(stage.before[row])
    return chain.numbered(picks[::-1]), is_all


def _lowest(rows: np.ndarray, bound: np.ndarray, count: int) -> np.ndarray:
    """Returns at most `count` of `rows`: those with the lowest ``bound[row]``."""
    if len(rows) <= count:
        return rows
    return rows[np.argsort(bound[rows], kind="stable")[:count]]


def _grow(now: _Partials, i: int, segment: SegmentArrays) -> _Partials:
    """Extends each partial choice with each option of segment i."""
    cost = now.cost_ms[:, None] + segment.time_ms
    for maker, far_ms in segment.far_ms.items():
        cost = cost + far_ms[now.open[maker]]
    cost = cost + segment.edge_ms[now.pick]
    kept = now.kept[:, None] + segment.held
    peak = np.maximum(now.peak[:, None] + segment.state, kept + segment.temp)
    rows, picks = (index.ravel() for index in np.indices(cost.shape))
    open_ = {m: c[rows] for m, c in now.open.items() if m not in segment.last_of}
    if segment.classes is not None:
        open_[i] = segment.classes[picks]
    return _Partials(cost.ravel(), kept.ravel(), peak.ravel(), picks, rows, open_)


def _unbeaten(
    now: _Partials, segment: SegmentArrays, counts_memory: bool
) -> np.ndarray:
    """Selects rows that no comparable row beats: by cost, and memory if it counts."""
    state = segment.alike[now.pick]
    for classes in now.open.values():
        both = state * (int(classes.max(initial=0)) + 1) + classes
        state = np.unique(both, return_inverse=True)[1].ravel()
    if not counts_memory:
        order = np.argsort(now.cost_ms, kind="stable")
        return order[np.unique(state[order], return_index=True)[1]]
    # Shifting `kept` up and `peak` down by the state's number keeps rows of different
    # states from beating each other.
    apart = state * (int(now.peak.max(initial=0)) + 1)
    kept, peak = now.kept + apart, now.peak - apart
    order = np.lexsort((peak, kept, now.cost_ms))
    return order[_minimal(kept[order], peak[order])]


def _minimal(kept: np.ndarray, peak: np.ndarray) -> np.ndarray:
    """Indices of rows that have less `kept` or less `peak` than each earlier row."""
    if len(kept) <= _FEW_ROWS:
        before = _BEFORE[: len(kept), : len(kept)]
        beats = before & (kept[:, None] <= kept) & (peak[:, None] <= peak)
        return np.flatnonzero(~beats.any(axis=0))
    half = len(kept) // 2
    first = _minimal(kept[:half], peak[:half])
    # For each row of the second half: the lowest peak in the first, at no more `kept`.
    by_kept = first[np.argsort(kept[first], kind="stable")]
    lowest = np.minimum.accumulate(peak[by_kept])
    count = np.searchsorted(kept[by_kept], kept[half:], side="right")
    beaten = (count > 0) & (lowest[count - 1] <= peak[half:])
    rest = half + np.flatnonzero(~beaten)
    return np.concatenate([first, rest[_minimal(kept[rest], peak[rest])]])
