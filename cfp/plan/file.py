"""Reads and writes plan files; checks each field's type, range and references.

A damaged file is refused with the first reason. Numbers of values and ops are checked
later, against the step's program (:mod:`cfp.program.constrain`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Never, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)

from cfp.analysis.strategies import Spec
from cfp.errors import NoSuchFile, PlanMismatch
from cfp.kernels.kinds import KERNELS, known_kernels
from cfp.plan.parts import PlanRow, PlanSegment, shape_of
from cfp.printable import Count, Flag, Name, first_error, matching, shown
from cfp.profiling.record import refused_option
from cfp.program.constrain import Constraints, Rematerialization
from cfp.program.replace import Recorded, Replacement
from cfp.program.trace import PRECISION, PRECISIONS

FORMAT = 18

_MOST_BYTES = 64 * 2**20  # A plan of 96 layers has one or two megabytes.
_MOST_AXES = 16
_MOST_DIMS = 64
_MOST_DEVICES = 2**20

_TYPE = r"[a-z][a-z0-9_]*(<[a-z0-9_]+>)?\[(\d{1,15}(,\d{1,15})*)?\]"
# Fields of files and of `--json` that are not a plan's.
_BESIDE = frozenset({"format", "throughput"})

_Item = TypeVar("_Item")
_Plan = TypeVar("_Plan")


@dataclass(frozen=True, slots=True)
class ReadAs:
    """Annotation for pydantic: a file stores the type `kind`, which `make` converts."""

    kind: Any
    make: Callable[[Any], Any] = lambda value: value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> Any:
        return handler.generate_schema(Annotated[self.kind, AfterValidator(self.make)])


def _mesh(info: ValidationInfo) -> dict[str, int]:
    """Returns {axis: size} of the mesh, which the check of `mesh_axes` fills."""
    assert info.context is not None
    return info.context


def _count(info: ValidationInfo, name: str) -> int:
    """Counts the items of a field checked before this one; 0 if it was refused."""
    return len(info.data.get(name, ()))


def _on_mesh(spec: Spec, info: ValidationInfo) -> Spec:
    used, mesh = [name for names in spec for name in names], _mesh(info)
    if not mesh.keys() >= {*used} or len({*used}) < len(used):
        axes = shown([*mesh])
        raise ValueError(
            f"for each dim a list of axes of the mesh ({axes}), none of them twice"
        )
    return spec


def _in_order(ops: tuple[int, ...]) -> tuple[int, ...]:
    if any(b <= a for a, b in pairwise(ops)):
        raise ValueError("op numbers in rising order")
    return ops


def _check_once(items: Iterable[_Item], what: str) -> None:
    seen = set()
    for item in items:
        if item in seen:
            raise ValueError(f"each {what} at most once, not {shown(item)} twice")
        seen.add(item)


# -------------------------------------------------------------- the mesh and arguments

_Axis = tuple[Name, Annotated[int, Field(strict=True, ge=2, le=_MOST_DEVICES)]]


def _is_mesh(axes: tuple[_Axis, ...], info: ValidationInfo) -> tuple[_Axis, ...]:
    # Quotes in a name would end it in the module's text.
    names = [name for name, _ in axes]
    if not all(names) or len({*names}) < len(names) or {*'"\\'} & {*"".join(names)}:
        raise ValueError("axes with different names, without quotes or backslashes")
    if math.prod(size for _, size in axes) > _MOST_DEVICES:
        raise ValueError(f"axes of at most {_MOST_DEVICES} devices together")
    _mesh(info).update(axes)
    return axes


def _fit(specs: tuple[Spec, ...], info: ValidationInfo) -> tuple[Spec, ...]:
    types = info.data.get("arg_types", ())
    _for_each(specs, info)
    for kind, spec in zip(types, specs, strict=False):
        shape = shape_of(kind)
        # Inside of a program, random keys have one dim more than JAX shows.
        hidden = 1 if "<" in kind else 0
        if not len(shape) <= len(spec) <= len(shape) + hidden:
            raise ValueError(f"axes for each of the {len(shape)} dims of {kind}")
        for size, names in zip(shape, spec, strict=False):
            if size % math.prod(_mesh(info)[name] for name in names):
                raise ValueError(f"axes whose sizes divide the dims of {kind}")
    return specs


def _for_each(items: tuple[_Item, ...], info: ValidationInfo) -> tuple[_Item, ...]:
    if len(items) != (count := _count(info, "arg_names")):
        raise ValueError(f"one item for each of {count} arguments")
    return items


def _are_there(positions: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
    if max(positions, default=-1) >= (count := _count(info, "arg_names")):
        raise ValueError(f"positions of arguments, below {count}")
    return positions


def _are_leaves(
    pairs: tuple[tuple[int, int], ...], info: ValidationInfo
) -> tuple[tuple[int, int], ...]:
    sides = zip(*pairs, strict=True)
    for side, leaves in zip(sides, ("arg_names", "output_specs"), strict=False):
        if len({*side}) < len(side) or max(side) >= _count(info, leaves):
            raise ValueError("positions of arguments and results, each at most once")
    return pairs


def _are_arguments(static: tuple[int | str, ...]) -> tuple[int | str, ...]:
    for key in static:
        if not (key.isprintable() if isinstance(key, str) else 0 <= key < 1000):
            raise ValueError("printable names or positions from 0 to 999")
    _check_once(static, "argument")
    return static


Fingerprint = Annotated[str, matching("[0-9a-f]{64}", "64 hexadecimal digits")]
MeshAxes = Annotated[
    tuple[_Axis, ...], Field(max_length=_MOST_AXES), AfterValidator(_is_mesh)
]
SpecOnMesh = Annotated[
    tuple[tuple[str, ...], ...], Field(max_length=_MOST_DIMS), AfterValidator(_on_mesh)
]
Types = Annotated[
    tuple[Annotated[str, matching(_TYPE, "a type such as float32[8,16]")], ...],
    AfterValidator(_for_each),
]
ArgumentSpecs = Annotated[tuple[SpecOnMesh, ...], AfterValidator(_fit)]
Donated = Annotated[tuple[Flag, ...], AfterValidator(_for_each)]
Positions = Annotated[tuple[Count, ...], AfterValidator(_are_there)]
Leaves = Annotated[tuple[tuple[Count, Count], ...], AfterValidator(_are_leaves)]
Static = Annotated[tuple[StrictInt | StrictStr, ...], AfterValidator(_are_arguments)]
Precision = Annotated[str, matching(PRECISION, f"{', '.join(PRECISIONS)}, or empty")]


# ------------------------------------------------------------------ inside of the step


def _are_known(
    segments: tuple[PlanSegment, ...], info: ValidationInfo
) -> tuple[PlanSegment, ...]:
    stored = [one.argument for segment in segments for one in segment.parameters]
    count = _count(info, "arg_names")
    if len({*stored}) < len(stored) or max(stored, default=-1) >= count:
        raise ValueError(f"positions of arguments, below {count}, none of them twice")
    if not {pair for one in segments for pair in one.kernels} <= known_kernels():
        raise ValueError(f"kernels among {', '.join(KERNELS)}")
    return segments


def _are_blocks(rows: tuple[PlanRow, ...], info: ValidationInfo) -> tuple[PlanRow, ...]:
    _check_once((row.block for row in rows), "block")
    count = _count(info, "segments")
    if not all(row.segment < count for row in rows):
        raise ValueError(f"numbers of segments below {count}")
    for row in rows:
        _on_mesh((tuple(one.axis for one in row.strategy),), info)
    return rows


Segments = Annotated[tuple[PlanSegment, ...], AfterValidator(_are_known)]
Blocks = Annotated[tuple[PlanRow, ...], AfterValidator(_are_blocks)]
_Ops = Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(_in_order)]


class _Part(BaseModel):
    """Base of parts of a file; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Constrained(_Part):
    """Values, and uses as (op, operand), that share a sharding."""

    spec: SpecOnMesh
    values: tuple[Count, ...]
    uses: tuple[tuple[Count, Count], ...]


