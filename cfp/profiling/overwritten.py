"""Compiles programs, and refuses those that read what they have overwritten.

XLA's GPU compiler decides what is computed in place, and inserts the copies that this
takes, before it rematerializes. What it then rematerializes reads its operands later
than before, and nothing looks for copies once more. Seen with jaxlib 0.11.2: a matrix
product that is added to the residual stream in place, and behind it a layer norm,
rematerialized, of the residual stream as it was:

    %y = f32[8,4] custom-call(%a, %b, %x), output_to_operand_aliasing={{}: (2, {})}
    %z = f32[8,4] fusion(%x), ...                 # %x is %y by now

Such a program computes something else than it says. It shows in its text: modules are
printed in the order in which they run. A program in which something was rematerialized
is used only if its text proves that this did not happen. A text that cannot be read
counts as no proof: the program is compiled again without rematerialization, which needs
more memory, and is right by the way it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

import jax

from cfp.errors import CfpError
from cfp.profiling.hlo import Instruction, Module, called_by, elements, modules_in

# A value of an instruction: its name, and where in its result if that is a tuple.
_Path = tuple[int, ...]
_Value = tuple[str, _Path]

_SAME_MEMORY = ("bitcast", "optimization-barrier", "opt-barrier")
_PARTS = (*_SAME_MEMORY, "get-tuple-element")
_READS_NOTHING = (*_PARTS, "tuple", "parameter", "constant")
# Ops that write into an operand: which one.
_IN_PLACE = {"dynamic-update-slice": 0, "scatter": 0, "ragged-all-to-all": 1}

_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?\))\s*\}")
_DONATED = re.compile(r"input_output_alias=\{(.*?\))\s*\}")
_PAIR = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLS = ("calls", "to_apply")
_BRANCHES = ("true_computation", "false_computation", "branch_computations")

_OFF = "xla_disable_hlo_passes"
_PASS = "rematerialization"
_SCHEDULED = "is_scheduled=true"


def compile_right(
    lowered: jax.stages.Lowered, options: Mapping[str, Any]
) -> tuple[jax.stages.Compiled, str]:
    """Compiles a program so that it computes what it says; returns it with its text.

    Where that cannot be proved with XLA's rematerialization, it is compiled without,
    and needs more memory.

    Raises:
        CfpError: it is wrong nevertheless.
    """
    compiled = lowered.compile(compiler_options=dict(options) or None)
    text = compiled.as_text() or ""
    if miscompile_reason(text) is None:
        return compiled, text
    off = filter(None, [options.get(_OFF), _PASS])
    compiled = lowered.compile(compiler_options={**options, _OFF: ",".join(off)})
    text = compiled.as_text() or ""
    if has_rematerialized(text) and (found := miscompile_reason(text)):
        raise CfpError(
            "XLA compiled a program that computes something else than it should: "
            f"{found}. Install another version of jaxlib, or plan with more memory."
        )
    return compiled, text


def miscompile_reason(hlo_text: str) -> str | None:
    """Returns the reason why a compiled program may be wrong; None if it is right."""
    if not hlo_text.strip():
        return "it has no text"
    if not has_rematerialized(hlo_text):
        return None  # As the compiler means it to be.
    modules = [
        m for m in modules_in(hlo_text) if m.header or any(m.computations.values())
    ]
    for module in modules:
        if not module.header or not module.entry:
            return "instructions that belong to no program"
        if _SCHEDULED not in module.header:
            return "its text does not say in which order it runs"
        if module.unread:
            return f"a line that cannot be read: {module.unread[0].strip()[:100]}"
        absent = _called(module) - module.computations.keys()
        if absent:
            return f"it calls a computation that it does not contain: {min(absent)}"
    if not modules:
        return "there is no program in its text"
    try:
        return read_after_overwritten(hlo_text)
    except (AssertionError, LookupError, RecursionError, ValueError) as error:
        # The text has a form that is not known here.
        return f"its text cannot be followed ({type(error).__name__}: {error})"


def _called(module: Module) -> set[str]:
    """Names of the computations that a module's instructions refer to."""
    every = [one for found in module.computations.values() for one in found]
    return {name for one in every for name in called_by(one) if name}


def has_rematerialized(hlo_text: str) -> bool:
    """Returns True if the compiler rematerializes something, by its names."""
    return ".remat" in hlo_text


