"""Estimated costs of a segment's choices, without compiling anything.

A segment's time is taken apart into a term for each block (its compute, and what
must move inside it) and a term for each pair of blocks (what must move between
them). Collectives are priced by the measured curves, compute by the measured rates.
The estimate ranks choices; only what is worth measuring is then measured.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cfp.analysis.contractions import is_contraction
from cfp.analysis.layout import Frame, Storage, even_spec, extend_spec, spec_ways
from cfp.analysis.segments import Segment
from cfp.analysis.strategies import (
    FactorAxes,
    Spec,
    Strategy,
    block_strategies,
    reduced_axes,
    tensor_spec,
)
from cfp.profiling.collectives import Rates
from cfp.program.graph import Op
from cfp.program.rules import padded_size
from cfp.search.problem import Candidate
from cfp.search.transitions import TransitionCosts

Makes = Mapping[int, tuple[Spec, tuple[str, ...]]]  # value -> (sharding, unreduced)
Reads = Mapping[int, tuple[Spec, ...]]  # value -> shardings it is read with


@dataclass(frozen=True, slots=True)
class BlockTerms:
    """One block under one strategy."""

    compute_ms: float
    makes: Makes
    reads: Reads


@dataclass(frozen=True, slots=True)
class _OpTerms:
    """One op under one sharding."""

    compute_ms: float
    makes: Sequence[tuple[int, tuple[Spec, tuple[str, ...]]]]
    reads: Sequence[tuple[int, Spec]]


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
        node_bytes: like ``node_ms``, bytes of state on each device.
        numbers: for each of its blocks the number in ``strategies`` of every strategy
            of the block; those that shard all ops alike share one.
    """

    segment: Segment
    strategies: tuple[tuple[Strategy, ...], ...]
    node_ms: Mapping[Storage, Sequence[np.ndarray]]
    edge_ms: Mapping[tuple[int, int], np.ndarray]
    node_bytes: Mapping[Storage, Sequence[np.ndarray]]
    numbers: tuple[Mapping[Strategy, int], ...]

    def total_ms(self, candidate: Candidate) -> float:
        """The estimated time of one candidate."""
        pairs = zip(self.numbers, candidate.strategies, strict=True)
        picks = [numbers[strategy] for numbers, strategy in pairs]
        nodes = self.node_ms[candidate.storage]
        total = sum(float(row[pick]) for row, pick in zip(nodes, picks, strict=True))
        for (a, b), matrix in self.edge_ms.items():
            total += float(matrix[picks[a], picks[b]])
        return total


