"""Estimated costs of segments' choices, without compiling: time and memory.

A segment is a run of blocks, such as a layer. Its choice has a strategy (a sharding)
for each block and a storage mode for parameters. It may have kernels, too. A segment's
kind is the number of a group of equal segments. An opened loop is one whose body has
several segments.

A segment's time has a term for each block (compute, and collectives inside it) and a
term for each pair of blocks (collectives between them). The terms come from the
devices' rates. Estimates rank choices for measuring, or decide without measuring.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, compress, product

import numpy as np

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import AS_WRITTEN, Choice, Layout, SegmentKernels, Storage
from cfp.analysis.segments import Segment
from cfp.analysis.storage import USUAL_STORAGE
from cfp.analysis.strategies import Spec, Strategy, block_strategies
from cfp.cost.memory import (
    Step,
    accumulated_bytes,
    argument_bytes,
    can_rematerialize,
    fixed_bytes,
    host_bytes,
    peak_bytes,
    residuals,
    residuals_under,
    result_bytes,
    results_beside,
    steps_of,
    value_bytes,
)
from cfp.cost.terms import BlockTerms, Made, Terms
from cfp.kernels.kinds import proposals
from cfp.profiling.collectives import Rates
from cfp.settings import HOST_BYTES_PER_MS, LIMITED_MEMORY_AT_LEAST


@dataclass(frozen=True, slots=True)
class SegmentChoice:
    """A segment's choice: a strategy for each block, a storage mode for its parameters.

    Attributes:
        estimate_ms: estimated time, 0 if not estimated; ignored by comparison.
        remat: True if the segment rematerializes its forward pass.
        kernels: pairs such as ("attention", "cudnn"), for some of its ops; () if none.
    """

    strategies: tuple[Strategy, ...]
    storage: Storage
    estimate_ms: float = field(default=0.0, compare=False)
    remat: bool = False
    kernels: SegmentKernels = AS_WRITTEN

    @property
    def plain(self) -> SegmentChoice:
        """This choice without rematerialization; its kernels stay."""
        return replace(self, remat=False) if self.remat else self

    @property
    def as_written(self) -> SegmentChoice:
        """This choice without kernels; its rematerialization stays."""
        return replace(self, kernels=AS_WRITTEN) if self.kernels else self


def segment_candidate(analysis: Analysis, index: int, choice: Choice) -> SegmentChoice:
    """A segment's part of `choice`, with its groups' commonest storage, else USED."""
    segment = analysis.segments[index]
    modes = [choice.storage[g] for g in segment.groups]
    storage = max(dict.fromkeys(modes), key=modes.count) if modes else Storage.USED
    strategies = tuple(choice.blocks[b] for b in segment.blocks)
    kernels = choice.kernels_of(index)
    remat = index in choice.remat
    return SegmentChoice(strategies, storage, remat=remat, kernels=kernels)


def layout_of(analysis: Analysis, candidates: Mapping[int, SegmentChoice]) -> Layout:
    """Makes the layout (the shardings) of some segments from {index: its choice}.

    If one segment is given, adjacent segments of its kind get its strategies, too:
    values between them are then sharded as the neighbours read them.
    """
    segments, laid_out = analysis.segments, dict[int, SegmentChoice]()
    if len(candidates) == 1:
        [(index, candidate)] = candidates.items()
        kind, near = segments[index].kind, {index - 1, index + 1}
        alike = (s.index for s in segments if s.index in near and s.kind == kind)
        laid_out = dict.fromkeys(alike, candidate)
    laid_out.update(candidates)
    strategies = {
        block: strategy
        for i, one in laid_out.items()
        for block, strategy in zip(segments[i].blocks, one.strategies, strict=True)
    }
    storage = {
        group: candidate.storage
        for index, candidate in candidates.items()
        for group in segments[index].groups
    }
    return Layout(analysis.frame, strategies, storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBytes:
    """Memory that a segment keeps on each device, without temporaries.

    Attributes:
        state_bytes: state on the device, results of opened loops, and `new_bytes`.
        new_bytes: results that renew or repeat state in memory of their own.
        residual_bytes: other values kept from forward for the backward pass.
    """

    state_bytes: int
    new_bytes: int
    residual_bytes: int


class Costs:
    """Cached costs of segments: memory, time saved by kernels, resharding between them.

    Bytes are those of one device.

    Args:
        may_rematerialize: True if segments may rematerialize their forward pass.
        measured: True if segments' times are measured: they include reductions of
            results. Otherwise resharding between segments includes some of these.

    Attributes:
        fixed_bytes: non-state arguments, and non-state results with own memory.
        fixed_ms: ms of `shard_map` regions less collectives; 0 if `measured`.
    """

    def __init__(
        self,
        analysis: Analysis,
        rates: Rates,
        may_rematerialize: bool = True,
        *,
        measured: bool = True,
    ) -> None:
        self.analysis, self.rates, self._measured = analysis, rates, measured
        frame, may = analysis.frame, may_rematerialize
        arguments, self._new_fixed_bytes = fixed_bytes(analysis)
        self.fixed_bytes = arguments + self._new_fixed_bytes
        self._beside, outputs = results_beside(frame), frame.program.outputs
        self._results = {outputs[place] for place, _ in self._beside}
        self._terms = Terms(frame, rates)
        by_hand = () if measured else frame.program.ops
        self.fixed_ms = sum(map(self._terms.manual_ms, by_hand))
        self._kinds = [analysis.segments[i] for i in analysis.representatives]
        self._able = [may and can_rematerialize(frame, one) for one in self._kinds]
        self._laid_out = cache(lambda i, plain: layout_of(analysis, {i: plain}))
        self._steps = cache(self._find_steps)
        self.least_bytes = cache(self._least_bytes)

    def can_rematerialize(self, kind: int) -> bool:
        """True if segments of a kind may, and can, rematerialize their forward pass."""
        return self._able[kind]

    def _least_bytes(self, kind: int, candidate: SegmentChoice) -> SegmentBytes:
        """Bytes that a segment keeps; new results do not count as residuals."""
        segment, layout = self._kinds[kind], self._layout(kind, candidate)
        groups = (layout.frame.groups[index] for index in segment.groups)
        state = {p: argument_bytes(layout, p) for group in groups for p in group.args}
        beside = [place for place, p in self._beside if p in state]
        new, added = result_bytes(layout, beside), accumulated_bytes(layout, segment)
        held = residuals_under(layout, segment, candidate.remat, candidate.kernels)
        residual = sum(value_bytes(layout, v) for v in held - self._results)
        return SegmentBytes(
            state_bytes=sum(state.values()) + new + added,
            new_bytes=new,
            residual_bytes=residual,
        )

    def step_ms(self, kind: int, candidate: SegmentChoice, once_ms: float) -> float:
        """Time of a segment in a whole step, ms, from its time for one execution.

        In an opened loop a segment runs `repeat` times. Updates of its parameters after
        the loop run once: their estimated time is not repeated.
        """
        repeat = self._kinds[kind].repeat
        if repeat == 1:
            return once_ms
        layout = self._layout(kind, candidate)
        groups = [layout.frame.groups[index] for index in self._kinds[kind].groups]
        behind = (group for group in groups if group.ops)  # Others are in the loop.
        state = sum(argument_bytes(layout, p) for group in behind for p in group.args)
        update_ms = min(once_ms, self.rates.memory_ms(2 * state))
        return repeat * (once_ms - update_ms) + update_ms

    def temp_bytes(self, kind: int, candidate: SegmentChoice) -> int:
        """Estimates peak temporary bytes without residuals; `remat` is ignored."""
        ops, layout = self._kinds[kind].ops, self._layout(kind, candidate)
        program, sizes = layout.frame.program, dict(layout.frame.mesh)
        kernels, shares = proposals(layout, ops, candidate.kernels), dict[int, float]()
        for one in kernels:
            shares |= dict.fromkeys(one.site.between, one.share_at_once(sizes))
        spans = [span for one in kernels for span in one.spans(program, sizes)]
        shares |= dict.fromkeys(self._results, 0.0)  # Counted in the state.
        shares |= dict.fromkeys(compress(program.outputs, program.output_memory), 0.0)

        @cache
        def size_of(v: int) -> int:
            if v < 0:
                span = spans[-v - 1]
                return max(0, span.working_bytes - sum(map(size_of, span.counted)))
            spec = _wanted(layout, v)
            return round(shares.get(v, 1.0) * value_bytes(layout, v, spec))

        steps = self._steps(kind, tuple((span.first, span.last) for span in spans))
        needed = peak_bytes(steps, size_of)
        return max(0, needed - self.least_bytes(kind, candidate.plain).residual_bytes)

    def host_ms(self, kind: int, candidate: SegmentChoice) -> float:
        """Ms to move state from host memory, and back if returned in host memory."""
        segment, layout = self._kinds[kind], self._layout(kind, candidate)
        groups = (layout.frame.groups[index] for index in segment.groups)
        moved = host_bytes(layout, chain.from_iterable(g.args for g in groups))[1]
        return moved / HOST_BYTES_PER_MS

    def saved_by_kernel_ms(self, kind: int, candidate: SegmentChoice) -> float:
        """Estimates ms per step that kernels save; negative if slower, 0 without."""
        program, ops = self.analysis.frame.program, self._kinds[kind].ops
        if not candidate.kernels:
            return 0.0
        layout, terms = self._layout(kind, candidate), self._terms
        saved = 0.0
        for one in proposals(layout, ops, candidate.kernels):
            times = [
                terms.compute_ms(program.ops[op], layout.axes[op])
                for op in one.site.ops
                if op in layout.axes
            ]
            products = sum(matmul_ms for matmul_ms, _ in times)
            others = sum(memory_ms for _, memory_ms in times)
            kernel_ms = one.kernel_ms(products, others)
            saved += others + products - max(kernel_ms, terms.rates.launch_ms)
        return saved

    def least_peak_bytes(self, choice: Choice) -> int:
        """Estimates the least memory of a choice under XLA's memory limit.

        That is fixed bytes and state, and of the largest residuals the share
        `LIMITED_MEMORY_AT_LEAST` less new results. Temporaries do not count. Segments
        before the peak count as rematerialized if they can.
        """
        held, results = self.fixed_bytes, self._new_fixed_bytes
        kept = peak = 0
        for segment in self.analysis.segments:
            plain = segment_candidate(self.analysis, segment.index, choice)
            own = again = self.least_bytes(segment.kind, plain)
            if self.can_rematerialize(segment.kind):
                again = self.least_bytes(segment.kind, replace(plain, remat=True))
            held += own.state_bytes
            results += own.new_bytes
            peak = max(peak, kept + own.residual_bytes)
            kept += again.residual_bytes
        return held + max(0, round(LIMITED_MEMORY_AT_LEAST * peak) - results)

    def reshardings_ms(
        self,
        left: int,
        right: int,
        before: Iterable[SegmentChoice],
        after: Iterable[SegmentChoice],
    ) -> list[list[float]]:
        """Estimates ms per step of resharding both ways, ``[before][after]`` choice.

        `before` are choices of the segment with index `left`, `after` of `right`.
        """
        passing = self.analysis.passing
        ahead, back = passing.get((left, right), ()), passing.get((right, left), ())

        def laid_out(index: int, of: Iterable[SegmentChoice]) -> list[_Side]:
            """Lists (layout, blocks), one object for choices that reshard alike."""
            blocks, first = self.analysis.segments[index].blocks, {}
            every = ((self._laid_out(index, o.plain.as_written), blocks) for o in of)
            return [first.setdefault(self._ends(o, (*ahead, *back)), o) for o in every]

        @cache
        def pass_ms(here: _Side, there: _Side) -> float:
            ahead_ms = self._one_way_ms(here, there, ahead)
            return ahead_ms + self._one_way_ms(there, here, back)

        rows, columns = laid_out(left, before), laid_out(right, after)
        return [[pass_ms(here, there) for there in columns] for here in rows]

    def _layout(self, kind: int, candidate: SegmentChoice) -> Layout:
        return self._laid_out(self._kinds[kind].index, candidate.plain.as_written)

    def _find_steps(self, kind: int, spans: Sequence[tuple[int, int]]) -> list[Step]:
        frame, ops = self.analysis.frame, self._kinds[kind].ops
        return steps_of(frame.program, ops, residuals(frame, ops), spans)

    def _one_way_ms(self, maker: _Side, reader: _Side, values: Sequence[int]) -> float:
        """Estimates ms to reshard values that one segment makes for another's reads."""
        program, terms, total = self.analysis.frame.program, self._terms, 0.0
        for v in values:
            (have, partial), wants = self._made(maker, v), self._reads(reader, v)
            if have is None or not wants:
                continue
            value, group = program.values[v], terms.gradients.get(terms.same(v))
            size = value.size_bytes
            if value.producer < 0 and have != wants[0]:
                views = _views(maker[0], reader[0], v)
                if not views and maker[0].read_spec(v) == wants[0]:
                    continue  # The segment that stores it pays for the same gather.
                size = terms.narrowed_bytes(v, views)
            moves = [(have, partial, wants[0]), *((wants[0], (), w) for w in wants[1:])]
            once = sum(terms.transition_ms(size, *move, group) for move in moves)
            total += terms.turns(v) * once
        return total

    def _ends(self, side: _Side, values: Sequence[int]) -> Hashable:
        """Key of a segment's shardings of values; equal keys reshard at equal cost."""
        made = tuple(self._made(side, v) for v in values)
        return made, tuple((side[0].read_spec(v), self._reads(side, v)) for v in values)

    def _made(self, side: _Side, v: int) -> tuple[Spec | None, tuple[str, ...]]:
        """A value's (sharding, unreduced axes) as handed on; no axes if measured."""
        layout, program = side[0], self.analysis.frame.program
        op = program.maker(v)
        if self._measured or op is None or op.id not in layout.axes:
            return layout.spec(v), ()
        if (partial := layout.unreduced(op)) and (reads := self._own_reads(side, v)):
            return reads[0], ()
        return layout.natural_spec(op, op.results.index(v)), partial

    def _reads(self, side: _Side, v: int) -> tuple[Spec, ...]:
        """A segment's shardings to read `v`; at most one if measured or an argument."""
        is_all = not self._measured and self.analysis.frame.program.maker(v) is not None
        if is_all and (own := self._own_reads(side, v)):
            return own
        return () if (first := _wanted(side[0], v)) is None else (first,)

    def _own_reads(self, side: _Side, v: int) -> tuple[Spec, ...]:
        (layout, blocks), frame = side, self.analysis.frame
        uses = (
            use for use in frame.program.users[v] if frame.block_of[use[0]] in blocks
        )
        specs = dict.fromkeys(layout.use_spec(*use) for use in uses)
        return tuple(spec for spec in specs if spec is not None)


