"""Fingerprints of a program: of its structure, and of all that it computes with.

A learning rate, an epsilon or a table changes what a step computes, but neither how it
is best sharded nor what it costs. Plans and measurements therefore depend on a
program's structure: ops, types, attributes, and of constants only those that say how
often a loop runs or which place is read or written. A compiled program computes with
the values of all constants: it stands for those programs only that have the same.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from jax.extend.mlir import ir

from cfp.program import shardy

_SIGNATURE = ("arg_attrs", "res_attrs")
# Operands at and behind this one say where an op reads or writes.
_FIRST_INDEX = {
    "stablehlo.dynamic_slice": 1,
    "stablehlo.dynamic_update_slice": 2,
    "stablehlo.gather": 1,
    "stablehlo.scatter": 1,
}
# An op without attributes that gives anything of nothing; it is printed and never run.
_BLANK = "builtin.unrealized_conversion_cast"
# Counters and indices are small; tables are data, whatever they are used for.
_MOST_ELEMENTS = 16


def _is_counter_type(kind: ir.Type) -> bool:
    """True if values of a type may count iterations or index a place."""
    return (
        isinstance(kind, ir.RankedTensorType)
        and isinstance(kind.element_type, ir.IntegerType)
        and prod(kind.shape) <= _MOST_ELEMENTS
    )


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Digests of a module, blind to names, locations and shardings.

    Attributes:
        structure: of its structure.
        exact: of all of it, the values of all constants included.
        functions: of the structure of what composites stand for, by name.
    """

    structure: str
    exact: str
    functions: Mapping[str, str]


def fingerprints(text: bytes, context: ir.Context) -> Fingerprints:
    """Computes a module's fingerprints.

    Args:
        text: the module, as bytecode.
        context: to read it in.
    """
    structure, exact = hashlib.sha256(), hashlib.sha256()
    module = shardy.without_locations(text, context)
    texts: dict[str, str] = {}
    calls: dict[str, list[str]] = {}
    for function in shardy.functions(module.operation):
        for name in _SIGNATURE:
            if name in function.attributes:
                del function.attributes[name]
        buffer = io.BytesIO()
        function.write_bytecode(buffer)
        exact.update(buffer.getvalue())
        _blank_constants(function)
        name = ir.StringAttr(function.attributes["sym_name"]).value
        texts[name] = str(function.get_asm(enable_debug_info=False))
        calls[name] = [c for op in shardy.walk(function) if (c := stands_for(op))]
        structure.update(texts[name].encode())

    def digest(name: str) -> str:
        inner = [digest(called) for called in calls[name]]
        return hashlib.sha256(repr((texts[name], inner)).encode()).hexdigest()

    bodies = {name: digest(name) for name in texts if name != "main"}
    return Fingerprints(structure.hexdigest(), exact.hexdigest(), bodies)


def stands_for(op: ir.Operation) -> str:
    """The name of the function that a composite stands for; "" for other ops."""
    if op.name != "stablehlo.composite":
        return ""
    return ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value


def _blank_constants(function: ir.Operation) -> None:
    """Puts what has a type alone in the place of constants that are not structure."""
    kept = shaping_constants(function)
    for op in list(shardy.walk(function)):
        if op.name == "stablehlo.constant" and op not in kept:
            with ir.InsertionPoint(op), op.location:
                blank = ir.Operation.create(_BLANK, results=[op.results[0].type])
            op.results[0].replace_all_uses_with(blank.results[0])
            op.erase()


def shaping_constants(function: ir.Operation) -> set[ir.Operation]:
    """The constants whose values are structure.

    Those are small integers from which a loop's condition is computed, through the
    counters that the loop carries; and those from which the place is computed that an
    op reads or writes.
    """
    seen: set[ir.Value] = set()
    stack: list[ir.Value] = []
    for op in shardy.walk(function):
        if op.name == "stablehlo.while":
            stack.extend(_returned(op.regions[0]))
        elif op.name in _FIRST_INDEX:
            stack.extend(list(op.operands)[_FIRST_INDEX[op.name] :])
    found: set[ir.Operation] = set()
    while stack:
        value = stack.pop()
        if value in seen or not _is_counter_type(value.type):
            continue
        seen.add(value)
        owner = value.owner
        if not isinstance(owner, ir.Block) and (
            owner.operation.name == "stablehlo.constant"
        ):
            found.add(owner.operation)
        stack.extend(_made_of(value))
    return found


def _returned(region: ir.Region) -> list[ir.Value]:
    *_, last = region.blocks[0].operations
    return list(last.operation.operands)


def _made_of(value: ir.Value) -> Iterator[ir.Value]:
    """Yields a value's inputs, in a loop those of the iteration before, too."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        loop = owner.owner.operation
        if loop.name == "stablehlo.while":
            place = ir.BlockArgument(value).arg_number
            yield loop.operands[place]
            yield _returned(loop.regions[1])[place]
        return
    op = owner.operation
    if op.name not in shardy.REGION_OPS:
        yield from op.operands
        return
    place = ir.OpResult(value).result_number
    bodies = list(op.regions)
    if op.name == "stablehlo.while":
        yield op.operands[place]
        bodies = bodies[1:]
    for body in bodies:
        yield _returned(body)[place]
