"""The file of a plan: its fields, and how they are checked when a file is read.

Each field has the type, range and references that it should, or the file is refused
with the first reason. Numbers of values and ops are checked when the plan meets the
step's program (:mod:`cfp.program.constrain`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from cfp.analysis.strategies import Spec
from cfp.attention.kernels import KERNELS
from cfp.errors import PlanMismatch
from cfp.fields import (
    Count,
    Flag,
    Name,
    Number,
    Rung,
    Time,
    Words,
    first_error,
    matching,
    shown,
)
from cfp.plan.figures import Figures
from cfp.plan.parts import (
    PlanRow,
    PlanSegment,
    Site,
    constraints_to_json,
    shape_of,
)
from cfp.profiling.compiler_options import refused_option
from cfp.program.constrain import Constraints
from cfp.program.fp8 import PRECISION
from cfp.program.outline import Outline
from cfp.program.rematerialize import Rematerialization
from cfp.program.replace import Recorded, Replacement
from cfp.race.programs import RaceRow
from cfp.settings import ConstraintLevel

if TYPE_CHECKING:
    from cfp.plan.plan import Plan

FORMAT = 12

_MOST_BYTES = 64 * 2**20  # The plan of 96 layers has one or two megabytes.
_MOST_AXES = 16
_MOST_DIMS = 64
_MOST_DEVICES = 2**20

_TYPE = r"[a-z][a-z0-9_]*(<[a-z0-9_]+>)?\[(\d{1,15}(,\d{1,15})*)?\]"
# What `--json` prints beside a plan; it is not read.
_BESIDE = frozenset({"explanation", "variants", "throughput"})

_Item = TypeVar("_Item")


def _mesh(info: ValidationInfo) -> dict[str, int]:
    """Returns the sizes of the mesh's axes, which `mesh_axes` puts there."""
    assert info.context is not None
    return info.context


def _on_mesh(spec: Spec, info: ValidationInfo) -> Spec:
    used, mesh = [name for names in spec for name in names], _mesh(info)
    if not mesh.keys() >= {*used} or len({*used}) < len(used):
        axes = shown([*mesh])
        raise ValueError(
            f"for each dim a list of axes of the mesh ({axes}), each of them once"
        )
    return spec


def _in_order(ops: tuple[int, ...]) -> tuple[int, ...]:
    if any(b <= a for a, b in pairwise(ops)):
        raise ValueError("numbers of ops, in their order")
    return ops


def _check_once(items: Iterable[_Item], what: str) -> None:
    seen = set()
    for item in items:
        if item in seen:
            raise ValueError(f"every {what} once, not {shown(item)} twice")
        seen.add(item)


_Axis = tuple[Name, Annotated[int, Field(strict=True, ge=2, le=_MOST_DEVICES)]]
_Spec = Annotated[
    tuple[tuple[str, ...], ...],
    Field(max_length=_MOST_DIMS),
    AfterValidator(_on_mesh),
]
_Ops = Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(_in_order)]


class _Part(BaseModel):
    """A part of the file, without other fields than its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Argument(_Part):
    """A leaf of the step's arguments."""

    path: Name
    type: Annotated[str, matching(_TYPE, "a type such as float32[8,16]")]
    spec: _Spec
    donated: Flag

    @field_validator("spec")
    @classmethod
    def _fits(cls, spec: Spec, info: ValidationInfo) -> Spec:
        kind = info.data.get("type", "[]")
        shape = shape_of(kind)
        # Inside of a program keys of random numbers have one dim more than JAX shows.
        hidden = 1 if "<" in kind else 0
        if not len(shape) <= len(spec) <= len(shape) + hidden:
            raise ValueError(f"{len(shape)} dims, for {kind}")
        for size, names in zip(shape, spec, strict=False):
            if size % math.prod(_mesh(info)[name] for name in names):
                raise ValueError(f"axes that divide the dims of {kind}")
        return spec


