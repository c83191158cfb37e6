"""Estimated costs of a segment's choices, without compiling anything.

A segment's time is taken apart into a term for each block (its compute, and what
must move inside it) and a term for each pair of blocks (what must move between
them). Collectives are priced by the measured curves, compute by the measured rates.
The estimate ranks choices; only what is worth measuring is then measured.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cfp.analysis.layout import Frame, Storage
from cfp.analysis.segments import Segment
from cfp.analysis.strategies import Strategy, block_strategies
from cfp.cost.choice import SegmentChoice
from cfp.cost.terms import BlockTerms, Made, Terms
from cfp.profiling.collectives import Rates


@dataclass(frozen=True)
class SegmentEstimate:
    """Estimated costs of one segment, for every strategy of every block.

    Attributes:
        segment: the segment.
        strategies: for each of its blocks the strategies it may take.
        node_ms: ``[storage mode][block][strategy]``.
        edge_ms: for each pair of blocks (positions in the segment, the first not
            behind the second) a matrix over their strategies. Pairs of a block with
            itself hold what moves between a block and its twin in the next segment.
        own_edge_ms: the same without what moves between the segment and its twin.
        numbers: for each of its blocks the number in ``strategies`` of every strategy
            of the block; those that shard all ops alike share one.
    """

    segment: Segment
    strategies: tuple[tuple[Strategy, ...], ...]
    node_ms: Mapping[Storage, Sequence[np.ndarray]]
    edge_ms: Mapping[tuple[int, int], np.ndarray]
    own_edge_ms: Mapping[tuple[int, int], np.ndarray]
    numbers: tuple[Mapping[Strategy, int], ...]

    def total_ms(self, candidate: SegmentChoice) -> float:
        """The estimated time of one candidate."""
        picks = self._picks(candidate)
        nodes = self.node_ms[candidate.storage]
        total = sum(float(row[pick]) for row, pick in zip(nodes, picks, strict=True))
        return total + self._edges(picks)

    def without_twin(self) -> SegmentEstimate:
        """The estimate of the segment by itself, whatever follows it."""
        return replace(self, edge_ms=self.own_edge_ms)

    def _picks(self, candidate: SegmentChoice) -> list[int]:
        pairs = zip(self.numbers, candidate.strategies, strict=True)
        return [numbers[strategy] for numbers, strategy in pairs]

    def _edges(self, picks: Sequence[int]) -> float:
        return sum(
            float(matrix[picks[a], picks[b]]) for (a, b), matrix in self.edge_ms.items()
        )


class Estimator:
    """Estimates segments of one program on one mesh."""

    def __init__(self, frame: Frame, rates: Rates) -> None:
        self.frame = frame
        self.terms = Terms(frame, rates)

    def segment(self, segment: Segment, twin: Segment | None) -> SegmentEstimate:
        """Estimates a segment.

        Args:
            segment: the segment.
            twin: the segment of the same kind that follows right behind it, if any:
                what moves between the two is then part of the estimate.
        """
        numbers = [self._number(b) for b in segment.blocks]
        strategies = tuple(_firsts(numbered) for numbered in numbers)
        terms = [
            [self.terms.block(b, s) for s in options]
            for b, options in zip(segment.blocks, strategies, strict=True)
        ]
        owned = self.terms.owned_groups(segment.groups, [row[0] for row in terms])
        inside = [[self.terms.inside_ms(t) for t in options] for options in terms]
        node_ms = {}
        for mode in Storage:
            node_ms[mode] = []
            for place, options in enumerate(terms):
                state = [self.terms.state_ms(owned[place], t, mode) for t in options]
                times = [
                    t.matmul_ms + t.memory_ms + update_ms + moved_ms + gather_ms
                    for t, (update_ms, gather_ms), moved_ms in zip(
                        options, state, inside[place], strict=True
                    )
                ]
                node_ms[mode].append(np.array(times))
        edges = own_edges = self._edges(terms)
        if twin is not None:
            edges = dict(own_edges)
            self._add_twin_edges(edges, segment, twin, strategies, terms)
        return SegmentEstimate(
            segment,
            strategies,
            node_ms,
            edges,
            own_edges,
            tuple(numbers),
        )

    def _number(self, block: int) -> dict[Strategy, int]:
        """Numbers a block's strategies; those that shard all ops alike get one."""
        frame = self.frame
        known: dict[Hashable, int] = {}
        return {
            strategy: known.setdefault(
                tuple(frame.shardings[block].factor_axes(strategy).values()),
                len(known),
            )
            for strategy in block_strategies(
                frame.program, frame.blocks[block], frame.mesh
            )
        }

    def _edges(
        self, terms: Sequence[Sequence[BlockTerms]]
    ) -> dict[tuple[int, int], np.ndarray]:
        return {
            (a, b): self._pair(terms[a], terms[b])
            for a in range(len(terms))
            for b in range(a + 1, len(terms))
            if _crossing(terms[a], terms[b]) or _crossing(terms[b], terms[a])
        }

    def _pair(
        self, left: Sequence[BlockTerms], right: Sequence[BlockTerms]
    ) -> np.ndarray:
        """What moves between two blocks, both ways, for all of their strategies."""
        return self._one_way(left, right) + self._one_way(right, left).T

    def _one_way(
        self, makers: Sequence[BlockTerms], readers: Sequence[BlockTerms]
    ) -> np.ndarray:
        """``[maker's strategy][reader's strategy]`` milliseconds."""
        total = np.zeros((len(makers), len(readers)))
        for v in _crossing(makers, readers):
            made = [_handed_over(t, v) for t in makers]
            read = [t.reads[v] for t in readers]
            # Many strategies treat one value alike: each way is priced once.
            rows, columns = _numbers(made), _numbers(read)
            costs = np.array(
                [
                    [self.terms.move_ms(v, how, wants) for wants in columns]
                    for how in rows
                ]
            )
            total += costs[np.ix_([rows[m] for m in made], [columns[r] for r in read])]
        return total

    def _add_twin_edges(
        self,
        edges: dict[tuple[int, int], np.ndarray],
        segment: Segment,
        twin: Segment,
        strategies: tuple[tuple[Strategy, ...], ...],
        terms: Sequence[Sequence[BlockTerms]],
    ) -> None:
        """Adds what moves between a segment and its twin, as if both chose alike."""
        if len(twin.blocks) != len(segment.blocks):
            return
        theirs = [
            [self.terms.block(b, s) for s in options]
            for b, options in zip(twin.blocks, strategies, strict=True)
        ]
        for a, mine in enumerate(terms):
            for b, other in enumerate(theirs):
                if not _crossing(mine, other) and not _crossing(other, mine):
                    continue
                matrix = self._pair(mine, other)
                if a == b:  # a block chooses as its own twin does
                    matrix = np.diag(np.diag(matrix))
                elif a > b:
                    matrix = matrix.T
                place = min(a, b), max(a, b)
                edges[place] = edges[place] + matrix if place in edges else matrix


def _firsts(numbers: Mapping[Strategy, int]) -> tuple[Strategy, ...]:
    """The first strategy of each number."""
    found: dict[int, Strategy] = {}
    for strategy, number in numbers.items():
        found.setdefault(number, strategy)
    return tuple(found.values())


def _handed_over(maker: BlockTerms, v: int) -> Made:
    """How a block hands a value on: sums that it needs itself it has completed."""
    have, partial = maker.makes[v]
    if partial and v in maker.reads:
        return maker.reads[v][0], ()
    return have, partial


def _numbers(items: Sequence[Hashable]) -> dict[Any, int]:
    """The distinct items, numbered."""
    return {item: number for number, item in enumerate(dict.fromkeys(items))}


def _crossing(makers: Sequence[BlockTerms], readers: Sequence[BlockTerms]) -> list[int]:
    """Values that one block makes and another reads."""
    if not makers or not readers:
        return []
    return [v for v in makers[0].makes if v in readers[0].reads]