def read_after_overwritten(hlo_text: str) -> str | None:
    """Describes the first value that is read too late, or returns None.

    Programs without rematerialized ops have no such value.
    """
    if not has_rematerialized(hlo_text):
        return None
    for module in modules_in(hlo_text):
        program = _Program(module)
        for name in module.computations:
            if name not in program.inlined:
                found = program.computation(name).first_late()
                if found is not None:
                    return found
    return None


class _Program:
    """A module's computations: `inlined` have no memory, `bodies` are of loops."""

    def __init__(self, module: Module) -> None:
        self.module = module
        every = [one for found in module.computations.values() for one in found]
        fused = [called_by(one, *_CALLS) for one in every if not _is_call(one)]
        self.inlined = {*chain(*fused)}
        self.bodies = {*chain(*(called_by(one, "body") for one in every))}
        self.computation = cache(partial(_Computation, self))
        self.unchanged = cache(self._unchanged)

    def _unchanged(self, loop: Instruction) -> frozenset[int]:
        """Returns elements of a loop's state that its body passes on unchanged."""
        body = next(map(self.computation, called_by(loop, "body")), None)
        return frozenset(
            i
            for i in range(len(elements(loop.shape)))
            if body and body.root is not None and 0 in body.parameters
            if body.value(body.root, (i,)) == (body.parameters[0], (i,))
        )


class _Computation:
    """Owners of buffers, by instruction."""

    def __init__(self, program: _Program, name: str) -> None:
        instructions = program.module.computations.get(name, [])
        self._program = program
        self._name = name
        self._instructions = instructions
        self._here = {one.name: one for one in instructions}
        self._place = {one.name: i for i, one in enumerate(instructions)}
        self._values: dict[_Value, _Value] = {}
        self._before: dict[_Value, _Value] = {}
        self.root = next((one.name for one in instructions if one.root), None)
        self.parameters = {
            one.number: one.name for one in instructions if one.number is not None
        }

    def value(self, of: str, path: _Path = ()) -> _Value:
        """Finds the source of a result: the same memory, without a write since."""
        at: _Value = of, path
        if at not in self._values:
            source = self._source(*at)
            self._values[at] = at if source is None else self.value(*source)
        return self._values[at]

    def first_late(self) -> str | None:
        """The first value that is read too late, in words."""
        overwritten = {**self.overwritten}
        for value, old in self._tied():
            new = value
            while new in self._before:  # It is written where another value has been.
                new = self._before[new]
            if new != old and self._here[new[0]].opcode != "parameter":
                self._overwrite(overwritten, old, new[0])
        late_parts: dict[str, tuple[int, str]] = {}
        for (of, path), when in overwritten.items():
            if path:
                late_parts[of] = min(when, late_parts.get(of, when))
        for one in self._instructions:
            if one.opcode in _READS_NOTHING and not one.root:
                continue
            for operand in [one.name] if one.opcode in _PARTS else one.operands:
                for read in self._all(operand):
                    found = overwritten.get(read)
                    if found is None and not read[1]:
                        found = late_parts.get(read[0])
                    if found is not None and found[0] < self._place[one.name]:
                        return (
                            f"%{one.name} reads %{read[0]} after %{found[1]} "
                            "wrote there"
                        )
        return None

    @cached_property
    def overwritten(self) -> dict[_Value, tuple[int, str]]:
        """Buffers that may be read no longer, with their overwrites."""
        found: dict[_Value, tuple[int, str]] = {}
        for one in self._instructions:
            for out, operand, inner in self._written(one):
                old = self.value(one.operands[operand], inner)
                self._overwrite(found, old, one.name)
                if out is not None:
                    self._before[one.name, out] = old
        return found

    def spoilt(self) -> Iterator[tuple[int, _Path]]:
        """Parameters that are overwritten here, and the part of each."""
        for of, path in self.overwritten:
            if (number := self._here[of].number) is not None:
                yield number, path

    # -- inside --------------------------------------------------------------

    def _source(self, of: str, path: _Path) -> _Value | None:
        one = self._here[of]
        if one.opcode in _SAME_MEMORY:
            return one.operands[0], path
        if one.opcode == "get-tuple-element":
            return one.operands[0], (_index(one), *path)
        if one.opcode == "tuple" and path:
            return one.operands[path[0]], path[1:]
        if one.opcode == "while" and path and path[0] in self._program.unchanged(one):
            return one.operands[0], path
        return None

    def _all(self, of: str) -> Iterator[_Value]:
        """Returns all known values of a result, one by one."""
        one = self._here[of]
        if one.opcode == "tuple":
            for operand in one.operands:
                yield from self._all(operand)
        else:
            yield self.value(of)

    def _overwrite(
        self, overwritten: dict[_Value, tuple[int, str]], old: _Value, by: str
    ) -> None:
        this = self._place[by], by
        overwritten[old] = min(this, overwritten.get(old, this))

    def _tied(self) -> Iterator[tuple[_Value, _Value]]:
        """(result, argument) that are one memory from the beginning."""
        if self.root is None:
            return
        if self._name == self._program.module.entry:
            for out, number, inner in _pairs(_DONATED, self._program.module.header):
                yield self.value(self.root, out), (self.parameters[number], inner)
        elif self._name in self._program.bodies and 0 in self.parameters:
            shape = self._here[self.root].shape
            for i in range(len(elements(shape))):
                path = (i,) if shape.startswith("(") else ()
                yield self.value(self.root, path), (self.parameters[0], path)

    def _written(self, one: Instruction) -> Iterator[tuple[_Path | None, int, _Path]]:
        """(part of the result, operand, part of it) that are one memory.

        The part of the result is None where it is not known.
        """
        opcode = one.opcode.removesuffix("-start")
        within = (1,) if opcode != one.opcode else ()
        yield from _pairs(_ALIASING, one.attributes)
        if opcode in _IN_PLACE:
            # A scatter may be one of several arrays, with as many updates.
            several = len(one.operands) // 2 if opcode == "scatter" else 1
            for i in range(several):
                path = (i,) if several > 1 else ()
                yield (*within, *path), _IN_PLACE[opcode] + i, ()
        elif one.opcode == "while":
            unchanged = self._program.unchanged(one)
            for i in range(len(elements(one.shape))):
                if i not in unchanged:
                    path = (i,) if one.shape.startswith("(") else ()
                    yield path, 0, path
        elif one.opcode == "all-reduce-start" and not one.shape.startswith("(("):
            for i in range(len(one.operands)):
                yield (i,) if one.shape.startswith("(") else (), i, ()
        elif opcode == "fusion":
            for name in called_by(one, *_CALLS):
                body = self._program.module.computations.get(name, [])
                for out, operand in _written_by_fusion(body):
                    yield (*within, *out), operand, ()
        elif _is_call(one):
            for name in called_by(one, *_CALLS):
                for number, inner in self._program.computation(name).spoilt():
                    yield None, number, inner
        elif one.opcode == "conditional":
            for i, name in enumerate(called_by(one, *_BRANCHES)):
                for _, inner in self._program.computation(name).spoilt():
                    yield None, 1 + i, inner


