"""Assigns ops to ParallelBlocks: groups of ops that follow one op's sharding.

A block has an anchor (mostly a forward contraction), the contractions derived from it
(such as for gradients), and ops around them. Forward ops mostly belong to the
contraction before them, backward ops to the derived contraction after them. The first
ops of a loop's body come after the last contraction of the previous iteration. Ops of
storage groups belong to no block: they follow the storage of the state that they update
(:mod:`cfp.analysis.storage`).
"""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import dataclass
from itertools import chain
from math import prod

from cfp.analysis.contractions import (
    DimClasses,
    Member,
    Numbers,
    UnionFind,
    find_members,
)
from cfp.analysis.flow import Flow, block_names, first_downstream, passes, weight_place
from cfp.program.graph import Op, Program

NONE = -1
_FAR = -(2**60)


class _Labels:
    """Finds each op's label: its block's index in `members`, or -1."""

    def __init__(
        self, flow: Flow, members: list[list[Member]], update_ops: Set[int]
    ) -> None:
        self.flow = flow
        self.program: Program = flow.program
        self.update_ops = update_ops
        self.members = members
        self.member_block: dict[int, int] = {}
        self.derived: set[int] = set()
        for index, block in enumerate(members):
            for member in block:
                self.member_block[member.op] = index
                if member.derived:
                    self.derived.add(member.op)
        # Blocks by the place of their anchors in the program, and the reverse.
        self.by_rank = sorted(range(len(members)), key=lambda i: members[i][0].op)
        self.rank = [0] * len(members)
        for place, index in enumerate(self.by_rank):
            self.rank[index] = place
        # (loop, block) pairs in which the loop holds a forward member of the block.
        self.loop_blocks: set[tuple[int, int]] = set()
        for op, block in self.member_block.items():
            loop = self.program.ops[op].parent
            while loop >= 0 and op not in self.derived:
                self.loop_blocks.add((loop, block))
                loop = self.program.ops[loop].parent
        # The blocks with contractions in each outermost loop that has any.
        self.held: dict[int, set[int]] = {}
        for op, block in self.member_block.items():
            if self.program.ops[op].parent >= 0:
                self.held.setdefault(self.program.top_level(op), set()).add(block)

    def run(self) -> list[int]:
        previous, backward = self._upstream()
        following, _ = first_downstream(self.flow, self.member_block.keys())
        labels = [NONE] * len(self.program.ops)
        for op in self.program.ops:
            if op.id in self.member_block:
                labels[op.id] = self.member_block[op.id]
            elif self._takes_part(op):
                after = following[op.id][1]
                before = previous[op.id]
                if backward[op.id] and after in self.derived:
                    labels[op.id] = self.member_block[after]
                elif not backward[op.id] and before != NONE:
                    labels[op.id] = before
                if not self._may_hold(op.id, labels[op.id]):
                    labels[op.id] = NONE
                # Other ops follow their neighbours: casts of parameters before their
                # first use, and gradients that no contraction reads.
        self._fill(labels, (True, False, True))
        self._reattach(labels)
        self._widen(labels, backward)
        self._reattach(labels)
        return labels

    def _takes_part(self, op: Op) -> bool:
        return (
            op.id not in self.update_ops
            and op.id not in self.program.leaf_ops
            and not passes(op)
        )

    def _may_hold(self, op: int, block: int) -> bool:
        """False for -1, or if the op's outermost loop holds only other blocks."""
        held = self.held.get(self.program.top_level(op))
        return block != NONE and (held is None or block in held)

    def _upstream(self) -> tuple[list[int], list[bool]]:
        """Returns two lists by op id: latest anchor's block, or -1; True if backward.

        A value's time is the rank of the latest anchor upstream. Inside a loop, times
        from the previous iteration are shifted below all times of this iteration. Times
        of values from outside are shifted below both.
        """
        program, count = self.program, len(self.rank)
        of_op = [NONE] * len(program.ops)
        op_backward = [False] * len(program.ops)
        times: list[int] = []
        backward: list[bool] = []
        # One more turn for each loop. If an inner loop swaps carried values, times need
        # not converge, and any of them will do.
        loops = sum(op.kind == "while" for op in program.ops)
        for _turn in range(loops + 2):
            before = times
            times = [_FAR] * len(program.values)
            backward_before, backward = backward, [False] * len(program.values)
            for op in program.ops:
                reads = op.reads
                for v in reads:
                    if times[v] == _FAR and v in self.flow.entry_place:
                        self._enter(v, times, backward, before, backward_before)
                if passes(op):
                    for result in op.results:
                        sources = self.flow.sources(result)
                        if op.kind == "while":
                            sources = sources[:1]
                        best = max((times[s] for s in sources), default=_FAR)
                        times[result] = best if best == _FAR else best % count
                        backward[result] = any(backward[s] for s in sources)
                    continue
                # A scalar (a loss, a norm, a seed) ties no dims together.
                shaped = [v for v in reads if program.shape(v)]
                best = max((times[v] for v in shaped), default=_FAR)
                back = any(backward[v] for v in shaped) or op.id in self.derived
                if op.id in self.member_block and op.id not in self.derived:
                    # Data behind an anchor is forward, even in a second forward pass
                    # that starts from results of a backward pass.
                    best, back = self.rank[self.member_block[op.id]], False
                of_op[op.id] = NONE if best == _FAR else self.by_rank[best % count]
                op_backward[op.id] = back
                for result in op.results:
                    times[result], backward[result] = best, back
            is_settled = (times, backward) == (before, backward_before)
            if is_settled or not self.flow.entry_place:
                break
        return of_op, op_backward

    def _enter(
        self,
        entry: int,
        times: list[int],
        backward: list[bool],
        before: list[int],
        backward_before: list[bool],
    ) -> None:
        loop, place = self.flow.entry_place[entry]
        origin = self.program.ops[loop].operands[place]
        yielded = self.program.ops[loop].yields[place]
        count = len(self.rank)
        if times[origin] == _FAR and origin in self.flow.entry_place:
            self._enter(origin, times, backward, before, backward_before)
        outside = times[origin]
        times[entry] = outside if outside == _FAR else outside % count - 2 * count
        backward[entry] = backward[origin]
        if not before:
            return
        backward[entry] = backward[entry] or backward_before[yielded]
        around = before[yielded]
        if around != _FAR and (loop, self.by_rank[around % count]) in self.loop_blocks:
            times[entry] = around % count - count

    def _fill(self, labels: list[int], directions: tuple[bool, ...]) -> None:
        """Labels unlabelled ops in place, like a labelled op at their largest value.

        A direction is True for operands, in program order; False for readers, reversed.
        """
        program = self.program
        for forward in directions:
            for op in program.ops if forward else reversed(program.ops):
                if labels[op.id] != NONE or not self._takes_part(op):
                    continue
                near: list[tuple[int, int]] = []
                for v in op.operands if forward else op.results:
                    readers = (user for user, _ in self.flow.readers(v))
                    others = self.flow.makers(v) if forward else readers
                    size = program.values[v].size_bytes
                    found = (labels[other.id] for other in others)
                    near += [(size, x) for x in found if self._may_hold(op.id, x)]
                if near:
                    labels[op.id] = max(near)[1]

    def _reattach(self, labels: list[int]) -> None:
        """Relabels ops that share no dim with their block (masks) like neighbours."""
        before = list(labels)
        ops = _by_block(labels)
        for label, members in enumerate(self.members):
            mine = ops.get(label, [])
            for op_id, (_, is_shared) in self._lacking(mine, members, mine).items():
                if not is_shared:
                    labels[op_id] = NONE
        self._fill(labels, (False, True, False))
        for op_id, label in enumerate(before):
            if labels[op_id] == NONE:
                labels[op_id] = label

    def _widen(self, labels: list[int], backward: list[bool]) -> None:
        """Moves ops with dims that their block lacks to a block that has them, if any.

        A broadcast starts it: position embeddings are broadcast over the batch. Their
        own block, without the batch dim, would replicate them, so they follow the
        activations. Sums over the batch in the backward pass follow, too.
        """
        ops = _by_block(labels)
        for label in self.by_rank:
            mine = ops.get(label, [])
            found = self._lacking(mine, self.members[label], mine)
            lacking = {op: factors for op, (factors, _) in found.items() if factors}
            grown = self._broadcast(mine, lacking)
            if not grown:
                continue
            targets: dict[int, None] = {}
            for part in self._parts([op for op in lacking if not backward[op]]):
                if grown.intersection(part):
                    for other in self._wider(part, lacking, labels, label):
                        rest = [op for op in part if labels[op] == label]
                        if self._move(rest, ops, other, labels):
                            targets[other] = None
            for other in targets:
                rest = [op for op in lacking if labels[op] == label]
                self._move(rest, ops, other, labels)
            ops = _by_block(labels) if targets else ops

    def _broadcast(self, ops: list[int], lacking: dict[int, Set[int]]) -> set[int]:
        """Returns ops behind contractions that add dims with factors of `lacking`."""
        made: set[int] = set()
        found = set()
        for op_id in ops:
            op = self.program.ops[op_id]
            if op_id in self.member_block or made.intersection(op.operands):
                made.update(op.results)
                if op.rule is not None and op_id in lacking:
                    read = {f for dims in op.rule.operands for dim in dims for f in dim}
                    found |= {op_id} if lacking[op_id] - read else set()
        return found

    def _parts(self, ops: list[int]) -> list[list[int]]:
        """Groups ops that are connected by data, each group in program order."""
        parts, known = UnionFind(), set(ops)
        for op_id in ops:
            for v in self.program.ops[op_id].results:
                for reader, _ in self.flow.readers(v):
                    if reader.id in known:
                        parts.union(op_id, reader.id)
        found: dict[Hashable, list[int]] = {}
        for op_id in ops:
            found.setdefault(parts.find(op_id), []).append(op_id)
        return list(found.values())

    def _wider(
        self,
        part: list[int],
        lacking: dict[int, Set[int]],
        labels: list[int],
        label: int,
    ) -> list[int]:
        """Returns blocks that may have the dims that block `label` lacks.

        Blocks that make operands with these dims come first, then blocks that read
        results; in each, the latest first.
        """
        near: set[int] = set()
        for op_id in part:
            op = self.program.ops[op_id]
            for v, dims in zip(op.operands, op.known_rule.operands, strict=False):
                if not lacking[op_id].isdisjoint(f for dim in dims for f in dim):
                    near |= {labels[o.id] for o in self.flow.makers(v)}
        near -= {label, NONE}
        results = (v for op_id in part for v in self.program.ops[op_id].results)
        readers = (o.id for v in results for o, _ in self.flow.readers(v))
        behind = {labels[op_id] for op_id in readers} - {label, NONE, *near}
        return [
            other
            for blocks in (near, behind)
            for other in sorted(blocks, key=lambda other: -self.rank[other])
        ]

    def _move(
        self,
        candidates: list[int],
        ops: dict[int, list[int]],
        block: int,
        labels: list[int],
    ) -> bool:
        """Moves candidates that `block` may hold and whose dims it has; True if any."""
        held = [op for op in candidates if self._may_hold(op, block)]
        joined = [*ops[block], *held]
        lacking = self._lacking(joined, self.members[block], held)
        moved = [op for op, (factors, _) in lacking.items() if not factors]
        for op_id in moved:
            labels[op_id] = block
        ops[block] += moved
        return bool(moved)

    def _lacking(
        self, ops: list[int], members: list[Member], asked: list[int]
    ) -> dict[int, tuple[Set[int], bool]]:
        """Finds {op with a rule: (factors no member shares, True if it shares any)}."""
        classes = DimClasses(
            self.program, ops, tuple(members), self.flow.canonical, axis_size=1
        )
        anchored = set()
        for member in members:
            op = self.program.ops[member.op]
            for v in (*op.operands, *op.results):
                for dim in range(len(self.program.shape(v))):
                    anchored.add(classes.of_dim(v, dim))
        for op_id in ops:
            if (rule := self.program.ops[op_id].rule) is not None:
                # Minor factors of a reshaped dim count if its major factor does.
                for major, *minor in filter(None, chain(*rule.operands, *rule.results)):
                    if classes.of_factor(op_id, major) in anchored:
                        anchored.update(classes.of_factor(op_id, f) for f in minor)
        found = {}
        for op_id in asked:
            rule = self.program.ops[op_id].rule
            if rule is None or op_id in self.member_block:
                continue
            factors = {f for f, size in enumerate(rule.sizes) if size > 1}
            shared = {f for f in factors if classes.of_factor(op_id, f) in anchored}
            found[op_id] = factors - shared, bool(shared)
        return found


