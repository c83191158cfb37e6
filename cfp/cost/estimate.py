"""Estimated costs of a segment's choices, without compiling anything.

A segment's time has a term for each block (compute, and collectives inside it) and a
term for each pair of blocks (collectives between them). Measured curves price
collectives, measured rates price compute. The estimate ranks choices for measuring.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product

import numpy as np

from cfp.analysis.layout import Storage
from cfp.analysis.segments import Segment
from cfp.analysis.storage import USUAL_STORAGE
from cfp.analysis.strategies import Spec, Strategy, block_strategies
from cfp.cost.costs import SegmentChoice
from cfp.cost.terms import BlockTerms, Made, Terms


@dataclass(frozen=True)
class SegmentEstimate:
    """Estimated costs of one segment, for every strategy of every block.

    Attributes:
        node_ms: ``[storage mode][block][strategy]``.
        edge_ms: for each pair of blocks (positions in the segment, in order) a matrix
            over their strategies. A block's pair with itself is for its twin in the
            next segment.
        own_edge_ms: the same without collectives between the segment and its twin.
        numbers: for each block the number in ``strategies`` of each of its strategies;
            strategies that shard all ops alike share a number.
        modes: usual ways to store its parameters that differ.
    """

    segment: Segment
    strategies: tuple[tuple[Strategy, ...], ...]
    node_ms: Mapping[Storage, Sequence[np.ndarray]]
    edge_ms: Mapping[tuple[int, int], np.ndarray]
    own_edge_ms: Mapping[tuple[int, int], np.ndarray]
    numbers: tuple[Mapping[Strategy, int], ...]
    modes: tuple[Storage, ...]

    def total_ms(self, candidate: SegmentChoice) -> float:
        """The estimated time of one candidate."""
        pairs = zip(self.numbers, candidate.strategies, strict=True)
        picks = [numbers[strategy] for numbers, strategy in pairs]
        nodes = zip(self.node_ms[candidate.storage], picks, strict=True)
        total = sum(float(row[pick]) for row, pick in nodes)
        return total + sum(
            float(matrix[picks[a], picks[b]]) for (a, b), matrix in self.edge_ms.items()
        )


def estimate_segment(
    terms: Terms,
    segment: Segment,
    twin: Segment | None,
    among: Sequence[Set[Strategy]] | None = None,
    modes: Set[Storage] = frozenset(Storage),
) -> SegmentEstimate:
    """Estimates a segment.

    Args:
        twin: the segment of the same kind that follows right behind it, if any:
            what moves between the two is then part of the estimate.
        among: for each block the strategies to choose among; None for all.
        modes: ways to store its parameters to choose among.
    """
    frame, every = terms.frame, among or [None] * len(segment.blocks)
    numbered = [
        _numbered(terms, *one) for one in zip(segment.blocks, every, strict=True)
    ]
    strategies = tuple(firsts for firsts, _ in numbered)
    blocks = _blocks(terms, segment, strategies)
    owned = terms.owned_groups(segment.groups, [row[0] for row in blocks])
    inside = [[_inside_ms(terms, t) for t in row] for row in blocks]

    def node(
        t: BlockTerms, moved_ms: float, groups: Sequence[int], mode: Storage
    ) -> float:
        updated = sum(terms.state_ms(groups, t, mode))
        handed = terms.gradients_ms(segment.groups, t, mode)
        return t.matmul_ms + t.memory_ms + moved_ms + updated + handed

    node_ms = {
        mode: [
            np.array([node(*one, groups, mode) for one in zip(row, moved, strict=True)])
            for row, moved, groups in zip(blocks, inside, owned, strict=True)
        ]
        for mode in Storage
        if mode in modes and frame.effective(mode, frame.groups) is mode
    }
    edges = {
        (a, b): matrix
        for a, left in enumerate(blocks)
        for b, right in enumerate(blocks)
        if a < b and (matrix := _pair_ms(terms, left, right)) is not None
    }
    with_twin = dict(edges)
    if twin is not None and len(twin.blocks) == len(segment.blocks):
        # As if both chose alike: a block, too, as its own twin does.
        behind = _blocks(terms, twin, strategies)
        for (a, left), (b, right) in product(enumerate(blocks), enumerate(behind)):
            matrix = _pair_ms(terms, left, right)
            if matrix is None:
                continue
            if a == b:
                matrix = np.diag(np.diag(matrix))
            elif a > b:
                matrix = matrix.T
            place = min(a, b), max(a, b)
            with_twin[place] = with_twin.get(place, 0.0) + matrix
    numbers = tuple(numbers for _, numbers in numbered)
    groups = [frame.groups[g] for g in segment.groups]
    usual = USUAL_STORAGE if groups else (Storage.USED,)
    usual = tuple(m for m in usual if frame.effective(m, groups) is m)
    return SegmentEstimate(
        segment, strategies, node_ms, with_twin, edges, numbers, usual
    )


def _numbered(
    terms: Terms, block: int, among: Set[Strategy] | None
) -> tuple[tuple[Strategy, ...], dict[Strategy, int]]:
    """Numbers a block's strategies; those that shard all ops alike share a number.

    Returns:
        The first strategy of each number, and the number of each strategy.
    """
    frame, firsts, numbers = terms.frame, dict[Hashable, Strategy](), {}
    for strategy in block_strategies(frame.program, frame.blocks[block], frame.mesh):
        if among is not None and strategy not in among:
            continue
        axes = tuple(frame.shardings[block].factor_axes(strategy).values())
        first = firsts.setdefault(axes, strategy)
        numbers[strategy] = numbers.get(first, len(firsts) - 1)
    return tuple(firsts.values()), numbers


def _blocks(
    terms: Terms, segment: Segment, strategies: Sequence[Sequence[Strategy]]
) -> list[list[BlockTerms]]:
    """The terms of a segment's blocks under some strategies of each."""
    return [
        [terms.block(block, strategy) for strategy in options]
        for block, options in zip(segment.blocks, strategies, strict=True)
    ]