def _is_call(one: Instruction) -> bool:
    return one.opcode in ("call", "call-start") or one.opcode.startswith("async")


def _written_by_fusion(body: list[Instruction]) -> Iterator[tuple[_Path, int]]:
    """(part of the result, operand) that are one memory.

    Others in the fusion may read the operand, too: its kernel reads before it writes.
    """
    here = {one.name: one for one in body}
    root = next((one for one in body if one.root), None)

    def through(name: str) -> Instruction:
        while here[name].opcode == "bitcast":
            name = here[name].operands[0]
        return here[name]

    several = root is not None and root.opcode == "tuple"
    results = () if root is None else root.operands if several else (root.name,)
    for i, name in enumerate(results):
        last = through(name)
        if last.opcode in _IN_PLACE:
            first = through(last.operands[_IN_PLACE[last.opcode]])
            if first.number is not None:
                yield (i,) if several else (), first.number


def _index(one: Instruction) -> int:
    found = _INDEX.search(one.attributes)
    assert found is not None, one
    return int(found[1])


def _pairs(pattern: re.Pattern[str], text: str) -> Iterator[tuple[_Path, int, _Path]]:
    listed = pattern.search(text)
    if listed is None and f"{pattern.pattern.partition('=')[0]}=" in text:
        raise ValueError(f"aliases that cannot be read: {text[:200]}")
    for out, number, inner in _PAIR.findall(listed[1] if listed else ""):
        yield _path(out), int(number), _path(inner)


def _path(text: str) -> _Path:
    return tuple(int(part) for part in text.split(",") if part.strip())
