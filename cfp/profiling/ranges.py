"""Ranges of the integers that a part of a program reads.

Token ids that all lie below 128 read 128 rows of an embedding, which stay in a cache,
and its gradient adds up in as few. A step in earnest reads rows from everywhere. So
what picks rows of a tensor gets numbers up to as many as there are rows, and what is
compared with ``0, 1, 2, ...`` as many as these are.
"""

from __future__ import annotations

import re

from cfp.program.graph import Op, Program

_PICKED = re.compile(
    r"(?:start_index_map|scatter_dims_to_operand_dims) = \[([\d, ]*)\]"
)
_COUNTED = re.compile(r"iota_dimension\s*=\s*(\d+)")
_EQUAL = "comparison_direction EQ"
# What leaves a number as it is, or about as large: where in the operands it stands.
_SAME = {
    "add": (0, 1),
    "broadcast_in_dim": (0,),
    "clamp": (1,),
    "convert": (0,),
    "copy": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "maximum": (0, 1),
    "minimum": (0, 1),
    "reshape": (0,),
    "select": (1, 2),
    "slice": (0,),
    "subtract": (0,),
    "transpose": (0,),
}


def counts(program: Program, ops: tuple[int, ...]) -> dict[int, int]:
    """For values that pick something, out of how many: the fewest, if of several.

    Args:
        program: the program.
        ops: ids of top-level ops; their regions count, too.
    """
    inside = [inner for op in ops for inner in (op, *program.ops[op].body)]
    found: dict[int, int] = {}
    for op_id in inside:
        for value, count in _picks(program, program.ops[op_id]):
            for source in _sources(program, value):
                found[source] = min(count, found.get(source, count))
    return found


def _picks(program: Program, op: Op) -> list[tuple[int, int]]:
    """(value, out of how many it picks)."""
    if op.kind in ("gather", "scatter"):
        match = _PICKED.search(op.attributes)
        dims = [int(d) for d in match[1].split(",") if d.strip()] if match else []
        shape = program.values[op.operands[0]].shape
        # A scatter of several arrays has its indices behind them.
        indices = op.operands[1 if op.kind == "gather" else len(op.operands) // 2]
        return [(indices, min(shape[d] for d in dims))] if dims else []
    if op.kind == "compare" and _EQUAL in op.attributes:
        one, other = op.operands
        sizes = (_counted(program, one), _counted(program, other))
        return [(v, n) for v, n in ((one, sizes[1]), (other, sizes[0])) if n]
    return []


def _counted(program: Program, value: int) -> int:
    """Returns the count of a value that is 0, 1, 2, ... along a dim; or 0."""
    for source in _sources(program, value):
        producer = program.values[source].producer
        op = program.ops[producer] if producer >= 0 else None
        if op is not None and op.kind == "iota":
            match = _COUNTED.search(op.attributes)
            shape = program.values[source].shape
            return shape[int(match[1])] if match else 0
    return 0


def _sources(program: Program, value: int) -> set[int]:
    """The values that a value is made of without growing, itself among them."""
    found: set[int] = set()
    stack = [value]
    while stack:
        v = stack.pop()
        if v in found:
            continue
        found.add(v)
        one = program.values[v]
        if one.producer < 0:
            stack.extend([one.origin] if one.origin >= 0 else [])
            continue
        op = program.ops[one.producer]
        if op.kind == "concatenate":
            stack.extend(op.operands)
        stack.extend(op.operands[i] for i in _SAME.get(op.kind, ()))
    return found
