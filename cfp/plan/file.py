"""Reads plans from files, and trusts nothing that stands in them.

Each field has the type, range and references that it should, or the file is refused
with the first reason. Numbers of values and ops are checked when the plan meets the
step's program (:mod:`cfp.program.misfit`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any, Never, TypeVar

from cfp.analysis.strategies import Spec
from cfp.errors import PlanFileError, compose
from cfp.plan.figures import figures_from_json
from cfp.plan.json_text import read_json as read_json
from cfp.plan.json_text import shown as _shown
from cfp.plan.parts import PlanRow
from cfp.plan.sites import sites_from_json
from cfp.printable import printable
from cfp.profiling.compiler_options import refused_option
from cfp.program.graft import Constraints
from cfp.program.outline import outline_from_json
from cfp.program.rematerialize import Rematerialization
from cfp.program.replace import Recorded, Replacement
from cfp.race.programs import RaceRow

FORMAT = 3

_MOST_CHARACTERS = 10_000
_MOST_AXES = 16
_MOST_DIMS = 64
_MOST_DEVICES = 2**20
_MOST_COUNT = 2**53  # What JSON holds exactly.

_TYPE = re.compile(r"[a-z][a-z0-9_]*(<[a-z0-9_]+>)?\[(\d{1,15}(?:,\d{1,15})*)?\]")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset(
    "format fingerprint mesh_axes arguments output_specs constraints recompute "
    "replaced winner predicted_ms measured_ms peak_bytes rung predicted_bytes rows "
    "uneven whole silenced race options environment search static figures outline "
    "sites in_host".split()
)
_OPTIONAL = frozenset(
    "uneven whole silenced rung predicted_bytes replaced outline in_host".split()
)
RUNGS = ("estimated", "one device", "measured")
# What `--json` prints beside a plan; it is not read.
_BESIDE = frozenset({"explanation", "variants", "throughput"})

_Mesh = Mapping[str, int]
_Part = TypeVar("_Part")


def plan_fields(data: Any, allowed_options: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a plan from parsed JSON, each of them checked.

    Args:
        data: what :func:`read_json` returns.
        allowed_options: compiler options that the caller trusts besides the known ones.

    Raises:
        PlanFileError: there is anything else in it than a plan's file has.
    """
    kind = data.get("format") if isinstance(data, dict) else None
    if type(kind) is not int or kind != FORMAT:
        raise PlanFileError(
            f"Expected a plan of format {FORMAT}; this file is something else, or "
            "was written by another version of cfp. Plan again."
        )
    found = [f"no {name}" for name in sorted(_FIELDS - _OPTIONAL - data.keys())]
    found += sorted(map(_shown, data.keys() - _FIELDS - _BESIDE))
    if found:
        _refuse("the fields of a plan", ", ".join(found[:3]), "")
    mesh = _mesh(data["mesh_axes"])
    arguments = [
        _argument(one, mesh, f"arguments[{i}]")
        for i, one in enumerate(_list(data["arguments"], "arguments"))
    ]
    refused = refused_option(data["options"], allowed_options)
    if refused is not None:
        _refuse("compiler options that are known to be harmless", refused, "options")
    return {
        "fingerprint": _fingerprint(data["fingerprint"]),
        "mesh_axes": tuple(mesh.items()),
        "arg_names": tuple(one[0] for one in arguments),
        "arg_types": tuple(one[1] for one in arguments),
        "arg_specs": tuple(one[2] for one in arguments),
        "donated": tuple(one[3] for one in arguments),
        "output_specs": tuple(
            _spec(spec, mesh, f"output_specs[{i}]")
            for i, spec in enumerate(_list(data["output_specs"], "output_specs"))
        ),
        "constraints": _constraints(
            data["constraints"], data["recompute"], data.get("replaced", []), mesh
        ),
        "winner": _words(data["winner"], "winner"),
        "predicted_ms": _time(data["predicted_ms"], "predicted_ms"),
        "measured_ms": _time(data["measured_ms"], "measured_ms"),
        "peak_bytes": None
        if data["peak_bytes"] is None
        else _count(data["peak_bytes"], "peak_bytes"),
        "rung": _rung(data.get("rung", "measured")),
        "predicted_bytes": None
        if data.get("predicted_bytes") is None
        else _count(data["predicted_bytes"], "predicted_bytes"),
        "rows": tuple(
            _row(row, f"rows[{i}]") for i, row in enumerate(_list(data["rows"], "rows"))
        ),
        "uneven": _all_words(data.get("uneven", []), "uneven"),
        "whole": _all_words(data.get("whole", []), "whole"),
        "silenced": _all_words(data.get("silenced", []), "silenced"),
        "race": tuple(
            _race_row(row, f"race[{i}]")
            for i, row in enumerate(_list(data["race"], "race"))
        ),
        "options": dict(data["options"]),
        "environment": {
            _words(name, "environment"): _words(value, f"environment.{_shown(name)}")
            for name, value in _object(data["environment"], "environment").items()
        },
        "search": {
            _words(name, "search"): _number(value, f"search.{_shown(name)}")
            for name, value in _object(data["search"], "search").items()
        },
        "in_host": _in_host(
            data.get("in_host", []), len(arguments), len(data["output_specs"])
        ),
        "static": _static(data["static"]),
        "figures": _read(figures_from_json, data["figures"], "figures"),
        "outline": _read(outline_from_json, data.get("outline"), "outline"),
        "sites": _read(sites_from_json, data["sites"], "sites"),
    }