# A layout, and the segment's blocks in it.
_Side = tuple[Layout, range]


def _wanted(reader: Layout, value: int) -> Spec | None:
    """Sharding of a segment's first read of a value, else of an update's; or None."""
    spec = reader.read_spec(value)
    if spec is None:
        for user, index in sorted(reader.frame.program.users[value]):
            if user in reader.axes:
                return reader.use_spec(user, index)
    return spec


def _views(maker: Layout, reader: Layout, value: int) -> list[int]:
    """Ids of `reader`'s casts and views of a parameter if `maker` gathers it; or []."""
    frame = maker.frame
    group = frame.group_of_arg.get(frame.program.args.index(value))
    if group is None or maker.spec(value) == maker.read_spec(value):
        return []  # It is not gathered.
    users = {user for user, _ in frame.program.users[value] if user in reader.axes}
    return sorted(users & {*frame.groups[group].reads})


@dataclass(frozen=True)
class SegmentEstimate:
    """Estimated times of one segment, for every allowed strategy of every block.

    A twin is an equal segment that follows directly.

    Attributes:
        strategies: ``[block]`` allowed strategies that differ in some op's sharding.
        node_ms: ms of a block and its state, ``[storage mode][block][strategy]``.
        edge_ms: resharding between two blocks and to their twins, by their positions in
            the segment; ``[strategy][strategy]``. A block's pair with itself is for its
            twin alone. Pairs that exchange no values have no entry.
        own_edge_ms: the same without the twin.
        numbers: ``[block]`` {strategy: index in ``strategies`` of its sharding}.
        modes: usual storage modes that differ here; `node_ms` may lack some.
    """

    segment: Segment
    strategies: tuple[tuple[Strategy, ...], ...]
    node_ms: Mapping[Storage, Sequence[np.ndarray]]
    edge_ms: Mapping[tuple[int, int], np.ndarray]
    own_edge_ms: Mapping[tuple[int, int], np.ndarray]
    numbers: tuple[Mapping[Strategy, int], ...]
    modes: tuple[Storage, ...]

    def total_ms(self, candidate: SegmentChoice) -> float:
        """Ms per step of a choice, with `edge_ms`; kernels and `remat` do not count."""
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
    """Estimates a segment's times for every allowed strategy and storage mode.

    Args:
        twin: the next segment, if it is of the same kind; resharding between the two is
            then included.
        among: for each block the allowed strategies; None for all.
        modes: allowed storage modes of its parameters.
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
        # Both segments choose alike, so a block's pair with its twin is a diagonal.
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
    """Returns one strategy of each sharding, and {strategy: its sharding's place}."""
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
    return [
        [terms.block(block, strategy) for strategy in options]
        for block, options in zip(segment.blocks, strategies, strict=True)
    ]


def _inside_ms(terms: Terms, block: BlockTerms) -> float:
    """Estimates ms to reshard values and non-state arguments between ops of a block."""
    pins = terms.frame.pins
    stored = {
        v: (pins.get(terms.data[v]) or next(filter(any, specs), specs[0]), ())
        for v, specs in block.reads.items()
        if v in terms.data
    }
    made = (stored | dict(block.makes)).items()
    return sum(terms.move_ms(v, how, block.reads.get(v, ())) for v, how in made)


def _pair_ms(
    terms: Terms, left: Sequence[BlockTerms], right: Sequence[BlockTerms]
) -> np.ndarray | None:
    """Ms to reshard both ways, ``[left's strategy][right's]``; None without values."""
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
    """Ms to reshard values, ``[maker's strategy][reader's strategy]``."""
    total = np.zeros((len(makers), len(readers)))
    for v in values:
        # Many strategies shard a value alike: each pair of shardings is priced once.
        rows: dict[Made, int] = {}
        columns: dict[tuple[Spec, ...], int] = {}
        made = []
        for maker in makers:
            have, partial = maker.makes[v]
            if partial and v in maker.reads:  # It is summed where the block reads it.
                have, partial = maker.reads[v][0], ()
            made.append(rows.setdefault((have, partial), len(rows)))
        read = [columns.setdefault(t.reads[v], len(columns)) for t in readers]
        costs = [[terms.move_ms(v, how, wants) for wants in columns] for how in rows]
        total += np.array(costs)[np.ix_(made, read)]
    return total


def _crossing(makers: Sequence[BlockTerms], readers: Sequence[BlockTerms]) -> list[int]:
    return [v for v in makers[0].makes if v in readers[0].reads]