class _Recomputed(_Part):
    """Ops that are rematerialized, and ops of the backward pass that read them."""

    forward: _Ops
    backward: _Ops


def _known(how: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    if not {word.rpartition("=")[0] for word in how[1:]} <= _mesh(info).keys():
        raise ValueError("a kernel, then AXIS=ROLE for axes of the mesh")
    return how


class _Replaced(_Part):
    """An op that a kernel replaces; `how` has the kernel and roles of mesh axes."""

    name: Name
    op: Count
    how: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(_known)]


def _are_once(groups: tuple[_Constrained, ...]) -> tuple[_Constrained, ...]:
    _check_once((v for group in groups for v in group.values), "value")
    _check_once((use for group in groups for use in group.uses), "use")
    return groups


class _Inside(_Part):
    """Constraints as files store them: values and uses are listed by sharding."""

    shardings: Annotated[tuple[_Constrained, ...], AfterValidator(_are_once)]
    rematerialized: tuple[_Recomputed, ...]
    replaced: tuple[_Replaced, ...]

    def constraints(self) -> Constraints:
        """Returns the constraints as `Plan.constraints`."""
        functions = ((one.name, one.op, (), Recorded(one.how)) for one in self.replaced)
        again = (Rematerialization(r.forward, r.backward) for r in self.rematerialized)
        return Constraints(
            {v: one.spec for one in self.shardings for v in one.values},
            {use: one.spec for one in self.shardings for use in one.uses},
            tuple(again),
            tuple(Replacement(*one) for one in functions),
        )


