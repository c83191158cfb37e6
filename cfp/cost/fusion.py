"""Fusion by XLA: values with memory of their own, and those fused into readers.

Elementwise work is fused into what reads it. In memory are results of heavy ops, and
what heavy ops read. A third kind a sum makes: where elementwise work combines a tensor
with one whose dims come in another order, as the backward pass of a softmax combines
scores and the gradient of the weights, a fusion has to turn one of them, and cannot sum
as well. What is summed is in memory then, all of it and in the type it is summed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from cfp.program.graph import Op, Program
from cfp.program.rematerialize import CHEAP

# Of these the reader reads what they are made of, where it lies.
_VIEWS = frozenset({"reshape", "transpose", "optimization_barrier"})
# What is made where it is read.
FUSED = CHEAP | _VIEWS | {"concatenate", "dynamic_slice", "pad", "reverse"}
# What reads as it goes, too, but has memory for what it makes, or a loop has.
_AS_IT_GOES = FUSED | {"reduce", "dynamic_update_slice"}

# How a tensor is read: its dims in the order in which they are read, those of size 1
# left out; none where it is read as it lies in memory.
Order = tuple[int, ...]
_AS_IT_LIES: frozenset[Order] = frozenset({()})
# An order that was reshaped since: no transpose is known to undo it.
_LOST: Order = (-1,)
_KEY = "summed in two orders"


def uses_through(
    program: Program, v: int, goes_on: Callable[[Op, int], bool]
) -> Iterator[tuple[Op, int]]:
    """All uses of a value as (op, which operand), and of what is made of it on the way.

    Args:
        program: the program.
        v: the value.
        goes_on: whether uses of an op's result are looked for, too.
    """
    stack, seen = [v], {v}
    while stack:
        for user, index in program.users[stack.pop()]:
            op = program.ops[user]
            yield op, index
            fresh = [w for w in op.results if w not in seen and goes_on(op, w)]
            seen.update(fresh)
            stack += fresh


def is_in_memory(program: Program, v: int) -> bool:
    """Returns True if a tensor has memory of its own."""
    return _has_memory(program, v) or v in summed_in_two_orders(program)


def summed_in_two_orders(program: Program) -> frozenset[int]:
    """Values that sums read and that are made of tensors read in two orders."""
    known = program.looked_for
    if _KEY not in known:
        known[_KEY] = _find(program)
    return known[_KEY]


def _has_memory(program: Program, v: int) -> bool:
    """Returns True if a tensor has memory because of its producer or its readers."""
    op = program.ops[program.values[v].producer]
    if op.kind in _VIEWS or op.kind == "dynamic_update_slice":
        return False  # An update is written into what a loop carries.
    if op.has_regions:
        # What a loop only hands through is read where it came from.
        return bool(program.users[v])
    # Behind a loop's own operands is what it returns, for which it has memory itself.
    return op.kind not in FUSED or any(
        user.kind not in _AS_IT_GOES and index < len(user.operands)
        for user, index in uses_through(program, v, lambda op, _: op.kind in _VIEWS)
    )


def _find(program: Program) -> frozenset[int]:
    orders: dict[int, frozenset[Order]] = {}
    found = set()
    for op in program.ops:
        if op.id in program.leaf_ops:
            continue
        for v in op.results:
            if _has_memory(program, v):
                continue
            size = _elements(program, v)
            read = frozenset().union(
                *(
                    orders.get(w, _AS_IT_LIES)
                    for w in op.operands
                    # What is smaller, such as a row's sum, is no matter.
                    if _elements(program, w) == size
                    and program.values[w].producer not in program.leaf_ops
                )
            )
            if op.kind == "transpose":
                read = frozenset(_turned(op, order) for order in read)
            elif op.kind == "reshape" and _is_regrouped(program, op):
                read = frozenset(order and _LOST for order in read)
            if len({*map(bool, read)}) > 1 and _is_summed(program, v):
                found.add(v)
                read = _AS_IT_LIES
            orders[v] = read
    return frozenset(found)


def _is_regrouped(program: Program, op: Op) -> bool:
    """Returns True if a reshape does more than add and leave out dims of size 1."""
    before, after = (
        [size for size in program.values[v].shape if size != 1]
        for v in (op.operands[0], op.results[0])
    )
    return before != after


def _elements(program: Program, v: int) -> int:
    return prod(program.values[v].shape)


def _turned(op: Op, order: Order) -> Order:
    """Lists reads of a tensor through a transpose of it."""
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


def _is_summed(program: Program, v: int) -> bool:
    uses = uses_through(program, v, lambda _, w: not _has_memory(program, w))
    return any(op.kind == "reduce" for op, _ in uses)
