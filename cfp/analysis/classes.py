"""Classes of dims of a block's tensors that must be sharded together.

Within a block, dims that an op maps to one factor form a class, and classes join
through the tensors between ops. Contractions do not join classes: sharding passes
them only as the block's strategy says.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from cfp.analysis.contractions import Member
from cfp.program.graph import Op, Program
from cfp.program.rules import Dims, Rule


def major_factors(rule: Rule, dims: Dims, axis_size: int) -> list[tuple[int, int]]:
    """(dim, factor) pairs along which a tensor can be split that many ways."""
    found = []
    for dim, factors in enumerate(dims):
        factor = rule.major(factors)
        if factor is None or factor in rule.fixed or not rule.splits(factor, axis_size):
            continue
        found.append((dim, factor))
    return found


class DimClasses:
    """Classes of dims over a set of ops, for one axis size.

    A dim is a pair (value id, dim number); values that are one tensor, carried by a
    loop, are first mapped to one of them by ``canonical``.
    """

    def __init__(
        self,
        program: Program,
        ops: Iterable[int],
        members: tuple[Member, ...],
        canonical: Mapping[int, int],
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
                    self._join_cotangent(anchor, member)

    def of_dim(self, value: int, dim: int) -> Hashable:
        """The class of a tensor's dim."""
        return self._sets.find(self._dim(value, dim))

    def of_factor(self, op: int, factor: int) -> Hashable:
        """The class of an op's factor."""
        return self._sets.find((~op, factor))

    def _join(self, op: Op) -> None:
        rule, program = op.rule, self._program
        if rule is None:
            return
        for values, tensors in (
            (op.operands, rule.operands),
            (op.results, rule.results),
        ):
            for value, dims in zip(values, tensors, strict=False):
                if program.values[value].producer in program.leaf_ops:
                    continue
                for dim, factor in major_factors(rule, dims, self._size):
                    self._sets.union(self._dim(value, dim), (~op.id, factor))

    def _join_cotangent(self, anchor: Op, member: Member) -> None:
        """Joins a cotangent's dims with those of the result that it belongs to."""
        base, op = anchor.rule, self._program.ops[member.op]
        assert base is not None and op.rule is not None
        place = {base.major(dims): dim for dim, dims in enumerate(base.results[0])}
        value = op.operands[member.cotangent]
        for dim, factors in enumerate(op.rule.operands[member.cotangent]):
            factor = op.rule.major(factors)
            if factor is not None and member.factors[factor] in place:
                self._sets.union(
                    self._dim(anchor.results[0], place[member.factors[factor]]),
                    self._dim(value, dim),
                )

    def _dim(self, value: int, dim: int) -> tuple[int, int]:
        return self._canonical.get(value, value), dim


# ----------------------------------------------------------------------- disjoint sets


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
        """Joins the sets of two items; the second's representative stands for both."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[a] = b
