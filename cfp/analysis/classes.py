"""Which dims of a block's tensors must be sharded together.

Within a block, dims that an op maps to one factor form a class, and classes join
through the tensors between ops. Contractions do not join classes: sharding passes
them only as the block's strategy says.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from cfp.analysis.contractions import Member
from cfp.program.graph import Op, Program
from cfp.program.rules import Dims, Rule


class UnionFind:
    """Disjoint sets of hashable things."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        """The representative of an item's set."""
        parent = self._parent
        root = item
        while (above := parent.get(root, root)) != root:
            root = above
        while item != root:
            parent[item], item = root, parent.get(item, item)
        return root

    def union(self, a: Hashable, b: Hashable) -> None:
        """Joins the sets of two items."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[a] = b


def major_factors(rule: Rule, dims: Dims, axis_size: int) -> list[tuple[int, int]]:
    """(dim, factor) pairs along which a tensor can be split that many ways."""
    found = []
    for dim, factors in enumerate(dims):
        factor = rule.major(factors)
        if factor is None or factor in rule.fixed or rule.sizes[factor] % axis_size:
            continue
        found.append((dim, factor))
    return found


class DimClasses:
    """Classes of dims over a set of ops, for one axis size.

    A dim is a pair (value id, dim number); ids of values that a loop carries are
    first mapped to one of them by ``canonical``.
    """

    def __init__(
        self,
        program: Program,
        ops: Iterable[int],
        members: tuple[Member, ...],
        canonical: dict[int, int],
        axis_size: int,
    ) -> None:
        self._program = program
        self._canonical = canonical
        self._sets = UnionFind()
        self._size = axis_size
        contractions = {m.op for m in members}
        for op_id in ops:
            if op_id not in contractions:
                self._join(program.ops[op_id])
        if members:
            anchor = program.ops[members[0].op]
            for member in members:
                if member.derived:
                    value = program.ops[member.op].operands[member.cotangent]
                    self._join_values(anchor.results[0], value)

    def of_dim(self, value: int, dim: int) -> Hashable:
        """The class of a tensor's dim."""
        return self._sets.find((self._canonical.get(value, value), dim))

    def of_factor(self, op: int, factor: int) -> Hashable:
        """The class of an op's factor."""
        return self._sets.find((~op, factor))

    def _join(self, op: Op) -> None:
        rule, program = op.rule, self._program
        if rule is None:
            return
        for values, tensors in ((op.operands, rule.operands), (op.results, rule.results)):
            for value, dims in zip(values, tensors, strict=False):
                if program.values[value].producer in program.leaf_ops:
                    continue
                value = self._canonical.get(value, value)
                for dim, factor in major_factors(rule, dims, self._size):
                    self._sets.union((value, dim), (~op.id, factor))

    def _join_values(self, a: int, b: int) -> None:
        for dim in range(len(self._program.values[a].shape)):
            self._sets.union(
                (self._canonical.get(a, a), dim), (self._canonical.get(b, b), dim)
            )


def carried_values(program: Program) -> dict[int, int]:
    """Maps the values that a loop carries through one place to one of them."""
    canonical: dict[int, int] = {}
    for op in program.ops:
        if op.kind != "while":
            continue
        count = len(op.operands)
        for index, result in enumerate(op.results):
            for entry in op.entries[index::count]:
                canonical[entry] = result
    return canonical
