"""Reads compiled programs' HLO text: collectives, and reads of overwritten values.

The text is from `jax.stages.Compiled.as_text`. Its grammar is not specified; this
module reads the forms that XLA's compilers print:

    %gemm = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%a, %b, %c), custom_call_target="..."
    %a = f32[64]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
    %b = (f32[8]{0}, f32[32]{0}) all-gather-start(%y), replica_groups=[1,4]<=[4], ...
    %c = f32[8]{0} reduce-scatter(%z), replica_groups=mesh['x'=4,'y'=2] {'x'}, ...

`collectives_in` lists the collectives of one run. TPUs' texts repeat a collective in
each fusion that runs beside it; it counts once. Their reduce-scatters are all-reduces
in computations of that name, and count as reduce-scatters.

`compile_right` compiles a program, and rejects reads of overwritten values. XLA's GPU
compiler chooses in-place ops, and inserts the necessary copies, before it
rematerializes. Rematerialized ops read their operands later, and XLA does not check for
copies again. Seen with jaxlib 0.11.2: a matrix product is added to the residual stream
in place, and then a rematerialized layer norm reads the residual stream before it:

    %y = f32[8,4] custom-call(%a, %b, %x), output_to_operand_aliasing={{}: (2, {})}
    %z = f32[8,4] fusion(%x), ...                 # %x is %y by now

Such a program computes wrong results. Modules are printed in the order in which they
run. A program with rematerialized ops is used only if its text proves that no op reads
an overwritten value. Otherwise, also if the text cannot be read, the program is
compiled again without rematerialization, which needs more memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from math import prod
from typing import Any

import jax

from cfp.errors import CfpError
from cfp.profiling.record import Collective

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([^\]]*)\]")
_CALLING = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "true_computation",
    "false_computation",
    "branch_computations",
    "called_computations",
)
_CALLED = re.compile(rf"\b({'|'.join(_CALLING)})=(\{{[^}}]*\}}|%?[\w.-]+)")
# Words of instructions that are collectives, or call computations.
_COUNTED = (*KINDS, *(f"{name}=" for name in _CALLING))
_DEVICES = re.compile(r"\b(?:replica_count|num_partitions)=(\d+)")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']*)'(?:=(\d+)|:\(\d+\)(\d+))?")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_LISTED_GROUPS = re.compile(r"replica_groups=\{(\{[^=]*?\})?\}")
_CHAIN = re.compile(r"channel_id=(\d+),.*chain_id=")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}\s]*)\}")


def collectives_in(hlo_text: str) -> tuple[Collective, ...]:
    """Lists the collectives that one run of a program executes.

    Collectives in a loop count once for each iteration, or once if XLA does not know
    the number. All branches of a conditional count, though only one runs.

    Args:
      hlo_text: one or several modules, or lines of a computation.

    Returns:
      One `Collective` for each kind, size and group size, the most total bytes first.
    """
    # Parsing all of a whole step takes half a second of Python, for which all threads
    # that compile would wait. Most lines are inside of fusions, and call nothing.
    lines = hlo_text.splitlines()
    some = [x for x in lines if x[:1] != " " or any(word in x for word in _COUNTED)]
    total = Counter[tuple[str, int, int]]()  # By kind, bytes and group size.
    for module in modules_in("\n".join(some)):
        devices = prod(map(int, _DEVICES.findall(module.header)))
        chains = set[str]()
        for name, runs in _runs(module).items():
            for one in module.computations[name]:
                kind, started, _ = one.opcode.partition("-start")
                chain = _CHAIN.search(one.attributes)
                if kind not in KINDS or (chain and chain[1] in chains):
                    continue
                chains |= {chain[1]} if chain else set()
                group = _group_size(kind, one.attributes, devices)
                size = _largest_side(kind, one.shape, bool(started), group)
                if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"
                total[kind, size, group] += runs
    return tuple(
        Collective(kind=kind, bytes=size, group_size=group, count=count)
        for (kind, size, group), count in sorted(
            total.items(), key=lambda item: (-item[0][1] * item[1], item[0])
        )
    )


def called_by(one: Instruction, *by: str) -> Iterator[str]:
    """Yields names of computations that an op calls, by attributes `by` or by any."""
    for attribute, names in _CALLED.findall(one.attributes):
        if not by or attribute in by:
            for name in names.strip("{}").split(","):
                yield name.strip().lstrip("%")


def _runs(module: Module) -> Counter[str]:
    """Counts each computation's runs in one of the module; as in `collectives_in`."""
    found: Counter[str] = Counter()
    waiting = [(module.entry, 1)]
    while waiting:
        name, times = waiting.pop()
        found[name] += times
        for one in module.computations[name]:
            # Asynchronous collectives call computations with the same collective.
            if one.opcode.partition("-start")[0] not in KINDS:
                waiting += [
                    (called, times * one.trips)
                    for called in called_by(one)
                    if called in module.computations
                ]
    return found