def _read(reader: Callable[[Any], _Part], value: Any, where: str) -> _Part | None:
    """A part that has a reader of its own, which raises what is wrong with it."""
    try:
        return None if value is None else reader(value)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        _refuse("what cfp saves there", f"{type(error).__name__}: {error}"[:200], where)


# ------------------------------------------------------------------------------- JSON


def _refuse(expected: str, got: str, where: str) -> Never:
    raise PlanFileError(
        compose(
            "The file is a damaged plan" + (f", in {where}." if where else "."),
            expected=expected,
            got=got,
            attempt="a plan as cfp saved it, or plan again",
        )
    )


# ------------------------------------------------------------------------ plain values


def _object(value: Any, where: str, names: Collection[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse("an object", _shown(value), where)
    if names and value.keys() != set(names):
        _refuse(f"the fields {', '.join(sorted(names))}", _shown(sorted(value)), where)
    return value


def _list(value: Any, where: str, length: int | None = None) -> list[Any]:
    # What never was a file may have tuples.
    if not isinstance(value, list | tuple):
        _refuse("a list", _shown(value), where)
    if length is not None and len(value) != length:
        _refuse(f"a list of {length}", _shown(value), where)
    return list(value)


def _count(value: Any, where: str, least: int = 0, most: int = _MOST_COUNT) -> int:
    # A bool is an int to Python.
    if type(value) is not int or not least <= value <= most:
        _refuse(f"a whole number from {least} to {most}", _shown(value), where)
    return value


def _number(value: Any, where: str) -> float:
    if type(value) is int and abs(value) <= _MOST_COUNT:
        return value
    if type(value) is not float or not math.isfinite(value):
        _refuse("a finite number", _shown(value), where)
    return value


def _time(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if (found := _number(value, where)) < 0:
        _refuse("a time of 0 or more, or null", _shown(value), where)
    return found


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        _refuse(f"text of up to {_MOST_CHARACTERS} characters", _shown(value), where)
    return value


def _rung(value: Any, where: str = "rung") -> str:
    if value not in RUNGS:
        _refuse(f"one of {', '.join(RUNGS)}", _shown(value), where)
    return str(value)


def _words(value: Any, where: str) -> str:
    """Text for people, without what a terminal would take for commands."""
    return printable(_text(value, where))


def _all_words(value: Any, where: str) -> tuple[str, ...]:
    return tuple(
        _words(one, f"{where}[{i}]") for i, one in enumerate(_list(value, where))
    )


def _name(value: Any, where: str) -> str:
    """Text that has to be the same elsewhere, so that nothing may be replaced."""
    if not _text(value, where).isprintable():
        _refuse("text of printable characters", _shown(value), where)
    return value


# ----------------------------------------------------------------------- parts of plans


def _fingerprint(value: Any) -> str:
    if not isinstance(value, str) or not _FINGERPRINT.fullmatch(value):
        _refuse(
            "64 hexadecimal digits that tell the program", _shown(value), "fingerprint"
        )
    return value


def _mesh(value: Any) -> dict[str, int]:
    mesh: dict[str, int] = {}
    for i, axis in enumerate(_list(value, "mesh_axes")):
        where = f"mesh_axes[{i}]"
        name, size = _list(axis, where, 2)
        # Quotes would end the name in the text of a program.
        if not _name(name, where) or name in mesh or {'"', "\\"} & {*name}:
            _refuse("each axis by a name of its own", _shown(name), where)
        mesh[name] = _count(size, where, 2, _MOST_DEVICES)
    if not 0 < len(mesh) <= _MOST_AXES or math.prod(mesh.values()) > _MOST_DEVICES:
        _refuse(
            f"1 to {_MOST_AXES} axes, of up to {_MOST_DEVICES} devices together",
            _shown(mesh),
            "mesh_axes",
        )
    return mesh


def _spec(value: Any, mesh: _Mesh, where: str) -> Spec:
    spec = tuple(tuple(_list(names, where)) for names in _list(value, where))
    used = [name for names in spec for name in names]
    known = all(isinstance(name, str) and name in mesh for name in used)
    if not known or len(set(used)) < len(used) or len(spec) > _MOST_DIMS:
        _refuse(
            f"for each dim a list of axes of the mesh ({_shown([*mesh])}), each of "
            "them once",
            _shown(value),
            where,
        )
    return spec


def _argument(value: Any, mesh: _Mesh, where: str) -> tuple[str, str, Spec, bool]:
    data = _object(value, where, ("path", "type", "spec", "donated"))
    kind = data["type"]
    match = _TYPE.fullmatch(kind) if isinstance(kind, str) else None
    if match is None or match[0] != kind:
        _refuse("a type such as float32[8,16]", _shown(kind), f"{where}.type")
    spec = _spec(data["spec"], mesh, f"{where}.spec")
    shape = [int(size) for size in match[2].split(",")] if match[2] else []
    # Inside of a program keys of random numbers have one dim more than JAX shows.
    hidden = 1 if match[1] else 0
    if not len(shape) <= len(spec) <= len(shape) + hidden:
        _refuse(f"{len(shape)} dims, for {kind}", _shown(data["spec"]), f"{where}.spec")
    for size, names in zip(shape, spec, strict=False):
        if size % math.prod(mesh[name] for name in names):
            _refuse(
                f"axes that divide the dims of {kind}",
                _shown(data["spec"]),
                f"{where}.spec",
            )
    if type(data["donated"]) is not bool:
        _refuse("true or false", _shown(data["donated"]), f"{where}.donated")
    return _name(data["path"], f"{where}.path"), kind, spec, data["donated"]


def _in_host(value: Any, arguments: int, results: int) -> tuple[tuple[int, int], ...]:
    found = []
    for i, pair in enumerate(_list(value, "in_host")):
        where = f"in_host[{i}]"
        argument, result = _list(pair, where, 2)
        found.append(
            (
                _count(argument, where, 0, arguments - 1),
                _count(result, where, 0, results - 1),
            )
        )
    sides = [*zip(*found, strict=True)] if found else []
    if any(len(set(side)) < len(side) for side in sides):
        _refuse("every argument and result once", _shown(value), "in_host")
    return tuple(found)


def _constraints(
    groups: Any, recompute: Any, replaced: Any, mesh: _Mesh
) -> Constraints:
    values: dict[int, Spec] = {}
    uses: dict[tuple[int, int], Spec] = {}
    for i, group in enumerate(_list(groups, "constraints")):
        where = f"constraints[{i}]"
        data = _object(group, where, ("spec", "values", "uses"))
        spec = _spec(data["spec"], mesh, f"{where}.spec")
        for value in _list(data["values"], f"{where}.values"):
            if _count(value, f"{where}.values") in values:
                _refuse("every value once", _shown(value), f"{where}.values")
            values[value] = spec
        for pair in _list(data["uses"], f"{where}.uses"):
            op, index = _list(pair, f"{where}.uses", 2)
            use = _count(op, f"{where}.uses"), _count(index, f"{where}.uses")
            if use in uses:
                _refuse("every use once", _shown(pair), f"{where}.uses")
            uses[use] = spec
    again = []
    for i, one in enumerate(_list(recompute, "recompute")):
        where = f"recompute[{i}]"
        data = _object(one, where, ("forward", "backward"))
        again.append(Rematerialization(*(_ops(data[n], f"{where}.{n}") for n in data)))
    others = tuple(
        _replacement(one, mesh, f"replaced[{i}]")
        for i, one in enumerate(_list(replaced, "replaced"))
    )
    return Constraints(values, uses, tuple(again), others)


def _replacement(value: Any, mesh: _Mesh, where: str) -> Replacement:
    data = _object(value, where, ("name", "op", "how"))
    how = tuple(_name(word, f"{where}.how") for word in _list(data["how"], where))
    if not how or not {word.rpartition("=")[0] for word in how[1:]} <= mesh.keys():
        _refuse("a kernel, and what axes of the mesh do", _shown(data["how"]), where)
    op = _count(data["op"], f"{where}.op")
    return Replacement(_name(data["name"], where), op, (), Recorded(how))


def _ops(value: Any, where: str) -> tuple[int, ...]:
    found = tuple(_count(op, where) for op in _list(value, where))
    if not found or any(b <= a for a, b in pairwise(found)):
        _refuse("numbers of ops, in their order", _shown(value), where)
    return found


def _row(value: Any, where: str) -> PlanRow:
    counts, times = ("block", "segment", "kind"), ("segment_ms",)
    words = ("name", "op", "sharded", "storage", "collectives")
    data = {"repeats": None, **_object(value, where)}
    data = _object(data, where, (*counts, *words, *times, "repeats"))
    fields: dict[str, Any] = {n: _count(data[n], f"{where}.{n}") for n in counts}
    fields |= {n: _words(data[n], f"{where}.{n}") for n in words}
    fields |= {n: _time(data[n], f"{where}.{n}") for n in times}
    if data["repeats"] is not None:
        fields["repeats"] = _count(data["repeats"], f"{where}.repeats", 1)
    return PlanRow(**fields)


def _race_row(value: Any, where: str) -> RaceRow:
    names = "name predicted_ms samples_ms time_ms peak_bytes note rung".split()
    data = _object({"rung": "measured", **_object(value, where)}, where, names)
    samples = []
    for sample in _list(data["samples_ms"], f"{where}.samples_ms"):
        time_ms = _time(sample, f"{where}.samples_ms")
        if time_ms is None:
            _refuse("times", _shown(sample), f"{where}.samples_ms")
        samples.append(time_ms)
    return RaceRow(
        name=_words(data["name"], f"{where}.name"),
        predicted_ms=_time(data["predicted_ms"], f"{where}.predicted_ms"),
        samples_ms=tuple(samples),
        time_ms=_time(data["time_ms"], f"{where}.time_ms"),
        peak_bytes=_count(data["peak_bytes"], f"{where}.peak_bytes"),
        note=_words(data["note"], f"{where}.note"),
        rung=_rung(data["rung"], f"{where}.rung"),
    )


def _static(value: Any) -> tuple[int | str, ...] | None:
    if value is None:
        return None
    found = [
        _name(key, "static") if isinstance(key, str) else _count(key, "static", 0, 999)
        for key in _list(value, "static")
    ]
    if len(set(found)) < len(found):
        _refuse("every argument once", _shown(value), "static")
    return tuple(found)
