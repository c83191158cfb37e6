"""Ragged products in XLA's form: products of masked operands.

:func:`jax.lax.ragged_dot` multiplies each row by the matrix of its group alone. XLA
multiplies every row with every matrix, and copies the rows for each group with zeros
for other groups' rows. So it takes the time of all products; the model needs those of
each row's own group.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from cfp.analysis.contractions import is_contraction
from cfp.program.graph import Op, Program, op_flops

_SAME = ("convert", "optimization_barrier")


def model_flops(program: Program, op: Op) -> int:
    """Counts the floating-point operations of `op_flops` that the model needs.

    Products of rows with matrices of other groups, which are zeros, do not count.
    """
    if op.manual is not None:
        inner = op.manual.program
        saved = sum(
            op_flops(inner, one) - model_flops(inner, one)
            for one in inner.ops
            if one.manual is not None or is_contraction(one)
        )
        return (op.manual.flops - saved) * op.manual.devices * op.repeat
    flops = op_flops(program, op)
    if op.kind != "dot_general" or not is_contraction(op):
        return flops
    rule = op.known_rule
    groups = {
        rule.major(rule.operands[index][dim])
        for index, value in enumerate(op.operands)
        for dim in _group_dims(program, value)
    }
    return flops // prod(rule.sizes[factor] for factor in groups if factor is not None)


def _group_dims(program: Program, value: int) -> list[int]:
    """Lists the dims of a masked value along which there are copies, one of a group.

    The mask has from where to where the rows of a group are, by the number of a row.
    """
    op, transposes = _behind(program, value, _SAME)
    if op is None or op.kind != "select" or not program.is_leaf(op.operands[2]):
        return []
    mask, copies, _ = op.operands
    both = program.maker(mask)
    if both is None or both.kind != "and":
        return []
    bounds = [_bound_dims(program, one) for one in both.operands]
    fresh = _fresh_dims(program, copies)
    return _transposed([d for d in fresh if all(d in b for b in bounds)], transposes)


def _bound_dims(program: Program, value: int) -> list[int]:
    """Lists the dims that bounds are of, where a value compares them with numbers."""
    op = program.maker(value)
    if op is None or op.kind != "compare":
        return []
    leaves = [program.is_leaf(v) for v in op.operands]
    if sorted(leaves) != [False, True]:
        return []
    bound = op.operands[leaves.index(False)]
    fresh, rank = _fresh_dims(program, bound), len(program.shape(bound))
    return [dim for dim in range(rank) if dim not in fresh] if fresh else []


def _fresh_dims(program: Program, value: int) -> list[int]:
    """Lists the dims along which a value holds copies of another one."""
    op, transposes = _behind(program, value, ())
    if op is None or op.kind != "broadcast_in_dim":
        return []
    kept = op.integers("broadcast_dimensions")
    rank = len(program.shape(value))
    return _transposed([dim for dim in range(rank) if dim not in kept], transposes)


def _behind(
    program: Program, value: int, same: Collection[str]
) -> tuple[Op | None, list[Op]]:
    """The op that makes a value, before transposes, the last first, and ops `same`."""
    transposes = []
    while (op := program.maker(value)) and op.kind in ("transpose", *same):
        transposes += [op] if op.kind == "transpose" else []
        value = op.operands[op.results.index(value)]
    return op, transposes


def _transposed(dims: list[int], transposes: list[Op]) -> list[int]:
    """Returns the places of a value's dims behind transposes, the last one first."""
    for op in reversed(transposes):
        dims = [n for n, dim in enumerate(op.integers("permutation")) if dim in dims]
    return dims
