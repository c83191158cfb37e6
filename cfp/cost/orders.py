"""What a sum makes a compiler keep whole: tensors that are read in two orders of dims.

Elementwise work is fused into what reads it. But where it combines a tensor with one
whose dims come in another order, as the backward pass of a softmax combines scores and
the gradient of the weights, a fusion has to turn one of them, and cannot sum as well:
what is summed is in memory then, all of it and in the type it is summed in.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from cfp.cost.kept import uses_through
from cfp.program.graph import Op, Program

# How a tensor is read: its dims in the order in which they are read, those of size 1
# left out; none where it is read as it lies in memory.
Order = tuple[int, ...]
_AS_IT_LIES: frozenset[Order] = frozenset({()})
# An order that was reshaped since: no transpose is known to undo it.
_LOST: Order = (-1,)
_KEY = "summed in two orders"


def summed_in_two_orders(
    program: Program, is_fused: Callable[[int], bool]
) -> frozenset[int]:
    """Values that sums read and that are made of tensors read in two orders.

    Args:
        program: the program.
        is_fused: whether a value is made where it is read.
    """
    known = program.looked_for
    if _KEY not in known:
        known[_KEY] = _find(program, is_fused)
    return known[_KEY]


def _find(program: Program, is_fused: Callable[[int], bool]) -> frozenset[int]:
    orders: dict[int, frozenset[Order]] = {}
    found = set()
    for op in program.ops:
        if op.id in program.leaf_ops:
            continue
        for v in op.results:
            if not is_fused(v):
                continue  # It lies in memory.
            size = _elements(program, v)
            # What is smaller, such as a row's sum, is no matter.
            read = (orders.get(w, _AS_IT_LIES) for w in _as_large(program, op, size))
            found_here = frozenset().union(*read)
            if op.kind == "transpose":
                found_here = frozenset(_turned(op, order) for order in found_here)
            elif op.kind == "reshape" and _is_regrouped(program, op):
                found_here = frozenset(order and _LOST for order in found_here)
            if len({*map(bool, found_here)}) > 1 and _is_summed(program, v, is_fused):
                found.add(v)
                found_here = _AS_IT_LIES
            orders[v] = found_here
    return frozenset(found)


def _is_regrouped(program: Program, op: Op) -> bool:
    """Whether a reshape does more than add and leave out dims of size 1."""
    before, after = (
        [size for size in program.values[v].shape if size != 1]
        for v in (op.operands[0], op.results[0])
    )
    return before != after


def _elements(program: Program, v: int) -> int:
    return prod(program.values[v].shape)


def _as_large(program: Program, op: Op, size: int) -> list[int]:
    return [
        w
        for w in op.operands
        if _elements(program, w) == size
        and program.values[w].producer not in program.leaf_ops
    ]


def _turned(op: Op, order: Order) -> Order:
    """How a tensor is read by what reads a transpose of it, that it reads so."""
    rule = op.rule
    if rule is None:
        return order or (1, 0)
    before, after = (
        [f for f in map(rule.major, dims) if f is not None]
        for dims in (rule.operands[0], rule.results[0])
    )
    moved = tuple(map(before.index, after))
    if before == after:
        return order
    if order and len(order) != len(moved):
        return _LOST
    if order:
        moved = tuple(order[place] for place in moved)
    return () if moved == tuple(sorted(moved)) else moved


def _is_summed(program: Program, v: int, is_fused: Callable[[int], bool]) -> bool:
    uses = uses_through(program, v, lambda _, w: is_fused(w))
    return any(op.kind == "reduce" for op, _ in uses)
