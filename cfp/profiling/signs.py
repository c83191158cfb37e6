"""Inputs of a part of a program that must not be below zero.

A second moment whose root is taken, or what something is divided by, must be positive,
or all becomes NaN. Everything else is better of both signs, as in earnest: a matrix
product of positive numbers alone takes less power, and a device that it leaves cooler
seems faster than it will be.
"""

from __future__ import annotations

from cfp.program.graph import Op, Program

# Of these ops the operand must be above zero.
_DOMAINS = {"sqrt": 0, "rsqrt": 0, "cbrt": 0, "log": 0, "power": 0, "divide": 1}
# What these make does not depend on their operands' signs alone.
_BARRIERS = frozenset(
    {"dot_general", "convolution", "exponential", "logistic", "abs", "square"}
)


def above_zero(program: Program, ops: tuple[int, ...]) -> frozenset[int]:
    """The values that must be above zero for some top-level ops to make sense.

    Args:
        program: the program.
        ops: ids of top-level ops; their regions count, too.
    """
    inside = [inner for op in ops for inner in (op, *program.ops[op].body)]
    found: set[int] = set()
    stack = []
    for op_id in inside:
        op = program.ops[op_id]
        if op.kind in _DOMAINS:
            stack.append(op.operands[_DOMAINS[op.kind]])
    while stack:
        v = stack.pop()
        if v in found:
            continue
        found.add(v)
        value = program.values[v]
        if value.producer >= 0:
            stack.extend(_sources(program.ops[value.producer], v))
        elif value.origin >= 0:
            stack.append(value.origin)
    return frozenset(found)


def _sources(op: Op, v: int) -> tuple[int, ...]:
    """The operands that the sign of a result follows from."""
    if op.kind in _BARRIERS or _is_square(op):
        return ()
    if not op.has_regions:
        return op.operands
    each = len(op.results)
    place = op.results.index(v)
    return tuple(w for i, w in enumerate(op.yields) if i % each == place)


def _is_square(op: Op) -> bool:
    return op.kind == "multiply" and op.operands[0] == op.operands[1]