class Estimator:
    """Estimates segments of one program on one mesh."""

    def __init__(self, frame: Frame, rates: Rates) -> None:
        self.frame = frame
        self.rates = rates
        self.moves = TransitionCosts(rates, frame.mesh)
        self._sizes = dict(frame.mesh)
        self._ops: dict[tuple[int, FactorAxes], _OpTerms] = {}

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
            [self.block_terms(b, s) for s in options]
            for b, options in zip(segment.blocks, strategies, strict=True)
        ]
        position = {b: i for i, b in enumerate(segment.blocks)}
        owned = self._owned_groups(segment, position)
        node_ms, node_bytes = {}, {}
        for mode in Storage:
            times, sizes = [], []
            for place, options in enumerate(terms):
                state = [self._state(owned[place], t, mode) for t in options]
                moved = [t.compute_ms + self._inside(t) for t in options]
                times.append(np.array(moved) + [ms for ms, _ in state])
                sizes.append(np.array([size for _, size in state]))
            node_ms[mode], node_bytes[mode] = times, sizes
        edges = self._edges(terms)
        if twin is not None:
            self._add_twin_edges(edges, segment, twin, strategies, terms)
        return SegmentEstimate(
            segment, strategies, node_ms, edges, node_bytes, tuple(numbers)
        )

    # -- one block -----------------------------------------------------------

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

    def block_terms(self, block: int, strategy: Strategy) -> BlockTerms:
        """What a block computes, makes and reads under a strategy."""
        compute = 0.0
        makes: dict[int, tuple[Spec, tuple[str, ...]]] = {}
        reads: dict[int, dict[Spec, None]] = {}
        for key in self.frame.shardings[block].factor_axes(strategy).items():
            terms = self._ops.get(key)
            if terms is None:
                terms = self._ops[key] = self._op_terms(*key)
            compute += terms.compute_ms
            makes.update(terms.makes)
            for operand, spec in terms.reads:
                reads.setdefault(operand, {})[spec] = None
        return BlockTerms(compute, makes, {v: tuple(s) for v, s in reads.items()})

    def _op_terms(self, op_id: int, axes: FactorAxes) -> _OpTerms:
        program = self.frame.program
        op = program.ops[op_id]
        rule = op.rule
        assert rule is not None
        partial = reduced_axes(rule, axes)
        return _OpTerms(
            self._compute_ms(op, axes),
            [
                (result, (tensor_spec(rule, dims, axes), partial))
                for dims, result in zip(rule.results, op.results, strict=False)
            ],
            [
                (operand, tensor_spec(rule, dims, axes))
                for dims, operand in zip(rule.operands, op.operands, strict=False)
                if program.values[operand].shape
                and program.values[operand].producer not in program.leaf_ops
            ],
        )

    def _compute_ms(self, op: Op, axes: FactorAxes) -> float:
        rule, program = op.rule, self.frame.program
        assert rule is not None
        share = 1.0  # of the op's work that one device does, padding included
        for size, names in zip(rule.sizes, axes, strict=True):
            ways = prod(self._sizes[a] for a in names)
            share *= padded_size(size, ways) / (size * ways)
        if is_contraction(op):
            flops = 2.0 * prod(rule.sizes)
            dtype = program.values[op.operands[0]].dtype
            return op.repeat * self.rates.matmul_ms(flops * share, dtype)
        moved = sum(program.values[r].size_bytes for r in op.results)
        return op.repeat * self.rates.memory_ms(moved * share)

    def _inside(self, terms: BlockTerms) -> float:
        """What moves between the ops of one block."""
        total = 0.0
        for v, (have, partial) in terms.makes.items():
            total += self._move(v, have, partial, terms.reads.get(v, ()))
        return total

    def _move(
        self, v: int, have: Spec, partial: tuple[str, ...], wants: tuple[Spec, ...]
    ) -> float:
        if not wants:
            return 0.0
        value = self.frame.program.values[v]
        size = value.size_bytes * self._repeat(v)
        total = self.moves.cost_ms(size, have, partial, wants[0])
        for want in wants[1:]:
            total += self.moves.cost_ms(size, wants[0], (), want)
        return total

    def _repeat(self, v: int) -> int:
        producer = self.frame.program.values[v].producer
        return self.frame.program.ops[producer].repeat if producer >= 0 else 1

    # -- state ---------------------------------------------------------------

    def _owned_groups(
        self, segment: Segment, position: Mapping[int, int]
    ) -> list[list[int]]:
        """For each block of a segment the storage groups that it reads first."""
        frame = self.frame
        owned: list[list[int]] = [[] for _ in segment.blocks]
        for index in segment.groups:
            group = frame.groups[index]
            readers = [
                position[frame.block_of[user]]
                for v in (*(frame.program.args[a] for a in group.args),)
                for user, _ in frame.program.users[v]
                if frame.block_of[user] in position
            ]
            makers = [
                position[frame.block_of[frame.program.values[v].producer]]
                for v in group.gradients
                if frame.block_of[frame.program.values[v].producer] in position
            ]
            owned[min(readers or makers or [0])].append(index)
        return owned

    def _state(
        self, groups: list[int], terms: BlockTerms, mode: Storage
    ) -> tuple[float, float]:
        """(ms, bytes) of storing, gathering and updating some groups."""
        frame, program = self.frame, self.frame.program
        total, held = 0.0, 0.0
        for index in groups:
            group = frame.groups[index]
            main = program.args[group.args[0]]
            wants = terms.reads.get(main, ())
            used = wants[0] if wants else ((),) * len(group.shape)
            used = even_spec(used, group.shape, frame.mesh)
            used = frame.pins.get(group.args[0], used)
            wide = used
            if mode is not Storage.USED:
                wide = extend_spec(used, group.shape, frame.mesh)
            size = program.values[main].size_bytes
            stored = wide if mode is Storage.SHARDED else used
            if mode is Storage.SHARDED:
                total += self._gather_ms(main, wide, wants or (used,), terms)
            elif mode is Storage.OPTIMIZER:
                total += self.moves.cost_ms(size, wide, (), used)
            for v in group.gradients:
                if v in terms.makes:
                    have, partial = terms.makes[v]
                    grad_bytes = program.values[v].size_bytes
                    if len(have) == len(wide):
                        total += self.moves.cost_ms(grad_bytes, have, partial, wide)
            state = sum(program.values[program.args[a]].size_bytes for a in group.args)
            total += self.rates.memory_ms(2 * state / spec_ways(wide, frame.mesh))
            held += size / spec_ways(stored, frame.mesh)
            held += (state - size) / spec_ways(wide, frame.mesh)
        return total, held

    def _gather_ms(
        self, main: int, wide: Spec, wants: tuple[Spec, ...], terms: BlockTerms
    ) -> float:
        """Gathering a parameter, after its cast where it is cast."""
        program = self.frame.program
        value = program.values[main]
        total = 0.0
        for user, _ in program.users[main]:
            op = program.ops[user]
            if op.kind == "convert" and op.results[0] in terms.makes:
                want = terms.makes[op.results[0]][0]
                size = program.values[op.results[0]].size_bytes
                total += self.moves.cost_ms(size, wide, (), want)
        if total:
            return total
        return sum(self.moves.cost_ms(value.size_bytes, wide, (), w) for w in wants)

    # -- pairs ---------------------------------------------------------------

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
                    [self._move(v, have, partial, wants) for wants in columns]
                    for have, partial in rows
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
            [self.block_terms(b, s) for s in options]
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


def _handed_over(maker: BlockTerms, v: int) -> tuple[Spec, tuple[str, ...]]:
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
