"""ParallelBlocks: which ops follow the sharding of which contraction.

A block holds an anchor, the contractions derived from it, and the ops between them
and the next contraction: forward ops belong to the contraction before them,
backward ops to the derived contraction after them. Ops that update the state (an
optimizer's) belong to no block; they follow the storage of what they update
(:mod:`cfp.analysis.storage`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from cfp.analysis.contractions import Member, find_members
from cfp.program.graph import Op, Program

_NONE = -1


@dataclass(frozen=True, slots=True)
class Block:
    """A ParallelBlock.

    Attributes:
        index: its place in the sequence of blocks.
        members: its contractions, the anchor first.
        ops: ids of all its ops, contractions included, in program order.
        name: its place in the user's model, from the scopes.
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
    program: Program, numbers: list[int], update_ops: frozenset[int]
) -> tuple[Block, ...]:
    """Groups a program's ops into ParallelBlocks.

    Args:
        program: the program.
        numbers: its value numbers.
        update_ops: ops that only update state; they stay outside.
    """
    members = find_members(program, numbers)
    members += _extra_anchors(program, members, update_ops)
    labels = _Labels(program, members, update_ops).run()
    ops: dict[int, list[int]] = defaultdict(list)
    for op_id, label in enumerate(labels):
        if label != _NONE:
            ops[label].append(op_id)
    return tuple(
        Block(i, tuple(m), tuple(ops[i]), block_name(program, m, ops[i]))
        for i, m in enumerate(members)
    )


def block_name(program: Program, members: list[Member], ops: list[int]) -> str:
    """A short name from the anchor's scope: the user's modules, without JAX's."""
    return scope_path(program.ops[members[0].op].scope)


def scope_path(scope: str) -> str:
    """The user's part of a name stack: ``jit(f)/jvp(Net)/a/b/dot`` gives ``a/b``."""
    parts = []
    for part in _split_scope(scope)[:-1]:
        inner = part
        while "(" in inner and inner.endswith(")"):
            inner = inner[inner.index("(") + 1 : -1]
        is_jit = part.startswith(("jit(", "pjit("))
        if inner and not is_jit and inner not in ("while", "body", "closed_call"):
            parts.append(inner)
    return "/".join(parts) or _split_scope(scope)[-1]


