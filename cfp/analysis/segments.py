"""Segments: runs of blocks (contractions with the ops sharded alike), such as layers.

Blocks are compared by fingerprints of their contractions. A stretch of blocks that
repeats back to back is cut into its repeats; stretches before and behind it are
searched again, and so is each repeat. Equal segments have one *kind*: one segment of
each kind is measured. A *unit* is not cut: one block, or a run of blocks in one loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from cfp.analysis.blocks import Block
from cfp.analysis.flow import Flow
from cfp.analysis.layout import Frame
from cfp.program.graph import Program, searched_once


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of blocks.

    Attributes:
        start, end: block indices, ``end`` not included.
        kind: equal for segments with equal contractions; kinds count from 0.
        ops: ids of its top-level ops, with the updates of its parameters.
        groups: indices of the storage groups that it uses, and no earlier segment.
        repeat: runs in one step, if an opened loop holds it; else 1. Updates of its
            parameters, behind the loop, run once.
    """

    index: int
    start: int
    end: int
    kind: int
    ops: tuple[int, ...]
    groups: tuple[int, ...]
    repeat: int = 1

    @property
    def blocks(self) -> range:
        return range(self.start, self.end)


@searched_once
def find_segments(frame: Frame) -> tuple[Segment, ...]:
    """Cuts the blocks of a program into segments, with kinds of equal segments."""
    units = _units(frame)
    program = frame.program
    prints, numbers = [block_fingerprint(program, b) for b in frame.blocks], {}
    marks = [
        numbers.setdefault(tuple(prints[b] for b in unit), len(numbers))
        for unit in units
    ]
    upstream = _units_upstream(frame, units)
    loops = [_is_loop(frame, unit) for unit in units]
    cuts = _Cutter(marks, upstream, loops).cut(0, len(units))
    kinds: dict[tuple, int] = {}
    # For each storage group the block that first uses its parameter.
    owners = [min(blocks, default=-1) for blocks in group_readers(frame)]
    ranges = []
    for low, high in cuts:
        kind = kinds.setdefault(tuple(marks[low:high]), len(kinds))
        ranges.append((units[low][0], units[high - 1][-1] + 1, kind))
    of_block = {b: i for i, (s, e, _) in enumerate(ranges) for b in range(s, e)}
    ops: list[set[int]] = [set() for _ in ranges]
    for op_id, block in enumerate(frame.block_of):
        if block >= 0:
            ops[of_block[block]].add(program.top_level(op_id))
    groups: list[list[int]] = [[] for _ in ranges]
    for group, block in zip(frame.groups, owners, strict=True):
        if block >= 0:
            groups[of_block[block]].append(group.index)
            ops[of_block[block]].update(group.ops)
            inner = filter(program.is_top_level, group.inner_ops)
            ops[of_block[block]].update(inner)
    return tuple(
        Segment(
            index=i,
            start=start,
            end=end,
            kind=kind,
            ops=tuple(sorted(ops[i])),
            groups=tuple(groups[i]),
            repeat=max((program.turns(op) for op in ops[i]), default=1),
        )
        for i, (start, end, kind) in enumerate(ranges)
    )


def open_loops(frame: Frame) -> Frame:
    """Returns the frame with loops opened whose bodies consist of several segments.

    Ops of an opened loop count as top-level. A loop over microbatches, with both passes
    of all layers, is opened. In training, loops over layers are not: each has one pass.
    """
    count = len(find_segments(frame))
    tried: set[int] = set()
    while True:
        loop = next((one for one in _whole_loops(frame) if one not in tried), None)
        if loop is None:
            return frame
        tried.add(loop)
        opened = replace(frame.program, opened=frame.program.opened | {loop})
        inside = replace(frame, program=opened)
        found = len(find_segments(inside))
        if found > count:
            frame, count = inside, found


def _whole_loops(frame: Frame) -> list[int]:
    """Returns op ids of loops that hold all contractions of several blocks."""
    program = frame.program
    found: dict[int, None] = {}
    for unit in _units(frame):
        tops = {program.top_level(m.op) for b in unit for m in frame.blocks[b].members}
        if len(unit) > 1 and len(tops) == 1:
            found[tops.pop()] = None
    return [op for op in found if program.ops[op].kind == "while"]


def _units(frame: Frame) -> list[list[int]]:
    """Returns each unit's block indices: one, or a run that a loop or branch ties."""
    program = frame.program
    first: dict[int, int] = {}
    reach = list(range(len(frame.blocks)))  # the last block tied to each
    for block in frame.blocks:
        for op_id in block.ops:
            if not program.is_top_level(op_id):
                start = first.setdefault(program.top_level(op_id), block.index)
                reach[start] = max(reach[start], block.index)
    units: list[list[int]] = []
    end = -1
    for index in range(len(frame.blocks)):
        if index <= end:
            units[-1].append(index)
        else:
            units.append([index])
        end = max(end, reach[index])
    return units


def _is_loop(frame: Frame, unit: list[int]) -> bool:
    """True if a loop that is not opened repeats contractions of a unit."""
    program = frame.program
    return any(
        program.ops[m.op].repeat > program.turns(m.op)
        for b in unit
        for m in frame.blocks[b].members
    )


def block_fingerprint(program: Program, block: Block) -> Hashable:
    """Returns a key of a block's contractions: kinds, types, rules, repeats."""
    parts = []
    for member in block.members:
        op = program.ops[member.op]
        shapes = tuple(
            (program.shape(v), program.values[v].dtype)
            for v in (*op.operands, *op.results)
        )
        parts.append((op.name, shapes, op.rule, member.factors, op.repeat))
    return tuple(sorted(parts, key=repr))


