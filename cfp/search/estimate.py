"""Estimated costs of a segment's choices, without compiling anything.

A segment's time is taken apart into a term for each block (its compute, and what
must move inside it) and a term for each pair of blocks (what must move between
them). Collectives are priced by the measured curves, compute by the measured rates.
The estimate ranks choices; only what is worth measuring is then measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from cfp.analysis.contractions import is_contraction
from cfp.analysis.layout import Frame, Storage, extend_spec, spec_ways
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
from cfp.search.transitions import TransitionCosts

Makes = Mapping[int, tuple[Spec, tuple[str, ...]]]  # value -> (sharding, unreduced)
Reads = Mapping[int, tuple[Spec, ...]]  # value -> shardings it is read with


@dataclass(frozen=True, slots=True)
class BlockTerms:
    """One block under one strategy."""

    compute_ms: float
    makes: Makes
    reads: Reads


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
    """

    segment: Segment
    strategies: tuple[tuple[Strategy, ...], ...]
    node_ms: Mapping[Storage, tuple[tuple[float, ...], ...]]
    edge_ms: Mapping[tuple[int, int], tuple[tuple[float, ...], ...]]
    node_bytes: Mapping[Storage, tuple[tuple[float, ...], ...]]

    def total_ms(self, picks: tuple[int, ...], storage: Storage) -> float:
        """The estimated time of one strategy per block."""
        total = sum(self.node_ms[storage][b][s] for b, s in enumerate(picks))
        for (a, b), matrix in self.edge_ms.items():
            total += matrix[picks[a]][picks[b]]
        return total


class Estimator:
    """Estimates segments of one program on one mesh."""

    def __init__(self, frame: Frame, rates: Rates) -> None:
        self.frame = frame
        self.rates = rates
        self.moves = TransitionCosts(rates, frame.mesh)
        self._sizes = dict(frame.mesh)

    def segment(self, segment: Segment, twin: Segment | None) -> SegmentEstimate:
        """Estimates a segment.

        Args:
            segment: the segment.
            twin: the segment of the same kind that follows right behind it, if any:
                what moves between the two is then part of the estimate.
        """
        frame = self.frame
        strategies = tuple(
            tuple(block_strategies(frame.program, frame.blocks[b], frame.mesh))
            for b in segment.blocks
        )
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
                row = [self._state(owned[place], t, mode) for t in options]
                times.append(
                    tuple(
                        t.compute_ms + self._inside(t) + ms
                        for t, (ms, _) in zip(options, row, strict=True)
                    )
                )
                sizes.append(tuple(size for _, size in row))
            node_ms[mode], node_bytes[mode] = tuple(times), tuple(sizes)
        edges = self._edges(terms)
        if twin is not None:
            self._add_twin_edges(edges, segment, twin, strategies, terms)
        return SegmentEstimate(segment, strategies, node_ms, edges, node_bytes)

    # -- one block -----------------------------------------------------------

    def block_terms(self, block: int, strategy: Strategy) -> BlockTerms:
        """What a block computes, makes and reads under a strategy."""
        program = self.frame.program
        axes = self.frame.shardings[block].factor_axes(strategy)
        compute = 0.0
        makes: dict[int, tuple[Spec, tuple[str, ...]]] = {}
        reads: dict[int, dict[Spec, None]] = {}
        for op_id, factor_axes in axes.items():
            op = program.ops[op_id]
            assert op.rule is not None
            compute += self._compute_ms(op, factor_axes)
            partial = reduced_axes(op.rule, factor_axes)
            for dims, result in zip(op.rule.results, op.results, strict=False):
                makes[result] = (tensor_spec(op.rule, dims, factor_axes), partial)
            for dims, operand in zip(op.rule.operands, op.operands, strict=False):
                value = program.values[operand]
                if value.shape and value.producer not in program.leaf_ops:
                    spec = tensor_spec(op.rule, dims, factor_axes)
                    reads.setdefault(operand, {})[spec] = None
        return BlockTerms(compute, makes, {v: tuple(s) for v, s in reads.items()})

    def _compute_ms(self, op: Op, axes: FactorAxes) -> float:
        rule, program = op.rule, self.frame.program
        assert rule is not None
        ways = prod(self._sizes[a] for names in axes for a in names)
        if is_contraction(op):
            flops = 2.0 * prod(rule.sizes)
            dtype = program.values[op.operands[0]].dtype
            return op.repeat * self.rates.matmul_ms(flops / ways, dtype)
        moved = sum(program.values[r].size_bytes for r in op.results)
        return op.repeat * self.rates.memory_ms(moved / ways)

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
        self, terms: list[list[BlockTerms]]
    ) -> dict[tuple[int, int], tuple[tuple[float, ...], ...]]:
        edges = {}
        for a in range(len(terms)):
            for b in range(a + 1, len(terms)):
                forward = _crossing(terms[a], terms[b])
                backward = _crossing(terms[b], terms[a])
                if forward or backward:
                    edges[a, b] = tuple(
                        tuple(
                            self._pair(ta, tb, forward) + self._pair(tb, ta, backward)
                            for tb in terms[b]
                        )
                        for ta in terms[a]
                    )
        return edges

    def _pair(self, maker: BlockTerms, reader: BlockTerms, values: list[int]) -> float:
        total = 0.0
        for v in values:
            have, partial = maker.makes[v]
            if v not in maker.reads or not partial:
                total += self._move(v, have, partial, reader.reads[v])
            else:  # its own block has completed the sum already
                total += self._move(v, maker.reads[v][0], (), reader.reads[v])
        return total

    def _add_twin_edges(
        self,
        edges: dict[tuple[int, int], tuple[tuple[float, ...], ...]],
        segment: Segment,
        twin: Segment,
        strategies: tuple[tuple[Strategy, ...], ...],
        terms: list[list[BlockTerms]],
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
                out = _crossing(mine, other)
                back = _crossing(other, mine)
                if not out and not back:
                    continue
                low, high = min(a, b), max(a, b)
                matrix = [[0.0] * len(strategies[high]) for _ in strategies[low]]
                for i, ta in enumerate(mine):
                    for j, tb in enumerate(other):
                        if a == b and i != j:
                            continue
                        cost = self._pair(ta, tb, out) + self._pair(tb, ta, back)
                        row, column = (i, j) if a <= b else (j, i)
                        matrix[row][column] += cost
                known = edges.get((low, high))
                edges[low, high] = tuple(
                    tuple(
                        matrix[i][j] + (known[i][j] if known else 0.0)
                        for j in range(len(matrix[i]))
                    )
                    for i in range(len(matrix))
                )


def _crossing(makers: list[BlockTerms], readers: list[BlockTerms]) -> list[int]:
    """Values that one block makes and another reads."""
    if not makers or not readers:
        return []
    return [v for v in makers[0].makes if v in readers[0].reads]