class _Constrained(_Part):
    """Values, and uses as (op, operand), that have one sharding."""

    spec: _Spec
    values: tuple[Count, ...]
    uses: tuple[tuple[Count, Count], ...]


class _Recomputed(_Part):
    """Ops that are rematerialized, and ops of the backward pass that read them."""

    forward: _Ops
    backward: _Ops


class _Replaced(_Part):
    """An op that another function takes the place of: a kernel, and its axes' roles."""

    name: Name
    op: Count
    how: Annotated[tuple[Name, ...], Field(min_length=1)]

    @field_validator("how")
    @classmethod
    def _known(cls, how: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not {word.rpartition("=")[0] for word in how[1:]} <= _mesh(info).keys():
            raise ValueError("a kernel, and what axes of the mesh do")
        return how


class PlanFile(_Part):
    """A cfp plan: how to shard a step on a mesh, and how that was found.

    Times are milliseconds, memory is bytes on one device.

    Attributes:
        format: version of this schema.
        fingerprint: identifies the program that was planned.
        arguments: leaves of the step's arguments, in order.
        output_specs: shardings of the results, leaf by leaf.
        constraints: shardings inside of the step.
        recompute: ops that the backward pass rematerializes.
        replaced: ops that kernels take the place of.
        winner: the candidate that won the race.
        predicted_ms, measured_ms: step time by the profiles, and in the race.
        peak_bytes, predicted_bytes: memory as compiled, and as predicted.
        rung: the source of the predictions.
        segments: the choice for each segment.
        uneven: tensors that axes do not divide.
        replicated_ops: ops that every device runs in full.
        host_callbacks_skipped: functions of the host that were not called while it
            was measured.
        environment: versions, devices and configuration.
        search: counts and seconds of the passes.
        static: static arguments, by position or name.
        figures: numbers that the plan was chosen by.
        outline: the program's operations.
        sites: constrained values by source line, for people.
        in_host: arguments and their results that are in the memory of the host between
            steps, by position.
        precision: "fp8" if large products are computed in FP8.
        products: numbers of 16-bit products by outcome and parameter, if FP8 was asked
            for.
        undonated: arguments that are there twice, by position.
        weak: donated arguments that are weakly typed, by position.
        site_checks: replaced parts that were refused, or not compared with the step.
        uncounted: loops of which one iteration is counted, and branches.
    """

    format: Literal[12]
    fingerprint: Annotated[str, matching("[0-9a-f]{64}", "64 hexadecimal digits")]
    mesh_axes: Annotated[tuple[_Axis, ...], Field(max_length=_MOST_AXES)]
    arguments: tuple[_Argument, ...]
    output_specs: tuple[_Spec, ...]
    constraints: tuple[_Constrained, ...]
    recompute: tuple[_Recomputed, ...]
    replaced: tuple[_Replaced, ...]
    winner: Words
    predicted_ms: Time | None
    measured_ms: Time | None
    peak_bytes: Count | None
    rung: Rung
    predicted_bytes: Count | None
    level: ConstraintLevel
    segments: tuple[PlanSegment, ...]
    rows: tuple[PlanRow, ...]
    uneven: tuple[Words, ...]
    replicated_ops: tuple[Words, ...]
    host_callbacks_skipped: tuple[Words, ...]
    race: tuple[RaceRow, ...]
    options: dict[str, str]
    environment: dict[Words, Words]
    search: dict[Words, Number]
    static: tuple[StrictInt | StrictStr, ...] | None
    figures: Figures | None
    outline: Outline | None
    sites: tuple[Site, ...]
    in_host: tuple[tuple[Count, Count], ...] = ()
    precision: Annotated[str, matching(f"({PRECISION})?", "fp8, or empty")] = ""
    products: dict[Words, dict[str, Count]] = {}
    undonated: tuple[Count, ...] = ()
    weak: tuple[Count, ...] = ()
    uncounted: tuple[Words, ...] = ()
    site_checks: tuple[Words, ...] = ()

    @field_validator("mesh_axes")
    @classmethod
    def _is_mesh(cls, axes: tuple[_Axis, ...], info: ValidationInfo) -> Any:
        # Quotes would end the name in the text of a program.
        names = [name for name, _ in axes]
        if not all(names) or len({*names}) < len(names) or {*'"\\'} & {*"".join(names)}:
            raise ValueError("each axis by a name of its own")
        if math.prod(size for _, size in axes) > _MOST_DEVICES:
            raise ValueError(f"axes of up to {_MOST_DEVICES} devices together")
        _mesh(info).update(axes)
        return axes

    @field_validator("constraints")
    @classmethod
    def _are_once(cls, groups: tuple[_Constrained, ...]) -> tuple[_Constrained, ...]:
        _check_once((v for group in groups for v in group.values), "value")
        _check_once((use for group in groups for use in group.uses), "use")
        return groups

    @field_validator("segments")
    @classmethod
    def _are_known(
        cls, segments: tuple[PlanSegment, ...], info: ValidationInfo
    ) -> tuple[PlanSegment, ...]:
        count = len(info.data.get("arguments", ()))
        stored = [one.argument for segment in segments for one in segment.parameters]
        if len({*stored}) < len(stored) or not all(i < count for i in stored):
            raise ValueError("every parameter once, of the arguments there are")
        owned = {one for segment in segments for one in segment.parameters}
        for segment in segments:
            shared = {*segment.shared}
            if segment.parameters and shared:
                raise ValueError("nothing shared beside parameters of its own")
            if len(shared) < len(segment.shared) or not shared <= owned:
                raise ValueError("each shared parameter once, as its segment stores it")
        if not {segment.kernels.attention for segment in segments} <= {"", *KERNELS}:
            raise ValueError(f"kernels of attention: {', '.join(KERNELS)}")
        return segments

    @field_validator("rows")
    @classmethod
    def _are_blocks(
        cls, rows: tuple[PlanRow, ...], info: ValidationInfo
    ) -> tuple[PlanRow, ...]:
        _check_once((row.block for row in rows), "block")
        count = len(info.data.get("segments", ()))
        if not all(row.segment < count for row in rows):
            raise ValueError(f"blocks of the {count} segments there are")
        for row in rows:
            _on_mesh((tuple(one.axis for one in row.strategy),), info)
        return rows

    @field_validator("in_host")
    @classmethod
    def _are_leaves(
        cls, pairs: tuple[tuple[int, int], ...], info: ValidationInfo
    ) -> tuple[tuple[int, int], ...]:
        sides = zip(*pairs, strict=True)
        for side, leaves in zip(sides, ("arguments", "output_specs"), strict=False):
            count = len(info.data.get(leaves, ()))
            if len({*side}) < len(side) or not all(i < count for i in side):
                raise ValueError("every argument and result once, of those there are")
        return pairs

    @field_validator("undonated", "weak")
    @classmethod
    def _are_there(
        cls, positions: tuple[int, ...], info: ValidationInfo
    ) -> tuple[int, ...]:
        if max(positions, default=-1) >= len(info.data.get("arguments", ())):
            raise ValueError("arguments, of those there are")
        return positions

    @field_validator("static")
    @classmethod
    def _are_arguments(cls, static: tuple[int | str, ...] | None) -> Any:
        for key in static or ():
            if not (key.isprintable() if isinstance(key, str) else 0 <= key < 1000):
                raise ValueError("printable names, and positions from 0 to 999")
        _check_once(static or (), "argument")
        return static


def plan_data(plan: Plan) -> dict[str, Any]:
    """Returns the fields of a plan's file, as :func:`plan_fields` reads them again."""
    leaves = plan.arg_names, plan.arg_types, plan.arg_specs, plan.donated
    inside = plan.constraints
    replaced = {(one.name, one.op): one.functions.how for one in inside.replaced}
    data = {
        "format": FORMAT,
        "arguments": [
            {"path": name, "type": kind, "spec": spec, "donated": donated}
            for name, kind, spec, donated in zip(*leaves, strict=True)
        ],
        "constraints": constraints_to_json(inside),
        "recompute": inside.rematerialized,
        "replaced": [
            {"name": name, "op": op, "how": how} for (name, op), how in replaced.items()
        ],
        # What was never found out is infinite, and JSON has no word for that.
        "search": {k: v for k, v in plan.search.items() if math.isfinite(v)},
    }
    fields = PlanFile.model_fields
    return {
        name: data[name] if name in data else getattr(plan, name) for name in fields
    }


def plan_fields(data: Any, allowed_options: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of a plan from parsed JSON, each of them checked.

    Args:
        allowed_options: compiler options that the caller trusts besides the known ones.

    Raises:
        PlanMismatch: there is anything else in it than a plan's file has.
    """
    kind = data.get("format") if isinstance(data, dict) else None
    if type(kind) is not int or kind != FORMAT:
        raise PlanMismatch(
            f"Expected a plan of format {FORMAT}; this file is something else, or "
            "was written by another version of cfp. Plan again."
        )
    refused = refused_option(data.get("options", {}), allowed_options)
    if refused is not None:
        raise _damaged(
            "options", "compiler options that are known to be harmless", refused
        )
    try:
        file = PlanFile.model_validate(
            {name: data[name] for name in data if name not in _BESIDE}, context={}
        )
    except ValidationError as error:
        raise _damaged(*first_error(error)) from None  # It lists each field.
    fields = dict(file)
    for name in ("format", "arguments", "recompute", "replaced"):
        del fields[name]
    return fields | {
        "arg_names": tuple(one.path for one in file.arguments),
        "arg_types": tuple(one.type for one in file.arguments),
        "arg_specs": tuple(one.spec for one in file.arguments),
        "donated": tuple(one.donated for one in file.arguments),
        "constraints": Constraints(
            {v: one.spec for one in file.constraints for v in one.values},
            {use: one.spec for one in file.constraints for use in one.uses},
            tuple(Rematerialization(*dict(one).values()) for one in file.recompute),
            tuple(
                Replacement(one.name, one.op, (), Recorded(one.how))
                for one in file.replaced
            ),
        ),
    }


def _damaged(where: str, expected: str, got: str) -> PlanMismatch:
    return PlanMismatch(
        f"The file is a damaged plan, in {where or 'its fields'}: expected {expected}, "
        f"got {got}. Take the plan as cfp saved it, or plan again."
    )


def read_json(path: str | Path) -> Any:
    """Parses a plan's file.

    Raises:
        PlanMismatch: it cannot be read, is too large, or is not JSON as plans are.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError as error:
        reason = "it is nested too deeply"
        raise PlanMismatch(f"Cannot read a plan from {path}: {reason}.") from error
    except json.JSONDecodeError as error:
        reason = f"it is not JSON, as plan.save and cfp plan -o write it: {error}"
        raise PlanMismatch(f"Cannot read a plan from {path}: {reason}") from error
    except FileNotFoundError as error:
        raise PlanMismatch(
            f"Cannot read a plan from {path}: there is no such file. Write one with "
            f"cfp plan TARGET -o {path}, or plan.save({str(path)!r})."
        ) from error
    except OSError as error:
        reason = error.strerror or error
        raise PlanMismatch(f"Cannot read a plan from {path}: {reason}") from error
    except ValueError as error:
        raise PlanMismatch(f"Cannot read a plan from {path}: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of which no field stands there twice: which one would count?"""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the field {shown(twice)} twice")
    return found


def _no_number(name: str) -> Never:
    raise ValueError(f"{name} is no number of JSON's")