def _units_upstream(frame: Frame, units: list[list[int]]) -> list[int]:
    """Returns for each unit a bit mask of the nearest units upstream of its anchors."""
    program = frame.program
    unit_of = {b: i for i, unit in enumerate(units) for b in unit}
    anchors = {b.anchor: unit_of[b.index] for b in frame.blocks}
    made_by = [0] * len(program.values)
    upstream = [0] * len(units)
    for op in program.ops:
        reads = [*op.reads]
        for v in reads:
            for outside, inside in program.entered(v):
                made_by[inside] |= made_by[outside]
        if op.id in anchors and not program.is_top_level(op.id):
            # Values that enter its loop may reach it in a later iteration.
            reads.extend(program.ops[program.top_level(op.id)].operands)
        found = 0
        for v in reads:
            found |= made_by[v]
        if op.id in anchors:
            unit = anchors[op.id]
            upstream[unit] |= found & ~(1 << unit)
            found = 1 << unit
        for result in op.results:
            made_by[result] = found
    return upstream


def _reads_from(units: int, low: int, high: int) -> bool:
    return units >> low & (1 << high - low) - 1 != 0


@dataclass(slots=True, eq=False, repr=False)
class _Cutter:
    """Cuts a sequence of units into segments.

    A loop over layers is a segment of its own, unless it is in a repeated layer. A unit
    has a fingerprint (`marks`), a bit mask of the nearest units that it reads, and True
    if it is such a loop. Keys of `known` are (low, high, True inside a repeat).
    """

    marks: Sequence[Hashable]
    upstream: Sequence[int]
    loops: Sequence[bool]
    known: dict[tuple[int, int, bool], list[tuple[int, int]]] = field(
        default_factory=dict, init=False
    )

    def cut(self, low: int, high: int) -> list[tuple[int, int]]:
        """Returns (start, end) of each segment of units ``[low, high)``."""
        wanted = [(low, high, False)]
        while wanted:  # A stack, since stretches nest deeper than Python recurses.
            try:
                self.known[wanted[-1]] = self._cut(*wanted[-1])
                wanted.pop()
            except KeyError as missing:
                wanted.append(missing.args[0])
        return self.known[low, high, False]

    def _cut(self, low: int, high: int, inner: bool) -> list[tuple[int, int]]:
        """Cuts units, `inner` in a repeat; KeyError with the key that `known` lacks."""
        if low >= high:
            return []
        ways = [
            self._by_repeat(low, high, inner, *repeat)
            for repeat in _best_repeats(self.marks, self.upstream, low, high)
        ]
        if ways:
            return min(ways, key=lambda cuts: (_kinds(self.marks, cuts), len(cuts)))
        loop = next((i for i in range(low, high) if self.loops[i]), None)
        if loop is not None and not inner and high - low > 1:
            behind = self.known[loop + 1, high, inner]
            return [*self.known[low, loop, inner], (loop, loop + 1), *behind]
        split = _restart(self.marks, self.upstream, low, high)
        if split is not None:
            return [(low, split), *self.known[split, high, inner]]
        return [(low, high)]

    def _by_repeat(
        self, low: int, high: int, inner: bool, start: int, period: int, count: int
    ) -> list[tuple[int, int]]:
        once = self.known[start, start + period, True]
        shifts = range(0, count * period, period)
        return [
            *self.known[low, start, inner],
            *((a + shift, b + shift) for shift in shifts for a, b in once),
            *self.known[start + count * period, high, inner],
        ]


def _kinds(marks: Sequence[Hashable], cuts: list[tuple[int, int]]) -> int:
    return len({tuple(marks[low:high]) for low, high in cuts})


def _best_repeats(
    marks: Sequence[Hashable], upstream: Sequence[int], low: int, high: int
) -> list[tuple[int, int, int]]:
    """Returns repeats in series that cover most units: (start, period, count) in units.

    [] without repeats. If there are several, only their starts differ.
    """
    best: list[tuple[int, int, int]] = []
    covered = 0
    for period in range(1, (high - low) // 2 + 1):
        run = 0
        for i in range(low, high - period + 1):
            if i < high - period and marks[i] == marks[i + period]:
                run += 1
                continue
            whole = (run + period) // period
            for start in range(i - run, i + period - whole * period + 1):
                count = whole
                while count >= 2 and not _in_series(upstream, start, period, count):
                    count -= 1
                if count >= 2 and count * period > covered:
                    best, covered = [(start, period, count)], count * period
                elif count >= 2 and (count * period, period) == (covered, best[0][1]):
                    best.append((start, period, count))
            run = 0
    return best


def _in_series(upstream: Sequence[int], start: int, period: int, count: int) -> bool:
    """True if each repeat reads the one before; `upstream` has bit masks by unit."""
    return all(
        any(_reads_from(units, at - period, at) for units in upstream[at : at + period])
        for at in range(start + period, start + count * period, period)
    )


def _restart(
    marks: Sequence[Hashable], upstream: Sequence[int], low: int, high: int
) -> int | None:
    """Returns where the longest copy of a prefix starts that reads units before it."""
    for length in range((high - low) // 2, 1, -1):
        for at in range(low + length, high - length + 1):
            same = all(marks[low + k] == marks[at + k] for k in range(length))
            own = upstream[at : at + length]
            if same and any(_reads_from(units, low, at) for units in own):
                return at
    return None


def group_readers(frame: Frame) -> list[set[int]]:
    """Returns by storage group the blocks that read it, or else make its gradients."""
    program, flow = frame.program, Flow(frame.program)
    readers = []
    for group in frame.groups:
        users = flow.readers(*(program.args[position] for position in group.args))
        makers = filter(None, map(program.maker, group.gradients))
        ways = (op for op, _ in users), makers
        found = ({frame.block_of[op.id] for op in ops} - {-1} for ops in ways)
        readers.append(next(filter(None, found), set()))
    return readers
