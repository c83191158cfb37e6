"""Loops of one iteration, which are taken apart before anything looks at a program.

A scan over a single microbatch hides nothing then: its body's ops stand where it stood.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

_LOOP = "stablehlo.while"


def inline_single_iteration(loop: ir.Operation) -> bool:
    """Puts a loop's body in its place if that runs exactly once.

    Args:
        loop: an op of any kind; of one that is no such loop nothing changes.

    Returns:
        True if the loop is gone.
    """
    if loop.name != _LOOP or not _runs_once(loop):
        return False
    block = loop.regions[1].blocks[0]
    for argument, operand in zip(
        list(block.arguments), list(loop.operands), strict=True
    ):
        argument.replace_all_uses_with(operand)
    *inner, last = [o.operation for o in block.operations]
    for op in inner:
        op.move_before(loop)
    yielded = list(last.operands)
    last.erase()
    for result, value in zip(list(loop.results), yielded, strict=True):
        result.replace_all_uses_with(value)
    loop.erase()
    return True


def _runs_once(loop: ir.Operation) -> bool:
    """Returns True if the counter is below its limit at first, and then no more.

    Reads the form that JAX gives to ``scan`` and ``fori_loop``: the condition compares
    a counter with a constant, and the body adds a constant to it.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    *_, returned = condition.operations
    test = _owner(returned.operation.operands[0])
    if test is None or test.name != "stablehlo.compare":
        return False
    if "LT" not in str(test.attributes["comparison_direction"]):
        return False
    place = _place(test.operands[0], condition)
    if place is None:
        return False
    start = _integer(loop.operands[place])
    limit = _integer(_entering(test.operands[1], condition, loop))
    *_, last = body.operations
    step = _owner(last.operation.operands[place])
    if step is None or step.name != "stablehlo.add":
        return False
    if _place(step.operands[0], body) != place:
        return False
    added = _integer(step.operands[1])
    if start is None or limit is None or added is None:
        return False
    return start < limit <= start + added


def _owner(value: ir.Value) -> ir.Operation | None:
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def _place(value: ir.Value, block: ir.Block) -> int | None:
    """The number of the block's argument that a value is, if it is one."""
    for number, argument in enumerate(block.arguments):
        if argument == value:
            return number
    return None


def _entering(value: ir.Value, block: ir.Block, loop: ir.Operation) -> ir.Value:
    """The value that enters a loop as one of its arguments, or the value itself."""
    place = _place(value, block)
    return value if place is None else loop.operands[place]


def _integer(value: ir.Value) -> int | None:
    """The number that a constant of integers without dims is."""
    owner = _owner(value)
    if owner is None or owner.name != "stablehlo.constant":
        return None
    attribute: Any = owner.attributes["value"]
    if not isinstance(attribute, ir.DenseIntElementsAttr) or len(attribute) != 1:
        return None
    return int(attribute[0])