def _largest_side(kind: str, shape: str, started: bool, group: int) -> int:
    parts = elements(shape)
    # The shape of a start is (operands, results, backend's data), except all-reduce-
    # start's: results only.
    wrapped = len(parts) > 1 and (kind != "all-reduce" or parts[0].startswith("("))
    if started and wrapped:
        return max(shape_bytes(parts[0]), shape_bytes(parts[1]))
    size = shape_bytes(shape)
    return size * group if kind == "reduce-scatter" else size


def shape_bytes(shape: str) -> int:
    """Returns the bytes of a shape, or of all elements of a tuple's shape."""
    total = 0
    for element, dims in _ARRAY.findall(shape):
        sizes = [int(dim.strip(" <=")) for dim in dims.split(",") if dim.strip()]
        total += -(-prod(sizes) * _element_bits(element) // 8)
    return total


def _element_bits(element: str) -> int:
    if element == "pred":
        return 8
    if element in ("token", "opaque"):
        return 0
    # The first number is the width: s32, bf16, c64. 8-bit floats have others behind.
    width = re.search(r"\d+", element)
    return int(width[0]) if width else 0


def _group_size(kind: str, text: str, devices: int) -> int:
    """Returns the size of the largest group or ring; `devices` if none is listed."""
    if kind == "collective-permute":
        pairs = _PAIRS.search(text)
        return _largest_ring(pairs[1]) if pairs else devices
    if mesh := _MESH_GROUPS.search(text):
        sizes = {name: int(size) for name, size, _ in _MESH_AXIS.findall(mesh[1])}
        # Part of an axis has its own size: 'x':(2)4.
        return prod(
            int(part) if part else sizes[name]
            for name, _, part in _MESH_AXIS.findall(mesh[2])
        )
    if iota := _IOTA_GROUPS.search(text):
        return int(iota[2])
    if (listed := _LISTED_GROUPS.search(text)) and listed[1]:
        groups = re.findall(r"\{([^{}]*)\}", listed[1])
        return max(len(group.split(",")) for group in groups)
    return devices


def _largest_ring(pairs: str) -> int:
    """Returns the size of the largest ring, or chain, of (source, target) pairs."""
    target, largest = dict(re.findall(r"(\d+)\s*,\s*(\d+)", pairs)), 1
    for first in target:
        size, device = 1, target[first]
        while device not in (None, first) and size <= len(target):
            size, device = size + 1, target.get(device)
        largest = max(largest, size)
    return largest


# ------------------------------------------------------------- modules and instructions

_HEADER = re.compile(r"(ENTRY\s+)?%?([^\s(]+)\s.*\{\s*$")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([\w.-]+)")
# Further lines of a constant.
_CONSTANT = re.compile(r"(?:[\s\d{}(),.+-]|e|inf|nan|true|false)*")
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name: unique name in the module.
        shape: text of the result's shape.
        attributes: text after the operands, without quoted parts.
        root: True for the computation's result.
        trips: number of a loop's iterations if XLA knows it; otherwise 1.
        number: number of a parameter; None for other instructions.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool = False
    trips: int = 1
    number: int | None = None


@dataclass(slots=True)
class Module:
    """A compiled program.

    Attributes:
        header: its first line.
        entry: name of the entry computation.
        computations: ``{name: instructions as printed}``; "" has any before them.
        unread: unreadable lines of computations, and instructions outside of any.
    """

    header: str = ""
    entry: str = ""
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def modules_in(hlo_text: str) -> Iterator[Module]:
    """Yields a module for lines before "HloModule", maybe empty; then each module."""
    for text in re.split(r"^(?=HloModule )", hlo_text, flags=re.MULTILINE):
        module = Module(computations={"": []})
        current, inside = module.computations[""], False
        for line in text.splitlines():
            if line.startswith("HloModule "):
                module.header = line
            elif line[:1] not in ("", " ", "}"):
                # Other lines are tables of source files and stack frames.
                if (header := _HEADER.match(line)) is not None:
                    current = module.computations.setdefault(header[2], [])
                    inside = True
                    module.entry = header[2] if header[1] else module.entry
            elif line[:1] == "}" and line[:2] != "})":
                inside = False
            elif " = " in line:
                found = _instruction(line)
                current += [found] if found else []
                module.unread += [] if found and inside else [line]
            elif inside and not _CONSTANT.fullmatch(line):
                module.unread.append(line)
        yield module


def _instruction(line: str) -> Instruction | None:
    left, _, right = line.partition(" = ")
    # Names and paths in quotes, and comments, may contain anything.
    text = _COMMENT.sub("", _QUOTED.sub('""', right))
    end = _outside(text, " ")  # Of the shape.
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        return None
    close = _outside(text, _CLOSING, opcode.end())
    words = left.split()
    trips = _TRIPS.search(line) if opcode[1] == "while" else None
    return Instruction(
        name=words[-1].lstrip("%"),
        shape=text[:end],
        opcode=opcode[1],
        operands=tuple(_NAME.findall(text, opcode.end(), close)),
        attributes=text[close:],
        root=words[0] == "ROOT",
        trips=int(trips[1]) if trips else 1,
        number=int(text[opcode.end() : close]) if opcode[1] == "parameter" else None,
    )


def elements(shape: str) -> list[str]:
    """Splits a tuple's shape into its elements; an array's shape is one element."""
    if not shape.startswith("("):
        return [shape]
    text = shape[1 : _outside(shape, _CLOSING, 1)]
    found, start = [], 0
    while (end := _outside(text, ",", start)) < len(text):
        found.append(text[start:end].strip())
        start = end + 1
    return [*found, text[start:].strip()]


_CLOSING = ")]}"


def _outside(text: str, wanted: str, start: int = 0) -> int:
    """Returns the place of the first wanted letter outside of brackets, or the end."""
    depth = 0
    for place in range(start, len(text)):
        letter = text[place]
        if depth == 0 and letter in wanted:
            return place
        if letter in "([{":
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
    return len(text)


# A value: an instruction's name, and the path inside of its result if that is a tuple.
_Path = tuple[int, ...]
_Value = tuple[str, _Path]

_SAME_MEMORY = ("bitcast", "optimization-barrier", "opt-barrier")
_PARTS = (*_SAME_MEMORY, "get-tuple-element")
_READS_NOTHING = (*_PARTS, "tuple", "parameter", "constant")
# Ops that write into an operand, with the operand's position.
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
    """Compiles a program, again without XLA's rematerialization if it may be wrong.

    Only rematerialized programs, and those without text, may read overwritten values.

    Returns:
        The compiled program and its HLO text.

    Raises:
        CfpError: the second program has rematerialized ops, and may be wrong, too.
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
            f"XLA compiled a program that may compute wrong results: {found}. "
            "Install another version of jaxlib, or plan with more memory."
        )
    return compiled, text


def miscompile_reason(hlo_text: str) -> str | None:
    """Returns why a program may read overwritten values; None if it cannot."""
    if not hlo_text.strip():
        return "it has no text"
    if not has_rematerialized(hlo_text):
        return None  # XLA has inserted the copies.
    modules = [
        m for m in modules_in(hlo_text) if m.header or any(m.computations.values())
    ]
    if not modules:
        return "there is no program in its text"
    try:
        reasons = chain(map(_unreadable, modules), map(_read_too_late, modules))
        return next(filter(None, reasons), None)
    except (AssertionError, LookupError, RecursionError, ValueError) as error:
        # A form of the text that this module does not know.
        return f"its text cannot be followed ({type(error).__name__}: {error})"


def has_rematerialized(hlo_text: str) -> bool:
    """Returns True if a text may have rematerialized instructions: it has ".remat"."""
    return ".remat" in hlo_text


def _unreadable(module: Module) -> str | None:
    """Returns the reason why a module's text proves nothing, or None."""
    if not module.header or not module.entry:
        return "instructions that belong to no program"
    if _SCHEDULED not in module.header:
        return "its text does not say in which order it runs"
    if module.unread:
        return f"a line that cannot be read: {module.unread[0].strip()[:100]}"
    every = chain(*module.computations.values())
    called = {name for one in every for name in called_by(one) if name}
    if absent := called - module.computations.keys():
        return f"it calls a computation that it does not contain: {min(absent)}"
    return None


def _read_too_late(module: Module) -> str | None:
    """Describes the first read of an overwritten value in a module; None without."""
    program = _Program(module)
    here = (name for name in module.computations if name not in program.inlined)
    found = (program.computation(name).first_late() for name in here)
    return next(filter(None, found), None)


class _Program:
    """A module, with names of computations: `inlined` in kernels, `bodies` of loops."""

    def __init__(self, module: Module) -> None:
        self.module = module
        every = [one for found in module.computations.values() for one in found]
        fused = [called_by(one, *_CALLS) for one in every if not _is_call(one)]
        self.inlined = {*chain(*fused)}
        self.bodies = {*chain(*(called_by(one, "body") for one in every))}
        self.computation = cache(partial(_Computation, self))
        self.unchanged = cache(self._unchanged)

    def _unchanged(self, loop: Instruction) -> frozenset[int]:
        """Returns indices of a loop's state that its body passes on unchanged."""
        body = next(map(self.computation, called_by(loop, "body")), None)
        return frozenset(
            i
            for i in range(len(elements(loop.shape)))
            if body and body.root is not None and 0 in body.parameters
            if body.value(body.root, (i,)) == (body.parameters[0], (i,))
        )


class _Computation:
    """Values of a computation's buffers, and the instructions that overwrite them."""

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
        """Returns the value whose memory a result has, by ops that only pass it on."""
        at: _Value = of, path
        if at not in self._values:
            source = self._source(*at)
            self._values[at] = at if source is None else self.value(*source)
        return self._values[at]

    def first_late(self) -> str | None:
        """Describes the first read of an overwritten value; None without one."""
        overwritten = {**self.overwritten}
        for value, old in self._tied():
            new = value
            while new in self._before:  # Written in another value's memory.
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
                for of, path in self._all(operand):
                    found = overwritten.get((of, path))
                    if found is None and not path:
                        found = late_parts.get(of)
                    if found is not None and found[0] < self._place[one.name]:
                        return f"%{one.name} reads %{of} after %{found[1]} wrote there"
        return None

    @cached_property
    def overwritten(self) -> dict[_Value, tuple[int, str]]:
        """Overwritten values: ``{value: (place, name) of the first overwrite}``."""
        found: dict[_Value, tuple[int, str]] = {}
        for one in self._instructions:
            for out, operand, inner in self._written(one):
                old = self.value(one.operands[operand], inner)
                self._overwrite(found, old, one.name)
                if out is not None:
                    self._before[one.name, out] = old
        return found

    def spoilt(self) -> Iterator[tuple[int, _Path]]:
        """Yields (number, path) of parameters that this computation overwrites."""
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
        """Yields the value of an op's result; for a `tuple` op that of each operand."""
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
        """Yields (result, argument) with one memory: donated, or a loop's state."""
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
        """Yields (path in result, operand, path in operand) that `one` may overwrite.

        The path in the result is None if unknown.
        """
        opcode = one.opcode.removesuffix("-start")
        within = (1,) if opcode != one.opcode else ()
        yield from _pairs(_ALIASING, one.attributes)
        if opcode in _IN_PLACE:
            # A scatter may have n arrays and n updates.
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
    """Yields (path in the result, operand) of a fusion that may have one memory.

    Other ops in the fusion may read the operand: its kernel reads before it writes.
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
        raise ValueError(f"unreadable aliases of arguments: {text[:200]}")
    for out, number, inner in _PAIR.findall(listed[1] if listed else ""):
        yield _path(out), int(number), _path(inner)


def _path(text: str) -> _Path:
    return tuple(int(part) for part in text.split(",") if part.strip())
