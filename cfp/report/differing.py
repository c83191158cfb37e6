"""In what two plans differ: figures, shardings of arguments, blocks, options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cfp.analysis.strategies import Spec
from cfp.plan.plan import Plan
from cfp.plan.text import Detail, roles_text, storage_text
from cfp.plan.words import basis_text, elided
from cfp.printable import merged_alike
from cfp.report.explain_plan import wrapped
from cfp.units import format_bytes

# Versions and devices are shown in full, drivers' details are not.
_NOTHING = "-"
_NAMES_SHOWN = 4


def diff_data(first: Plan, second: Plan) -> dict[str, Any]:
    """The differences as plain data: of each, what it is in both plans."""
    return {
        "figures": _unlike(_figures(first), _figures(second)),
        "program": _unlike(_program(first), _program(second)),
        "environment": _unlike(first.environment, second.environment),
        "options": _unlike(first.options, second.options),
        "sizes": {
            name: pair
            for name, pair in _unlike(_types(first), _types(second)).items()
            if None not in pair
        },
        "arguments": _unlike(_arguments(first), _arguments(second)),
        "blocks": _unlike(_blocks(first), _blocks(second)),
        "collectives": _unlike(*_collectives_of_both(first, second)),
    }


def diff_text(
    first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")
) -> str:
    """The differences, folded; those of repeated layers stand once."""
    found = diff_data(first, second)
    lines = [f"{names[0]} -> {names[1]}"]
    titles = {
        "figures": "Figures",
        "program": "Program and mesh",
        "environment": "Versions and devices",
        "options": "Compiler options",
        "sizes": "Arguments of other types or sizes",
        "arguments": "Arguments, by how each dim is sharded",
        "blocks": "Blocks",
        "collectives": "Collectives (bytes of all blocks together)",
    }
    for part, title in titles.items():
        if found[part]:
            folded = _resized(found[part]) if part == "sizes" else _lines(found[part])
            lines += ["", title, *folded]
    if len(lines) == 1:
        lines.append("The plans do not differ.")
    return "\n".join(map(wrapped, lines)) + "\n"


def _lines(changes: Mapping[str, Sequence[str | None]]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, (before, after) in changes.items():
        pair = (before or _NOTHING, after or _NOTHING)
        groups.setdefault(pair, []).append(name)
    for (before, after), members in groups.items():
        names = [elided(name) for name in merged_alike(members)]
        for name in names[:_NAMES_SHOWN]:
            yield f"  {name}: {before} -> {after}"
        if len(names) > _NAMES_SHOWN:
            more = len(names) - _NAMES_SHOWN
            yield f"  and {more} more, also {before} -> {after} (--json lists all)"


def _resized(changes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Arguments of which the same dims have other sizes, as with another batch."""
    alike: dict[str, list[str]] = {}
    for name, (before, after) in changes.items():
        (kind, sizes), (other, others) = map(_type_parts, (before, after))
        pairs = list(zip(sizes, others, strict=False))
        dims = [(d, *pair) for d, pair in enumerate(pairs) if pair[0] != pair[1]]
        what = ", ".join(f"dim {d}: {one} -> {two}" for d, one, two in dims)
        if kind != other or len(sizes) != len(others):
            what = f"{before} -> {after}"
        alike.setdefault(what, []).append(name)
    for what, names in alike.items():
        merged = [elided(name) for name in merged_alike(names)]
        more = len(merged) - _NAMES_SHOWN
        rest = f" and {more} more (--json lists all)" if more > 0 else ""
        yield f"  {what}: {', '.join(merged[:_NAMES_SHOWN])}{rest}"


def _type_parts(text: str) -> tuple[str, list[str]]:
    """``float32[8,16]`` as the type and its sizes."""
    kind, _, dims = text.rstrip("]").partition("[")
    return kind, dims.split(",") if dims else []


def _unlike(
    first: Mapping[str, str], second: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    return {
        name: (first.get(name), second.get(name))
        for name in [*first, *(name for name in second if name not in first)]
        if first.get(name) != second.get(name)
    }


def _figures(plan: Plan) -> dict[str, str]:
    found = {"plan": plan.winner}
    for name, value in (
        ("measured", plan.measured_ms),
        (f"predicted {basis_text(plan)}", plan.predicted_ms),
    ):
        if value is not None:
            found[name] = f"{value:.3f} ms"
    if plan.peak_bytes:
        found["memory on each device"] = format_bytes(plan.peak_bytes)
    return found


def _program(plan: Plan) -> dict[str, str]:
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh_axes)
    level = str(plan.level)
    return {"program": plan.fingerprint[:12], "mesh": mesh, "constraint level": level}


def spec_text(spec: Spec) -> str:
    """A sharding as a PartitionSpec's entries: ``None, x``."""
    dims = ["+".join(names) or "None" for names in spec]
    return ", ".join(dims) if any(spec) else "replicated"


def _types(plan: Plan) -> dict[str, str]:
    return dict(zip(plan.arg_names, plan.arg_types, strict=True))


def _arguments(plan: Plan) -> dict[str, str]:
    specs = zip(plan.arg_names, plan.arg_specs, strict=True)
    return {name: spec_text(spec) for name, spec in specs}


def _blocks(plan: Plan) -> dict[str, str]:
    found: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for row in plan.rows:
        seen[row.name] += 1
        again = f" ({seen[row.name]})" if seen[row.name] > 1 else ""
        stored = storage_text(plan.segments[row.segment])
        sharded = roles_text(row.strategy, Detail.DIMS)
        found[row.name + again] = f"{sharded}; parameters {stored}"
    return found


# For each kind over some axes the bytes, and the time where it is known.
_Sent = dict[str, tuple[int, float | None]]


def _collectives_of_both(first: Plan, second: Plan) -> tuple[dict, dict]:
    """Lists the collectives of both plans; empty if one of them does not list any."""
    if first.figures is None or second.figures is None:
        return {}, {}
    one, two = _collectives(first), _collectives(second)
    timed = all(ms is not None for sent in (one, two) for _, ms in sent.values())
    return _sent_texts(one, timed), _sent_texts(two, timed)


def _sent_texts(sent: _Sent, timed: bool) -> dict[str, str]:
    return {
        name: format_bytes(size) + (f", {ms:.3f} ms" if timed else "")
        for name, (size, ms) in sent.items()
    }


def _collectives(plan: Plan) -> _Sent:
    found: _Sent = {}
    for block in plan.figures.blocks if plan.figures else ():
        for move in block.moves:
            name = f"{move.kind} over {','.join(move.axes)}"
            size, ms = found.get(name, (0, 0.0))
            known = None if ms is None or move.time_ms is None else ms + move.time_ms
            found[name] = size + move.total_bytes, known
    return found
