"""ParallelBlocks: which ops follow the sharding of which contraction.

A block holds an anchor, the contractions derived from it, and the ops between them
and the next contraction: forward ops belong to the contraction before them,
backward ops to the derived contraction after them. Ops that update the state (an
optimizer's) belong to no block; they follow the storage of what they update
(:mod:`cfp.analysis.storage`).
"""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import dataclass
from math import prod

from cfp.analysis.contractions import Member, find_members
from cfp.analysis.flow import Flow, passes
from cfp.analysis.labels import label_ops
from cfp.analysis.naming import block_names
from cfp.analysis.numbering import Numbers
from cfp.analysis.unionfind import UnionFind
from cfp.program.graph import Op, Program

# Parts of a program without contractions and without a tensor of this many elements
# (random keys, counters) are not worth a block.
_MIN_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class Block:
    """A ParallelBlock.

    Attributes:
        index: its place in the sequence of blocks.
        members: its contractions, the anchor first.
        ops: ids of all its ops, contractions included, in program order.
        name: its place in the user's model; see :mod:`cfp.analysis.naming`.
    """

    index: int
    members: tuple[Member, ...]
    ops: tuple[int, ...]
    name: str

    @property
    def anchor(self) -> int:
        """The op id of the anchor."""
        return self.members[0].op


def find_blocks(
    program: Program,
    numbers: Numbers,
    update_ops: Set[int],
    flow: Flow | None = None,
    parameters: Set[int] = frozenset(),
) -> tuple[Block, ...]:
    """Groups a program's ops into ParallelBlocks.

    Args:
        program: the program.
        numbers: its value numbers.
        update_ops: ops that only update state; they stay outside.
        flow: its data flow, where it is at hand.
        parameters: positions of the arguments that are parameters, for names.
    """
    flow = flow or Flow(program)
    members = find_members(program, numbers)
    labels = label_ops(flow, members, update_ops)
    while extra := _extra_anchors(flow, labels, update_ops):
        members += extra
        labels = label_ops(flow, members, update_ops)
    ops: list[list[int]] = [[] for _ in members]
    for op_id, label in enumerate(labels):
        if label >= 0:
            ops[label].append(op_id)
    names = block_names(flow, [m[0].op for m in members], parameters)
    return tuple(
        Block(i, tuple(m), tuple(ops[i]), names[i]) for i, m in enumerate(members)
    )


def _extra_anchors(
    flow: Flow, labels: list[int], update_ops: Set[int]
) -> list[list[Member]]:
    """Anchors for parts of a program that no contraction reaches.

    In a part without contractions the op with the largest result anchors a block.
    """
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
            if program.values[v].shape:
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
    return [[Member(i, _all_factors(program.ops[i]))] for i in anchors]


def _all_factors(op: Op) -> tuple[int, ...]:
    assert op.rule is not None
    return tuple(range(len(op.rule.sizes)))
