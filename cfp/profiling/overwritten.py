"""Finds values that a compiled program reads after it has overwritten them.

XLA's GPU compiler decides what is computed in place, and inserts the copies that this
takes, before it rematerializes. What it then computes again reads its operands later
than before, and nothing looks for copies once more. Seen with jaxlib 0.11.2: a matrix
product that is added to the residual stream in place, and behind it a layer norm,
computed again, of the residual stream as it was:

    %y = f32[8,4] custom-call(%a, %b, %x), output_to_operand_aliasing={{}: (2, {})}
    %z = f32[8,4] fusion(%x), ...                 # %x is %y by now

Such a program computes something else than it says. It is told by its text: modules are
printed in the order in which they run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jax

from cfp.errors import CompilerError, compose
from cfp.profiling.hlo_text import Instruction, Module, elements, modules_in

# A value of an instruction: its name, and where in its result if that is a tuple.
_Path = tuple[int, ...]
_Value = tuple[str, _Path]

_SAME_MEMORY = ("bitcast", "optimization-barrier", "opt-barrier")
_READS_NOTHING = (*_SAME_MEMORY, "get-tuple-element", "tuple", "parameter", "constant")
# Ops that write into an operand: which one.
_IN_PLACE = {"dynamic-update-slice": 0, "scatter": 0, "ragged-all-to-all": 1}

_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?\))\s*\}")
_DONATED = re.compile(r"input_output_alias=\{(.*?\))\s*\}")
_PAIR = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_INDEX = re.compile(r"\bindex=(\d+)")
_BODY = re.compile(r"\bbody=%?([\w.-]+)")
_FUSED = re.compile(r"\bcalls=%?([\w.-]+)")
_INLINED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")


def compile_right(
    lowered: jax.stages.Lowered, options: Mapping[str, Any]
) -> tuple[jax.stages.Compiled, str]:
    """Compiles a program so that it computes what it says.

    Where XLA's rematerialization would have it read what is overwritten by then, it is
    compiled without that, and needs more memory.

    Args:
        lowered: what to compile.
        options: compiler options.

    Returns:
        The compiled program and its text, if there is one.

    Raises:
        CompilerError: it is wrong nevertheless.
    """
    compiled = lowered.compile(compiler_options=dict(options) or None)
    text = compiled.as_text() or ""
    if read_after_overwritten(text) is None:
        return compiled, text
    off = {**options, "xla_disable_hlo_passes": "rematerialization"}
    compiled = lowered.compile(compiler_options=off)
    text = compiled.as_text() or ""
    if (found := read_after_overwritten(text)) is not None:
        raise CompilerError(
            compose(
                "XLA compiled a program that computes something else than it should.",
                expected="values that are read before others are written there",
                got=found,
                attempt="another version of jaxlib, or a plan with more memory",
            )
        )
    return compiled, text


def read_after_overwritten(hlo_text: str) -> str | None:
    """The first value that is read too late, in words; None if there is none.

    Args:
        hlo_text: of a compiled program. One in which nothing was rematerialized is as
            the compiler means it to be.
    """
    if ".remat" not in hlo_text:
        return None
    for module in modules_in(hlo_text):
        inlined = {
            name
            for instructions in module.computations.values()
            for one in instructions
            if one.opcode != "call" and not one.opcode.startswith("async")
            for name in _INLINED.findall(one.attributes)
        }
        for name, instructions in module.computations.items():
            if name not in inlined:
                found = _first_late(module, name, instructions)
                if found is not None:
                    return found
    return None


def _first_late(
    module: Module, name: str, instructions: list[Instruction]
) -> str | None:
    here = {one.name: one for one in instructions}
    place = {one.name: i for i, one in enumerate(instructions)}

    @cache
    def value(of: str, path: _Path = ()) -> _Value:
        """Where a result comes from: the same memory, and nobody wrote to it since."""
        one = here[of]
        if one.opcode in _SAME_MEMORY:
            return value(one.operands[0], path)
        if one.opcode == "get-tuple-element":
            return value(one.operands[0], (_index(one), *path))
        if one.opcode == "tuple" and path:
            return value(one.operands[path[0]], path[1:])
        if one.opcode == "while" and path and path[0] in _unchanged(module, one):
            return value(one.operands[0], path)
        return of, path

    def values(of: str) -> Iterator[_Value]:
        """All values of a result, as far as they are known one by one."""
        one = here[of]
        if one.opcode == "tuple":
            for operand in one.operands:
                yield from values(operand)
        else:
            yield value(of)

    # What nobody may read any longer: who has overwritten it, and when.
    overwritten: dict[_Value, tuple[int, str]] = {}
    before: dict[_Value, _Value] = {}
    for one in instructions:
        for out, operand, inner in _written(module, one):
            old = value(one.operands[operand], inner)
            overwritten.setdefault(old, (place[one.name], one.name))
            before[one.name, out] = old
    root = next((one.name for one in instructions if one.root), None)
    if root is not None and name == module.entry:
        parameters = {one.number: one.name for one in instructions}
        for out, number, inner in _pairs(_DONATED, module.header):
            new, old = value(root, out), (parameters[number], inner)
            while new in before:  # It is written where another value has been.
                new = before[new]
            if new != old and here[new[0]].opcode != "parameter":
                overwritten.setdefault(old, (place[new[0]], new[0]))
    for one in instructions:
        if one.opcode in _READS_NOTHING and not one.root:
            continue
        operands = [one.name] if one.opcode in _SAME_MEMORY else one.operands
        for operand in operands:
            for read in values(operand):
                when, writer = overwritten.get(read, (len(instructions), ""))
                if when < place[one.name]:
                    return f"%{one.name} reads %{read[0]} after %{writer} wrote there"
    return None


def _written(module: Module, one: Instruction) -> Iterator[tuple[_Path, int, _Path]]:
    """(part of the result, operand, part of it) that are one memory."""
    if one.opcode in _IN_PLACE:
        yield (), _IN_PLACE[one.opcode], ()
    elif one.opcode == "while":
        unchanged = _unchanged(module, one)
        for i in range(len(elements(one.shape))):
            if i not in unchanged:
                path = (i,) if one.shape.startswith("(") else ()
                yield path, 0, path
    elif "output_to_operand_aliasing" in one.attributes:
        yield from _pairs(_ALIASING, one.attributes)
    elif one.opcode == "fusion" and (body := _FUSED.search(one.attributes)):
        yield from _written_by_fusion(module.computations[body[1]])


def _written_by_fusion(body: list[Instruction]) -> Iterator[tuple[_Path, int, _Path]]:
    here = {one.name: one for one in body}
    root = next(one for one in body if one.root)

    def through(name: str) -> Instruction:
        while here[name].opcode == "bitcast":
            name = here[name].operands[0]
        return here[name]

    several = root.opcode == "tuple"
    for i, name in enumerate(root.operands if several else [root.name]):
        last = through(name)
        if last.opcode in _IN_PLACE:
            first = through(last.operands[_IN_PLACE[last.opcode]])
            # Only who alone reads an operand may write there.
            readers = sum(first.name in one.operands for one in body)
            if first.opcode == "parameter" and readers == 1:
                assert first.number is not None, first
                yield (i,) if several else (), first.number, ()


def _unchanged(module: Module, loop: Instruction) -> frozenset[int]:
    """Elements of a loop's state that its body hands on as they are."""
    found = _BODY.search(loop.attributes)
    body = module.computations.get(found[1], []) if found else []
    here = {one.name: one for one in body}
    root = next((one for one in body if one.root and one.opcode == "tuple"), None)
    kept = set()
    for i, name in enumerate(root.operands if root else ()):
        one = here[name]
        if one.opcode == "get-tuple-element" and _index(one) == i:
            if here[one.operands[0]].number == 0:
                kept.add(i)
    return frozenset(kept)


def _index(one: Instruction) -> int:
    found = _INDEX.search(one.attributes)
    assert found is not None, one
    return int(found[1])


def _pairs(pattern: re.Pattern[str], text: str) -> Iterator[tuple[_Path, int, _Path]]:
    listed = pattern.search(text)
    for out, number, inner in _PAIR.findall(listed[1] if listed else ""):
        yield _path(out), int(number), _path(inner)


def _path(text: str) -> _Path:
    return tuple(int(part) for part in text.split(",") if part.strip())