def _split_scope(scope: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for char in scope:
        depth += (char == "(") - (char == ")")
        if char == "/" and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [*parts, current]


def _extra_anchors(
    program: Program, members: list[list[Member]], update_ops: frozenset[int]
) -> list[list[Member]]:
    """Anchors for parts of a program that no contraction reaches.

    In a part without contractions the op with the largest result anchors a block.
    """
    reached = _connected(program, {m.op for block in members for m in block})
    found: list[list[Member]] = []
    while True:
        rest = [
            op
            for op in program.ops
            if op.rule is not None
            and op.id not in reached
            and op.id not in update_ops
            and op.id not in program.leaf_ops
            and op.results
            and prod(program.values[op.results[0]].shape) > 1
        ]
        if not rest:
            return found
        largest = max(
            rest, key=lambda op: (program.values[op.results[0]].size_bytes, -op.id)
        )
        assert largest.rule is not None
        found.append([Member(largest.id, tuple(range(len(largest.rule.sizes))))])
        reached |= _connected(program, {largest.id})


def _connected(program: Program, start: set[int]) -> set[int]:
    """Ops that share data with some ops, upstream or downstream, leaves apart."""
    seen, stack = set(start), list(start)
    leaves = program.leaf_ops
    while stack:
        op = program.ops[stack.pop()]
        near = set()
        for v in (*op.operands, *op.yields):
            value = program.values[v]
            if value.shape:
                near.add(value.producer)
                if value.origin >= 0:
                    near.add(program.values[value.origin].producer)
        for v in (*op.results, *op.entries):
            if program.values[v].shape:
                near.update(user for user, _ in program.users[v])
        for other in near:
            if other >= 0 and other not in seen and other not in leaves:
                seen.add(other)
                stack.append(other)
    return seen


class _Labels:
    """Gives each op the block it follows."""

    def __init__(
        self,
        program: Program,
        members: list[list[Member]],
        update_ops: frozenset[int],
    ) -> None:
        self.program = program
        self.update_ops = update_ops
        self.member_block: dict[int, int] = {}
        self.derived: set[int] = set()
        for index, block in enumerate(members):
            for member in block:
                self.member_block[member.op] = index
                if member.derived:
                    self.derived.add(member.op)
        self.anchor_of = [block[0].op for block in members]

    def run(self) -> list[int]:
        previous, backward = self._look_back()
        following = self._look_ahead()
        labels = [_NONE] * len(self.program.ops)
        for op in self.program.ops:
            if op.id in self.member_block:
                labels[op.id] = self.member_block[op.id]
            elif self._takes_part(op):
                after = following[op.id]
                before = previous[op.id]
                if backward[op.id] and after in self.derived:
                    labels[op.id] = self.member_block[after]
                elif not backward[op.id] and before != _NONE:
                    labels[op.id] = before
                # What is left (parameters on their way to their first use, and
                # gradients of what no contraction reads) follows its neighbours.
        self._fill(labels)
        return labels

    def _takes_part(self, op: Op) -> bool:
        return (
            op.id not in self.update_ops
            and op.id not in self.program.leaf_ops
            and not op.body
        )

    def _look_back(self) -> tuple[list[int], list[bool]]:
        """Per op: the latest anchor's block upstream; whether it is backward."""
        program = self.program
        latest = [_NONE] * len(program.values)
        backward = [False] * len(program.values)
        op_latest = [_NONE] * len(program.ops)
        op_backward = [False] * len(program.ops)
        order = {anchor: i for i, anchor in enumerate(sorted(self.anchor_of))}
        rank = [order[anchor] for anchor in self.anchor_of]

        def later(a: int, b: int) -> int:
            if a == _NONE or b == _NONE:
                return max(a, b)
            return a if rank[a] >= rank[b] else b

        for op in program.ops:
            best, back = _NONE, op.id in self.derived
            for v in (*op.operands, *op.yields):
                origin = program.values[v].origin
                if origin >= 0:
                    latest[v] = later(latest[v], latest[origin])
                    backward[v] = backward[v] or backward[origin]
                best = later(best, latest[v])
                back = back or backward[v]
            if op.id in self.member_block and op.id not in self.derived:
                best = self.member_block[op.id]
            op_latest[op.id], op_backward[op.id] = best, back
            for index, result in enumerate(op.results):
                if op.body and index < len(op.yields):
                    source = op.yields[index]
                    latest[result] = latest[source]
                    backward[result] = backward[source]
                else:
                    latest[result], backward[result] = best, back
        return op_latest, op_backward

    def _look_ahead(self) -> list[int]:
        """Per op: the first contraction downstream, by program order, or -1."""
        program = self.program
        ahead: dict[int, int] = {}

        def of_value(v: int) -> int:
            if v not in ahead:
                ahead[v] = _NONE  # cuts the back edge of a loop
                best = _NONE
                for user, index in program.users[v]:
                    best = _earlier(best, self._through(user, index, of_value))
                ahead[v] = best
            return ahead[v]

        found = [_NONE] * len(program.ops)
        for op in reversed(program.ops):
            for result in op.results:
                found[op.id] = _earlier(found[op.id], of_value(result))
            for entry in op.entries:
                ahead.pop(entry, None)
        return found

    def _through(self, user: int, index: int, of_value) -> int:
        op = self.program.ops[user]
        if user in self.member_block:
            return user
        if not op.body:
            best = _NONE
            for result in op.results:
                best = _earlier(best, of_value(result))
            return best
        count = len(op.operands)
        if index >= count:  # a yielded value
            return of_value(op.results[(index - count) % max(1, len(op.results))])
        best = _NONE
        for entry in op.entries[index::count] if op.kind == "while" else ():
            best = _earlier(best, of_value(entry))
        return best

    def _fill(self, labels: list[int]) -> None:
        """Gives ops that are still without a block their largest neighbour's."""
        program = self.program
        for forward in (True, False, True):
            for op in program.ops if forward else reversed(program.ops):
                if labels[op.id] != _NONE or not self._takes_part(op):
                    continue
                near: list[tuple[int, int]] = []
                if forward:
                    for v in op.operands:
                        value = program.values[v]
                        if value.producer >= 0 and labels[value.producer] != _NONE:
                            near.append((value.size_bytes, labels[value.producer]))
                else:
                    for v in op.results:
                        size = program.values[v].size_bytes
                        for user, _ in program.users[v]:
                            if labels[user] != _NONE:
                                near.append((size, labels[user]))
                if near:
                    labels[op.id] = max(near)[1]


def _earlier(a: int, b: int) -> int:
    if a == _NONE or b == _NONE:
        return max(a, b)
    return min(a, b)
