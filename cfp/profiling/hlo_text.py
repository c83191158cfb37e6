"""Reads a compiled program's HLO text, line by line.

The text is what `jax.stages.Compiled.as_text` gives. Its grammar has no written
promise; read are the forms that XLA's CPU and GPU compilers print:

    %gemm = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%a, %b, %c), custom_call_target="..."
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

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
        attributes: what follows the operands, without what is quoted.
        root: whether it is the computation's result.
        trips: how often a loop turns, as far as the compiler knows; or 1.
        number: of a parameter, which one it is.
        config: the backend's configuration of it, as JSON; may be empty.
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
    """Finds the first of some letters that is in no brackets that open behind a place.

    Returns:
        Its place; the end of the text if there is none.
    """
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