def _by_block(labels: list[int]) -> dict[int, list[int]]:
    ops: dict[int, list[int]] = {}
    for op_id, label in enumerate(labels):
        if label != NONE:
            ops.setdefault(label, []).append(op_id)
    return ops


# Parts without contractions get a block if they have a tensor of this many elements;
# random keys and counters have fewer.
_MIN_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class Block:
    """A ParallelBlock: ops that follow the sharding of one, the anchor.

    Attributes:
        members: its contractions, gathers, scatters, anchor first; else the largest op.
        ops: ids of all ops, contractions included, in program order.
        name: place in the user's model; see :mod:`cfp.analysis.flow`.
        weight: index of the anchor's only operand from a parameter, or -1.
    """

    index: int
    members: tuple[Member, ...]
    ops: tuple[int, ...]
    name: str
    weight: int = -1

    @property
    def anchor(self) -> int:
        """The op id of the anchor."""
        return self.members[0].op


def find_blocks(
    flow: Flow, numbers: Numbers, update_ops: Set[int], parameters: Set[int]
) -> tuple[Block, ...]:
    """Groups ops into ParallelBlocks, except constants, loops and some small parts.

    Args:
        update_ops: ids of ops that only update state; they get no block.
        parameters: positions of arguments that are parameters, for names and `weight`.
    """
    program = flow.program
    members = find_members(program, numbers)
    labels = _Labels(flow, members, update_ops).run()
    while extra := _extra_anchors(flow, labels, update_ops):
        members += extra
        labels = _Labels(flow, members, update_ops).run()
    ops = _by_block(labels)
    names = block_names(flow, [m[0].op for m in members], parameters)
    anchors = [program.ops[m[0].op] for m in members]
    weights = [weight_place(flow, anchor, parameters) for anchor in anchors]
    return tuple(
        Block(i, tuple(m), tuple(ops.get(i, ())), names[i], weights[i])
        for i, m in enumerate(members)
    )


def _extra_anchors(
    flow: Flow, labels: list[int], update_ops: Set[int]
) -> list[list[Member]]:
    """Returns new blocks' members: the largest op of each large unlabelled part."""
    program = flow.program
    apart = update_ops | program.leaf_ops
    rest = {
        op.id
        for op in program.ops
        if labels[op.id] < 0 and op.id not in apart and not passes(op)
    }
    parts = UnionFind()
    for op_id in rest:
        for v in program.ops[op_id].results:
            if program.shape(v):
                for reader, _ in flow.readers(v):
                    if reader.id in rest:
                        parts.union(reader.id, op_id)
    largest: dict[Hashable, tuple[int, int]] = {}
    for op_id in sorted(rest):
        op = program.ops[op_id]
        if op.rule is None or not op.results:
            continue
        value = program.values[op.results[0]]
        if prod(value.shape) >= _MIN_ELEMENTS:
            part = parts.find(op_id)
            largest[part] = max(largest.get(part, (0, 0)), (value.size_bytes, -op_id))
    anchors = sorted(-negative for _, negative in largest.values())
    every = (range(len(program.ops[i].known_rule.sizes)) for i in anchors)
    return [[Member(i, tuple(one))] for i, one in zip(anchors, every, strict=True)]
