"""The problem of `alpa_test.cost_model` as matrices: costs of nodes, costs of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.segments import Segment
from cfp.analysis.storage import spec_ways
from cfp.analysis.strategies import NONE, Strategy
from cfp.cost.costs import SegmentEstimate, estimate_segment
from cfp.cost.memory import turning_point
from cfp.cost.terms import Terms

MODES = tuple(mode for mode in Storage if mode is not Storage.INNER)  # One host.


@dataclass(frozen=True)
class Formulation:
    """Nodes and pairs of a program on a mesh.

    Attributes:
        strategies: for each block those it may take.
        node_ms: for each block ``[strategy][storage]`` milliseconds.
        node_bytes: the same in bytes on each device.
        edge_ms: for pairs of blocks, the first before the second, ``[strategy of the
            first][strategy of the second]``.
        owned: for each block the storage groups whose storage it decides.
        groups: how many storage groups there are.
        numbers: for each block the number of every strategy that a choice may hold;
            absent for those that may not be taken.
    """

    strategies: tuple[tuple[Strategy, ...], ...]
    node_ms: tuple[np.ndarray, ...]
    node_bytes: tuple[np.ndarray, ...]
    edge_ms: Mapping[tuple[int, int], np.ndarray]
    owned: tuple[tuple[int, ...], ...]
    groups: int
    numbers: tuple[Mapping[Strategy, int], ...]

    def cost_ms(self, picks: Sequence[tuple[int, int]]) -> float:
        """The objective at (strategy, storage) numbers, one pair for each block."""
        total = sum(
            float(costs[pick]) for costs, pick in zip(self.node_ms, picks, strict=True)
        )
        for (a, b), matrix in self.edge_ms.items():
            total += float(matrix[picks[a][0], picks[b][0]])
        return total

    def memory_bytes(self, picks: Sequence[tuple[int, int]]) -> int:
        """Returns the constraint's count of the same."""
        pairs = zip(self.node_bytes, picks, strict=True)
        return sum(int(sizes[pick]) for sizes, pick in pairs)

    def choice(self, picks: Sequence[tuple[int, int]]) -> Choice:
        """Returns the count in the program that cfp compiles."""
        storage = [Storage.USED] * self.groups
        for owned, (_, mode) in zip(self.owned, picks, strict=True):
            for group in owned:
                storage[group] = MODES[mode]
        pairs = zip(self.strategies, picks, strict=True)
        return Choice(tuple(options[s] for options, (s, _) in pairs), tuple(storage))

    def believed_ms(self, choice: Choice) -> float | None:
        """Returns the model's cost of any choice; None if it would not consider it."""
        picks = []
        for numbers, owned, strategy in zip(
            self.numbers, self.owned, choice.blocks, strict=True
        ):
            if strategy not in numbers:
                return None
            mode = choice.storage[owned[0]] if owned else Storage.USED
            picks.append((numbers[strategy], MODES.index(mode)))
        return self.cost_ms(picks)


def formulate(analysis: Analysis, prices: Any) -> Formulation:
    """Sets the problem up.

    Args:
        analysis: the program on its mesh.
        prices: an `AlphaBeta`, or anything with the methods of `Rates`.
    """
    frame = analysis.frame
    everything = Segment(
        index=0,
        start=0,
        end=len(frame.blocks),
        kind=0,
        ops=tuple(op.id for op in frame.program.ops if op.parent < 0),
        groups=tuple(range(len(frame.groups))),
    )
    terms = Terms(frame, prices)
    estimate = estimate_segment(terms, everything, None)
    allowed = [_allowed(options) for options in estimate.strategies]
    first = [terms.block(b, o[0]) for b, o in enumerate(estimate.strategies)]
    owned = terms.owned_groups(everything.groups, first)
    kept = _kept_bytes(terms, estimate)
    held = {mode: _state_bytes(terms, estimate, owned, mode) for mode in MODES}
    place = [{old: new for new, old in enumerate(keep)} for keep in allowed]

    def table(of: Mapping[Storage, Sequence[np.ndarray]], block: int) -> np.ndarray:
        modes = (frame.effective(mode, frame.groups) for mode in MODES)
        rows = [np.asarray(of[mode][block])[allowed[block]] for mode in modes]
        return np.stack(rows, axis=1)

    blocks = range(len(frame.blocks))
    return Formulation(
        strategies=tuple(
            tuple(options[i] for i in keep)
            for options, keep in zip(estimate.strategies, allowed, strict=True)
        ),
        node_ms=tuple(table(estimate.node_ms, b) for b in blocks),
        node_bytes=tuple(table(held, b) + kept[b][allowed[b]][:, None] for b in blocks),
        edge_ms={
            (a, b): matrix[np.ix_(allowed[a], allowed[b])]
            for (a, b), matrix in estimate.edge_ms.items()
        },
        owned=tuple(map(tuple, owned)),
        groups=len(frame.groups),
        numbers=tuple(
            {s: place[b][n] for s, n in estimate.numbers[b].items() if n in place[b]}
            for b in blocks
        ),
    )


def _allowed(options: Sequence[Strategy]) -> list[int]:
    """Strategies that split a block over every axis; all where there are none."""
    split = [i for i, s in enumerate(options) if all(axis.inner != NONE for axis in s)]
    return split or list(range(len(options)))


def _state_bytes(
    terms: Terms,
    estimate: SegmentEstimate,
    owned: Sequence[Sequence[int]],
    mode: Storage,
) -> list[np.ndarray]:
    """For each block and strategy, bytes of state on each device."""
    frame = terms.frame
    values, args = frame.program.values, frame.program.args

    def held(index: int, block: int, strategy: Strategy) -> float:
        group = frame.groups[index]
        wants = terms.wanted(index, terms.block(block, strategy))
        used, wide = frame.stored_specs(group, mode, next(iter(wants), None))
        stored = wide if mode is Storage.SHARDED else used
        main, *rest = (values[args[a]].size_bytes for a in group.args)
        return main / spec_ways(stored, frame.mesh) + sum(rest) / spec_ways(
            wide, frame.mesh
        )

    return [
        np.array([sum(held(i, block, s) for i in owned[block]) for s in options])
        for block, options in enumerate(estimate.strategies)
    ]


def _kept_bytes(terms: Terms, estimate: SegmentEstimate) -> list[np.ndarray]:
    """For each block and strategy, bytes that the backward pass reads of it."""
    frame = terms.frame
    program = frame.program
    turn = turning_point(frame)
    found = []
    for block, options in enumerate(estimate.strategies):
        sizes = np.zeros(len(options))
        for number, strategy in enumerate(options):
            for v, (spec, _) in terms.block(block, strategy).makes.items():
                early = program.values[v].producer < turn
                if early and any(user >= turn for user, _ in program.users[v]):
                    size = program.values[v].size_bytes
                    sizes[number] += ceil(size / spec_ways(spec, frame.mesh))
        found.append(sizes)
    return found
