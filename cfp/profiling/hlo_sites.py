"""Origins of a compiled program's collectives: scopes and source lines.

Read is what XLA prints besides an instruction, in the older form and the newer one:

    metadata={op_name="jit(step)/layer/dot_general" source_file="a.py" source_line=7}
    metadata={op_name="jit(step)/layer/dot_general" stack_frame_id=8}

The newer one counts into tables at the head of the module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from cfp.profiling.hlo import calls, devices_of, sent_counts
from cfp.profiling.hlo_text import Instruction, Module, modules_in

_LINE = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.-]+) = .*\bmetadata=\{")
_SCOPE = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"')
_FILE_LINE = re.compile(r"\bsource_line=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FIELD = re.compile(r"(\w+)=(\d+)")
_ROW = re.compile(r"^(\d+) (.*)$")
_INSTALLED = {"site-packages", "dist-packages"}
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSite:
    """The collectives of one kind and size that one line of the step leads to.

    Attributes:
        kind: as in HLO: "all-reduce", "all-gather", ...
        bytes: of one of them: the larger side's size on one device.
        group_size: how many devices are in a group.
        count: how often it runs in one step; a loop counts as often as the compiler
            knows it to turn, and all branches of a conditional count.
        scope: JAX's name stack of the op, or "".
        source: ``path:line``, or "".
    """

    kind: str
    bytes: int
    group_size: int
    count: int
    scope: str
    source: str


@dataclass(frozen=True, slots=True)
class _Place:
    scope: str
    source: str


def collective_sites(hlo_text: str) -> tuple[CollectiveSite, ...]:
    """The collectives that one run of a program executes, by where they come from.

    Of a collective that the compiler says nothing about, the place is that of the
    first op that reads its result, or else of the one that makes its operand.

    Args:
        hlo_text: what `jax.stages.Compiled.as_text` gives.

    Returns:
        Those of one kind, size, group and place together, most bytes first.
    """
    found: Counter[tuple[str, int, int, _Place]] = Counter()
    texts = re.split(r"^(?=HloModule )", hlo_text, flags=re.MULTILINE)
    for text, module in zip(texts, modules_in(hlo_text), strict=True):
        places = _places(text)
        devices = devices_of(module)
        for name, runs in _runs(module).items():
            instructions = module.computations[name]
            for one in instructions:
                for (kind, size, group), count in sent_counts(one, devices).items():
                    place = _place(one, instructions, places)
                    found[kind, size, group, place] += count * runs
    ranked = sorted(
        found.items(), key=lambda item: (-item[0][1] * item[1], str(item[0]))
    )
    return tuple(
        CollectiveSite(
            kind=kind,
            bytes=size,
            group_size=group,
            count=count,
            scope=place.scope,
            source=place.source,
        )
        for (kind, size, group, place), count in ranked
    )


def _runs(module: Module) -> Counter[str]:
    """Counts the runs of each computation in one run of the module."""
    found: Counter[str] = Counter()
    waiting = [(module.entry, 1)]
    while waiting:
        name, times = waiting.pop()
        found[name] += times
        waiting += [
            (called, times * trips)
            for one in module.computations[name]
            for called, trips in calls(one)
            if called in module.computations
        ]
    return found


def _place(
    one: Instruction,
    instructions: Sequence[Instruction],
    places: Mapping[str, _Place],
) -> _Place:
    readers = [other.name for other in instructions if one.name in other.operands]
    nothing = _Place("", "")
    for name in (one.name, *readers, *one.operands):
        found = places.get(name, nothing)
        if found.source:
            return found
    return places.get(one.name, nothing)


# ------------------------------------------------------------------------ source lines


def _places(text: str) -> dict[str, _Place]:
    """The place of each instruction of a module, by name."""
    tables = _tables(text)
    found = {}
    for line in text.splitlines():
        head = _LINE.match(line)
        if head is None:
            continue
        said = line[head.end() :]
        scope = _SCOPE.search(said)
        source = _source(said, tables)
        name = _plain(scope[1]) if scope and source else ""
        found[head[1]] = _Place(name, source)
    return found


def _source(said: str, tables: Mapping[str, Mapping[int, str]]) -> str:
    file, line = _FILE.search(said), _FILE_LINE.search(said)
    if file and line:
        return f"{_plain(file[1])}:{line[1]}"
    frame = _FRAME.search(said)
    if frame is None:
        return ""
    stack = _stack(int(frame[1]), tables)
    own = [s for s in stack if not _INSTALLED & set(PurePath(s).parts)]
    return (own or stack or [""])[0]


def _stack(frame: int, tables: Mapping[str, Mapping[int, str]]) -> list[str]:
    """``path:line`` of a frame and of all that called it, the innermost first.

    XLA counts parents from 1 up, where 1 is none: the first frame seems to be its own.
    """
    found: list[str] = []
    first = _fields(tables["StackFrames"].get(1, ""))
    above = 1 if first.get("parent_frame_id") == 1 else 0
    seen: set[int] = set()
    while frame not in seen and frame in tables["StackFrames"]:
        seen.add(frame)
        row = _fields(tables["StackFrames"][frame])
        location = _fields(
            tables["FileLocations"].get(row.get("file_location_id", 0), "")
        )
        file = tables["FileNames"].get(location.get("file_name_id", 0), "")
        if file:
            found.append(f"{_plain(file.strip(chr(34)))}:{location.get('line', 0)}")
        frame = row.get("parent_frame_id", 0) - above
    return found


def _tables(text: str) -> dict[str, dict[int, str]]:
    """The tables at the head of a module: by their names, rows by number."""
    found: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] | None = None
    for line in text.splitlines():
        if line in found:
            current = found[line]
        elif current is not None and (row := _ROW.match(line)):
            current[int(row[1])] = row[2]
        else:
            current = None
    return found


def _fields(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in _FIELD.findall(text)}


def _plain(quoted: str) -> str:
    """Unescapes a quoted string."""
    return re.sub(r"\\(.)", r"\1", quoted)
