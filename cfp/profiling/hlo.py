"""Reads collectives and their origins out of a compiled program's HLO text.

Read are the forms that XLA's CPU and GPU compilers print:

    %a = f32[64]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
    %b = (f32[8]{0}, f32[32]{0}) all-gather-start(%y), replica_groups=[1,4]<=[4], ...
    %c = f32[8]{0} reduce-scatter(%z), replica_groups=mesh['x'=4,'y'=2] {'x'}, ...
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cfp.errors import is_installed
from cfp.profiling.hlo_text import Instruction, Module, elements, modules_in
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
_CALLED = re.compile(rf"\b(?:{'|'.join(_CALLING)})=(\{{[^}}]*\}}|%?[\w.-]+)")
# What sends, and what calls.
_COUNTED = (*KINDS, *(f"{name}=" for name in _CALLING))
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']*)'(?:=(\d+)|:\(\d+\)(\d+))?")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_LISTED_GROUPS = re.compile(r"replica_groups=\{(\{[^=]*?\})?\}")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}\s]*)\}")


def collectives_in(hlo_text: str) -> tuple[Collective, ...]:
    """The collectives that one run of a program executes.

    Those in the body of a loop count as often as the compiler knows it to turn, or
    once. Of a conditional all branches count, though one of them is taken.

    Args:
      hlo_text: one or several modules, or lines of a computation.

    Returns:
      Collectives of one kind, size and group together, largest first. `bytes` is
      the larger side's size on one device: of an all-gather the result's, of a
      reduce-scatter the operand's.
    """
    total: Counter[_Sent] = Counter()
    for module in modules_in(_lines_that_count(hlo_text)):
        for sent, runs, _, _ in _sent(module):
            total[sent] += runs
    return tuple(
        Collective(kind=kind, bytes=size, group_size=group, count=count)
        for (kind, size, group), count in sorted(
            total.items(), key=lambda item: (-item[0][1] * item[1], item[0])
        )
    )


def _sent(
    module: Module,
) -> Iterator[tuple[_Sent, int, Instruction, list[Instruction]]]:
    """Yields the collectives of a module: how often each runs, and where it stands."""
    devices = devices_of(module)
    for name, runs in _runs(module).items():
        for one in module.computations[name]:
            if (sent := sent_by(one, devices)) is not None:
                yield sent, runs, one, module.computations[name]


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


def devices_of(module: Module) -> int:
    """Counts the devices of a program."""
    devices = 1
    for name in ("replica_count", "num_partitions"):
        found = re.search(rf"\b{name}=(\d+)", module.header)
        devices *= int(found[1]) if found else 1
    return devices


def sent_by(one: Instruction, devices: int) -> _Sent | None:
    """Kind, bytes and group size of the collective that an instruction starts."""
    kind, started, _ = one.opcode.partition("-start")
    if kind not in KINDS:
        return None
    group = _group_size(kind, one.attributes, devices)
    return kind, _largest_side(kind, one.shape, bool(started), group), group


def called_by(one: Instruction) -> Iterator[str]:
    """Names of the computations that an instruction calls."""
    for called in _CALLED.finditer(one.attributes):
        for name in called[1].strip("{}").split(","):
            yield name.strip().lstrip("%")


def calls(one: Instruction) -> Iterator[tuple[str, int]]:
    """The computations that an instruction calls, and how often each."""
    if one.opcode.partition("-start")[0] in KINDS:
        return  # An asynchronous form may name its own twin.
    for name in called_by(one):
        yield name, one.trips


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
        total += -(-prod(_sizes(dims)) * _element_bits(element) // 8)
    return total


def dims_of(shape: str) -> list[int]:
    """The dims of a shape, of a tuple's first part; empty for a scalar."""
    found = _ARRAY.search(shape)
    return _sizes(found[2]) if found else []


def _sizes(dims: str) -> list[int]:
    return [int(dim.strip(" <=")) for dim in dims.split(",") if dim.strip()]


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
    """Size of the largest set of devices that send to each other."""
    leader: dict[str, str] = {}

    def find(device: str) -> str:
        while leader.setdefault(device, device) != device:
            device = leader[device]
        return device

    for source, target in re.findall(r"(\d+)\s*,\s*(\d+)", pairs):
        leader[find(source)] = find(target)
    return max(Counter(find(device) for device in leader).values(), default=1)


# -------------------------------------------------------------- origins of collectives

# Read is what XLA prints besides an instruction, in the older form and the newer one:
#
#     metadata={op_name="jit(step)/layer/dot_general" source_file="a.py" source_line=7}
#     metadata={op_name="jit(step)/layer/dot_general" stack_frame_id=8}
#
# The newer one counts into tables at the head of the module.

_LINE = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.-]+) = .*\bmetadata=\{")
_SCOPE = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"')
_FILE_LINE = re.compile(r"\bsource_line=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FIELD = re.compile(r"(\w+)=(\d+)")
_ROW = re.compile(r"^(\d+) (.*)$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSite(Collective):
    """The collectives of one kind and size that one line of the step leads to.

    Attributes:
        scope: JAX's name stack of the op, or "".
        source: ``path:line``, or "".
    """

    scope: str
    source: str


_Place = tuple[str, str]  # scope and source, as of a `CollectiveSite`


def collective_sites(hlo_text: str) -> tuple[CollectiveSite, ...]:
    """The collectives that one run of a program executes, by where they come from.

    Of a collective that the compiler says nothing about, the place is that of the
    first op that reads its result, or else of the one that makes its operand.

    Returns:
        Those of one kind, size, group and place together, most bytes first.
    """
    found: Counter[tuple[str, int, int, str, str]] = Counter()
    texts = re.split(r"^(?=HloModule )", hlo_text, flags=re.MULTILINE)
    for text, module in zip(texts, modules_in(hlo_text), strict=True):
        places = _places(text)
        for sent, runs, one, instructions in _sent(module):
            found[*sent, *_place(one, instructions, places)] += runs
    ranked = sorted(
        found.items(), key=lambda item: (-item[0][1] * item[1], str(item[0]))
    )
    return tuple(
        CollectiveSite(
            kind=kind,
            bytes=size,
            group_size=group,
            count=count,
            scope=scope,
            source=source,
        )
        for (kind, size, group, scope, source), count in ranked
    )


def _place(
    one: Instruction,
    instructions: Sequence[Instruction],
    places: Mapping[str, _Place],
) -> _Place:
    readers = [other.name for other in instructions if one.name in other.operands]
    known = (places.get(name) for name in (one.name, *readers, *one.operands))
    return next((place for place in known if place and place[1]), ("", ""))


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
        found[head[1]] = name, source
    return found


def _source(said: str, tables: Mapping[str, Mapping[int, str]]) -> str:
    file, line = _FILE.search(said), _FILE_LINE.search(said)
    if file and line:
        return f"{_plain(file[1])}:{line[1]}"
    frame = _FRAME.search(said)
    if frame is None:
        return ""
    stack = _stack(int(frame[1]), tables)
    own = [s for s in stack if not is_installed(s)]
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