def _inside_ms(terms: Terms, block: BlockTerms) -> float:
    """Estimates the time of moves between the ops of one block, and of its data."""
    stored = {
        v: (next(filter(any, specs), specs[0]), ())
        for v, specs in block.reads.items()
        if v in terms.data
    }
    return sum(
        terms.move_ms(v, made, block.reads.get(v, ()))
        for v, made in (stored | dict(block.makes)).items()
    )


def _pair_ms(
    terms: Terms, left: Sequence[BlockTerms], right: Sequence[BlockTerms]
) -> np.ndarray | None:
    """Estimates the time of moves between two blocks, both ways, for all strategies."""
    ahead, back = _crossing(left, right), _crossing(right, left)
    if not ahead and not back:
        return None
    return _one_way(terms, left, right, ahead) + _one_way(terms, right, left, back).T


def _one_way(
    terms: Terms,
    makers: Sequence[BlockTerms],
    readers: Sequence[BlockTerms],
    values: Iterable[int],
) -> np.ndarray:
    """``[maker's strategy][reader's strategy]`` milliseconds to hand some values on."""
    total = np.zeros((len(makers), len(readers)))
    for v in values:
        # Many strategies treat one value alike: each way is priced once.
        rows: dict[Made, int] = {}
        columns: dict[tuple[Spec, ...], int] = {}
        made = [rows.setdefault(_boundary_shardings(t, v), len(rows)) for t in makers]
        read = [columns.setdefault(t.reads[v], len(columns)) for t in readers]
        costs = [[terms.move_ms(v, how, wants) for wants in columns] for how in rows]
        total += np.array(costs)[np.ix_(made, read)]
    return total


def _boundary_shardings(maker: BlockTerms, v: int) -> Made:
    """Returns the sharding of a block's result; sums are complete if it reads them."""
    have, partial = maker.makes[v]
    if partial and v in maker.reads:
        return maker.reads[v][0], ()
    return have, partial


def _crossing(makers: Sequence[BlockTerms], readers: Sequence[BlockTerms]) -> list[int]:
    """Values that one block makes and another reads, under any strategy."""
    return [v for v in makers[0].makes if v in readers[0].reads]
