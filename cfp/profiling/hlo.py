"""Reads a compiled program's HLO text: its instructions, and the collectives of a run.

The text is what `jax.stages.Compiled.as_text` gives. Its grammar has no written
promise; read are the forms that XLA's compilers print:

    %gemm = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%a, %b, %c), custom_call_target="..."
    %a = f32[64]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
    %b = (f32[8]{0}, f32[32]{0}) all-gather-start(%y), replica_groups=[1,4]<=[4], ...
    %c = f32[8]{0} reduce-scatter(%z), replica_groups=mesh['x'=4,'y'=2] {'x'}, ...

TPUs' repeats one that runs beside fusions in each, and scatters in an all-reduce.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

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

_Sent = tuple[str, int, int]  # kind, bytes, group size

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
# What sends, and what calls.
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

    Collectives in a loop count as often as the compiler knows the loop to run, or once.
    All branches of a conditional count, though only one runs.

    Args:
      hlo_text: one or several modules, or lines of a computation.

    Returns:
      Collectives of one kind, size and group together, largest first. `bytes` is the
      larger
      side's size on one device: the result of an all-gather, the operand of a
      reduce-scatter.
    """
    total: Counter[_Sent] = Counter()
    for module in modules_in(_lines_that_count(hlo_text)):
        devices = prod(map(int, _DEVICES.findall(module.header)))
        chains = set[str]()
        for name, runs in _runs(module).items():
            for one in module.computations[name]:
                sent, chain = _sent_by(one, devices), _CHAIN.search(one.attributes)
                if sent is None or (chain and chain[1] in chains):
                    continue
                chains |= {chain[1]} if chain else set()
                if sent[0] == "all-reduce" and name.startswith("all-reduce-scatter"):
                    sent = ("reduce-scatter", *sent[1:])
                total[sent] += runs
    return tuple(
        Collective(kind=kind, bytes=size, group_size=group, count=count)
        for (kind, size, group), count in sorted(
            total.items(), key=lambda item: (-item[0][1] * item[1], item[0])
        )
    )


def _lines_that_count(hlo_text: str) -> str:
    """A text without the instructions that neither send nor call anything.

    Most are inside of fusions. Reading all of a whole step takes half a second of
    Python, for which every other thread that compiles has to wait.
    """
    return "\n".join(
        line
        for line in hlo_text.splitlines()
        if line[:1] != " " or any(word in line for word in _COUNTED)
    )


def _sent_by(one: Instruction, devices: int) -> _Sent | None:
    """Kind, bytes and group size of the collective that an instruction starts."""
    kind, started, _ = one.opcode.partition("-start")
    if kind not in KINDS:
        return None
    group = _group_size(kind, one.attributes, devices)
    return kind, _largest_side(kind, one.shape, bool(started), group), group


def called_by(one: Instruction, *by: str) -> Iterator[str]:
    """Names of the computations that an instruction calls, by some attributes."""
    for attribute, names in _CALLED.findall(one.attributes):
        if not by or attribute in by:
            for name in names.strip("{}").split(","):
                yield name.strip().lstrip("%")


def _runs(module: Module) -> Counter[str]:
    """Counts the runs of each computation in one run of the module."""
    found: Counter[str] = Counter()
    waiting = [(module.entry, 1)]
    while waiting:
        name, times = waiting.pop()
        found[name] += times
        for one in module.computations[name]:
            # An asynchronous collective may name its own twin.
            if one.opcode.partition("-start")[0] not in KINDS:
                waiting += [
                    (called, times * one.trips)
                    for called in called_by(one)
                    if called in module.computations
                ]
    return found


def _largest_side(kind: str, shape: str, started: bool, group: int) -> int:
    parts = elements(shape)
    # An asynchronous start gives (operands, results, the backend's own); only an
    # all-reduce of its own opcode gives its results alone.
    wrapped = len(parts) > 1 and (kind != "all-reduce" or parts[0].startswith("("))
    if started and wrapped:
        return max(shape_bytes(parts[0]), shape_bytes(parts[1]))
    size = shape_bytes(shape)
    return size * group if kind == "reduce-scatter" else size


def shape_bytes(shape: str) -> int:
    """Bytes of a shape, of all parts if it is a tuple's."""
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
    # The first number is the width: s32, bf16, c64, f8e4m3fn.
    width = re.search(r"\d+", element)
    return int(width[0]) if width else 0


def _group_size(kind: str, text: str, devices: int) -> int:
    """Counts the devices in one group, of the largest if they differ."""
    if kind == "collective-permute":
        pairs = _PAIRS.search(text)
        return _largest_ring(pairs[1]) if pairs else devices
    if mesh := _MESH_GROUPS.search(text):
        sizes = {name: int(size) for name, size, _ in _MESH_AXIS.findall(mesh[1])}
        # A part of an axis states its own size: 'x':(2)4.
        return prod(
            int(part) if part else sizes[name]
            for name, _, part in _MESH_AXIS.findall(mesh[2])
        )
    if iota := _IOTA_GROUPS.search(text):
        return int(iota[2])
    listed = _LISTED_GROUPS.search(text)
    if listed and listed[1]:
        groups = re.findall(r"\{([^{}]*)\}", listed[1])
        return max(len(group.split(",")) for group in groups)
    return devices


def _largest_ring(pairs: str) -> int:
    """Size of the largest ring, or row, of devices that send to each other."""
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
# What follows in a constant that takes several lines.
_CONSTANT = re.compile(r"(?:[\s\d{}(),.+-]|e|inf|nan|true|false)*")
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """A line of a computation.

    Attributes:
        name: unique in its module.
        shape: of its result, as text.
        attributes: text behind the operands, without quoted parts.
        root: True for the computation's result.
        trips: number of a loop's iterations, if the compiler knows it; or 1.
        number: number of a parameter.
        config: the backend's configuration as JSON; may be empty.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool = False
    trips: int = 1
    number: int | None = None
    config: str = ""


@dataclass(slots=True)
class Module:
    """A compiled program.

    Attributes:
        header: its first line.
        entry: the name of the computation that it starts with.
        computations: their instructions, in the order in which they are printed.
        unread: lines of computations that were not understood, or stand in none.
    """

    header: str = ""
    entry: str = ""
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def modules_in(hlo_text: str) -> Iterator[Module]:
    """The modules of a text, or one of lines that stand in no computation."""
    for text in re.split(r"^(?=HloModule )", hlo_text, flags=re.MULTILINE):
        module = Module(computations={"": []})
        current, inside = module.computations[""], False
        for line in text.splitlines():
            if line.startswith("HloModule "):
                module.header = line
            elif line[:1] not in ("", " ", "}"):
                # Others are of tables: of source files, and of stack frames.
                header = _HEADER.match(line)
                if header is not None:
                    current, inside = (
                        module.computations.setdefault(header[2], []),
                        True,
                    )
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
        config=right.partition(", backend_config=")[2],
    )


def elements(shape: str) -> list[str]:
    """The elements of a tuple's shape; the shape itself if it is an array's."""
    if not shape.startswith("("):
        return [shape]
    return split_at_commas(shape[1 : _outside(shape, _CLOSING, 1)])


def split_at_commas(text: str) -> list[str]:
    """Splits a text at those of its commas that stand in no brackets."""
    found, start = [], 0
    while (end := _outside(text, ",", start)) < len(text):
        found.append(text[start:end].strip())
        start = end + 1
    return [*found, text[start:].strip()]


_CLOSING = ")]}"


def _outside(text: str, wanted: str, start: int = 0) -> int:
    """Finds the first of some letters outside of brackets, or the end of the text."""
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