Inside = Annotated[Constraints, ReadAs(_Inside, _Inside.constraints)]
# A field of a plan in this process alone, which files do not have.
Local = Annotated[_Item | None, ReadAs(None)]

# ---------------------------------------------------------------------- the whole file


def constraints_to_json(constraints: Constraints) -> dict[str, Any]:
    """Converts constraints to JSON; see :class:`_Inside`."""
    groups: dict[Spec, dict[str, Any]] = {}
    for value, spec in sorted(constraints.values.items()):
        groups.setdefault(spec, {"values": [], "uses": []})["values"].append(value)
    for use, spec in sorted(constraints.uses.items()):
        groups.setdefault(spec, {"values": [], "uses": []})["uses"].append(use)
    replaced = {(one.name, one.op): one.functions.how for one in constraints.replaced}
    return {
        "shardings": [{"spec": spec, **members} for spec, members in groups.items()],
        "rematerialized": [asdict(one) for one in constraints.rematerialized],
        "replaced": [
            {"name": name, "op": op, "how": how} for (name, op), how in replaced.items()
        ],
    }


def file_text(plan: Any, here: Collection[str]) -> str:
    """Returns JSON for :func:`read_plan`, without fields `here` and infinite counts."""
    names = [one.name for one in fields(plan) if one.name not in here]
    data = {"format": FORMAT} | {name: getattr(plan, name) for name in names}
    # Unknown numbers are infinite, which JSON cannot store.
    data["search"] = {k: v for k, v in plan.search.items() if math.isfinite(v)}
    return json.dumps(data, indent=1, default=_plain)


def _plain(value: Any) -> Any:
    """Converts a dataclass (`Constraints`: grouped) or mapping to a dict; one level."""
    match value:
        case Constraints():
            return constraints_to_json(value)
        case Mapping():
            return dict(value)
    return {one.name: getattr(value, one.name) for one in fields(value)}


_adapter = cache(TypeAdapter)


def read_plan(
    kind: Callable[..., _Plan],
    data: Any,
    here: Collection[str],
    allowed_options: Collection[str] = (),
) -> _Plan:
    """Makes a plan of parsed JSON, and checks each field.

    Args:
        kind: the class of plans.
        here: names of fields that files do not have.
        allowed_options: compiler options to accept beside those known as harmless.

    Raises:
        PlanMismatch: the format is another; a field is wrong, missing or unknown; or a
            compiler option is not accepted.
    """
    number = data.get("format") if isinstance(data, dict) else None
    if type(number) is not int or number != FORMAT:
        raise PlanMismatch(
            f"Expected a plan of format {FORMAT}: this file is no plan, or is from "
            "another version of cfp. Plan again."
        )
    refused = refused_option(data.get("options", {}), allowed_options)
    if refused is not None:
        raise PlanMismatch(
            f"The plan has {refused}. Pass names of options that you trust to "
            "cfp.Plan.load(path, allowed_options=[...]), or plan again."
        )
    for one in fields(cast(Any, kind)):
        if one.name not in here and one.name not in data:
            raise _damaged(one.name, "this field", "nothing")
    try:
        return _adapter(kind).validate_python(
            {name: data[name] for name in data if name not in _BESIDE}, context={}
        )
    except ValidationError as error:
        raise _damaged(*first_error(error)) from None  # Its text lists each field.


def _damaged(where: str, expected: str, got: str) -> PlanMismatch:
    return PlanMismatch(
        f"The file is a damaged plan, in {where or 'its fields'}: expected {expected}, "
        f"got {got}. Use the file as cfp saved it, or plan again."
    )


def read_json(path: str | Path) -> Any:
    """Parses a plan's file.

    Raises:
        NoSuchFile: the file does not exist.
        PlanMismatch: the file cannot be read, is too large, or is not valid JSON.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"the file is larger than {_MOST_BYTES >> 20} MiB")
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except FileNotFoundError as error:
        raise NoSuchFile(
            f"There is no plan {path}. Write one with cfp plan TARGET -o {path}, or "
            f"plan.save({str(path)!r})."
        ) from error
    except (RecursionError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, RecursionError):
            reason = "the file is nested too deeply"
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            reason = f"the file is not JSON of plan.save or cfp plan -o: {reason}"
        raise PlanMismatch(
            f"Cannot read a plan from {path}: {reason}. Use a file as cfp saved it, or "
            "plan again."
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of JSON pairs; raises ValueError for a repeated field."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the file has the field {shown(twice)} twice")
    return found


def _no_number(name: str) -> Never:
    raise ValueError(f"{name} is no number in JSON")
