"""Anchors, and the contractions that differentiation made from them.

An *anchor* is a contraction of the forward pass (or a lookup in a table that no
contraction made, such as an embedding). From ``C = A B`` differentiation makes
``dB = A^T dC`` and ``dA = dC B^T``: contractions that share one operand with the
anchor and whose other operand has the dims of ``C``. They are found by that
structure alone, and each comes with a map of its factors to the anchor's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cfp.program.graph import Op, Program
from cfp.program.rules import Dims, Rule


@dataclass(frozen=True, slots=True)
class Member:
    """A contraction of a block.

    Attributes:
        op: its op id.
        factors: for each of its factors the anchor's factor, or -1.
        cotangent: the operand index that holds the cotangent of the anchor's
            result; -1 for the anchor and its recomputations.
    """

    op: int
    factors: tuple[int, ...]
    cotangent: int = -1

    @property
    def derived(self) -> bool:
        """Whether differentiation made it."""
        return self.cotangent >= 0


def is_contraction(op: Op) -> bool:
    """Whether an op sums products over a factor that two operands share."""
    if op.rule is None:
        return False
    if op.kind in ("dot_general", "convolution"):
        return True
    for factor in op.rule.reduction:
        holders = sum(
            any(factor in dim for dim in dims) for dims in op.rule.operands
        )
        if holders >= 2 and op.kind not in ("scatter", "reduce", "gather"):
            return True
    return False


def find_members(program: Program, numbers: list[int]) -> list[list[Member]]:
    """Groups contractions into blocks.

    Args:
        program: the program.
        numbers: its value numbers.

    Returns:
        For each block its members, the anchor first; blocks in program order.
    """
    blocks: list[list[Member]] = []
    by_result: dict[int, int] = {}
    by_operand: dict[int, list[tuple[int, int]]] = {}
    computed = _made_by_contractions(program)
    derived: list[list[tuple[int, Member]]] = []
    for op in program.ops:
        if op.id in program.leaf_ops or op.rule is None:
            continue
        lookup = op.kind == "gather" and not computed[op.operands[0]]
        if not (is_contraction(op) or lookup or op.kind == "scatter"):
            continue
        number = numbers[op.results[0]]
        again = by_result.get(number)
        if again is not None:
            blocks[again].append(Member(op.id, blocks[again][0].factors))
            continue
        candidates = _candidates(program, numbers, op, blocks, by_operand)
        if candidates:
            derived.append(candidates)
            continue
        if op.kind == "scatter":
            continue
        block = len(blocks)
        blocks.append([Member(op.id, tuple(range(len(op.rule.sizes))))])
        by_result[number] = block
        for index, operand in enumerate(op.operands[:2]):
            by_operand.setdefault(numbers[operand], []).append((block, index))
    for block, member in _resolve(program, numbers, derived):
        blocks[block].append(member)
    return blocks


def _resolve(
    program: Program, numbers: list[int], derived: list[list[tuple[int, Member]]]
) -> list[tuple[int, Member]]:
    """Picks each derived contraction's block.

    Anchors with a common operand (query, key and value projections) have derived
    contractions of one structure. What tells them apart is the cotangent: another
    contraction that reads it may share an operand with only one of the anchors.
    """
    owner: dict[int, int] = {}

    def cotangent(member: Member) -> int:
        return numbers[program.ops[member.op].operands[member.cotangent]]

    for candidates in derived:
        if len({block for block, _ in candidates}) == 1:
            owner.setdefault(cotangent(candidates[0][1]), candidates[0][0])
    found = []
    for candidates in derived:
        known = [c for c in candidates if owner.get(cotangent(c[1])) == c[0]]
        taken = set(owner.values())
        free = [c for c in candidates if c[0] not in taken]
        block, member = (known or free or candidates)[0]
        owner.setdefault(cotangent(member), block)
        found.append((block, member))
    return found


def _made_by_contractions(program: Program) -> list[bool]:
    """For each value whether a contraction lies upstream of it."""
    made = [False] * len(program.values)
    for op in program.ops:
        for entry in op.entries:
            made[entry] = made[program.values[entry].origin]
        flag = is_contraction(op) or any(made[v] for v in (*op.operands, *op.yields))
        for result in op.results:
            made[result] = flag
    return made


def _candidates(
    program: Program,
    numbers: list[int],
    op: Op,
    blocks: list[list[Member]],
    by_operand: Mapping[int, list[tuple[int, int]]],
) -> list[tuple[int, Member]]:
    """The blocks that a contraction may be derived from, the latest first."""
    found = []
    for shared, cotangent in [(1, 2)] if op.kind == "scatter" else [(0, 1), (1, 0)]:
        if cotangent >= len(op.operands):
            continue
        for block, index in reversed(by_operand.get(numbers[op.operands[shared]], [])):
            anchor = program.ops[blocks[block][0].op]
            factors = _factor_map(program, op, shared, cotangent, anchor, index)
            if factors is not None:
                found.append((block, Member(op.id, factors, cotangent)))
    return found


def _factor_map(
    program: Program, op: Op, shared: int, cotangent: int, anchor: Op, index: int
) -> tuple[int, ...] | None:
    """Maps a derived contraction's factors to the anchor's, or None if it is none."""
    rule, base = op.rule, anchor.rule
    assert rule is not None and base is not None
    shape = program.values[op.operands[cotangent]].shape
    if shape != program.values[anchor.results[0]].shape:
        return None
    found: dict[int, int] = {}
    if not (
        _align(found, rule, rule.operands[shared], base, base.operands[index])
        and _align(found, rule, rule.operands[cotangent], base, base.results[0])
    ):
        return None
    other = base.operands[1 - index]
    other_shape = program.values[anchor.operands[1 - index]].shape
    if op.kind in ("scatter", "convolution"):
        if program.values[op.results[0]].shape == other_shape:
            _align(found, rule, rule.results[0], base, other)
    else:
        produced = {found.get(f, -1) for dim in rule.results[0] for f in dim}
        if produced != {f for dim in other for f in dim}:
            return None
    return tuple(found.get(f, -1) for f in range(len(rule.sizes)))


def _align(
    found: dict[int, int], rule: Rule, dims: Dims, base: Rule, base_dims: Dims
) -> bool:
    """Adds the factors of equal dims to a map; False if that contradicts it."""
    if len(dims) != len(base_dims):
        return False
    for dim, base_dim in zip(dims, base_dims, strict=True):
        mine, theirs = rule.major(dim), base.major(base_dim)
        if (mine is None) != (theirs is None):
            return False
        if mine is None or theirs is None:
            mine, theirs = (dim or (-1,))[0], (base_dim or (-1,))[0]
            if mine < 0 or theirs < 0:
                continue
        if rule.sizes[mine] != base.sizes[theirs]:
            return False
        if found.setdefault(mine, theirs) != theirs:
            return False
    return True
