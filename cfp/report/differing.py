"""In what two plans differ: figures, shardings of arguments, blocks, options."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cfp.analysis.strategies import Spec
from cfp.plan.plan import Plan
from cfp.plan.text import STORAGE_WORDS, merged_name
from cfp.plan.words import elided
from cfp.report.told import wrapped
from cfp.units import format_bytes

# Versions and devices are told in full; nobody compares drivers' details by eye.
_NOTHING = "-"


def diff_data(first: Plan, second: Plan) -> dict[str, Any]:
    """The differences as plain data: of each, what it is in both plans."""
    return {
        "figures": _unlike(_figures(first), _figures(second)),
        "program": _unlike(_program(first), _program(second)),
        "environment": _unlike(first.environment, second.environment),
        "options": _unlike(first.options, second.options),
        "arguments": _unlike(_arguments(first), _arguments(second)),
        "blocks": _unlike(_blocks(first), _blocks(second)),
        "collectives": _unlike(_collectives(first), _collectives(second)),
    }


def diff_text(
    first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")
) -> str:
    """The differences in at most 100 columns; those of repeated layers stand once."""
    found = diff_data(first, second)
    lines = [f"{names[0]} -> {names[1]}"]
    titles = {
        "figures": "Figures",
        "program": "Program and mesh",
        "environment": "Versions and devices",
        "options": "Compiler options",
        "arguments": "Arguments, by how each dim is sharded",
        "blocks": "Blocks",
        "collectives": "Collectives (bytes of all blocks together)",
    }
    for part, title in titles.items():
        if found[part]:
            lines += ["", title, *_lines(found[part])]
    if len(lines) == 1:
        lines.append("The plans do not differ.")
    return "\n".join(map(wrapped, lines)) + "\n"


def _lines(changes: Mapping[str, Sequence[str | None]]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, (before, after) in changes.items():
        pair = (before or _NOTHING, after or _NOTHING)
        groups.setdefault(pair, []).append(name)
    for (before, after), members in groups.items():
        for name in _merged(members):
            yield f"  {elided(name)}: {before} -> {after}"


def _merged(names: Sequence[str]) -> list[str]:
    """Names that differ in numbers alone as one: ``layer_0-3/up``."""
    alike: dict[str, list[str]] = {}
    for name in names:
        letters = "".join("#" if c.isdigit() else c for c in name)
        while "##" in letters:
            letters = letters.replace("##", "#")
        alike.setdefault(letters, []).append(name)
    return [merged_name(group) for group in alike.values()]


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
        ("predicted", plan.predicted_ms),
    ):
        if value is not None:
            found[name] = f"{value:.3f} ms"
    if plan.peak_bytes:
        found["memory on each device"] = format_bytes(plan.peak_bytes)
    return found


def _program(plan: Plan) -> dict[str, str]:
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh_axes)
    return {"program": plan.fingerprint[:12], "mesh": mesh}


def spec_text(spec: Spec) -> str:
    """A sharding as a PartitionSpec's entries: ``None, x``."""
    dims = ["+".join(names) or "None" for names in spec]
    return ", ".join(dims) if any(spec) else "replicated"


def _arguments(plan: Plan) -> dict[str, str]:
    return {
        name: f"{kind} {spec_text(spec)}"
        for name, kind, spec in zip(
            plan.arg_names, plan.arg_types, plan.arg_specs, strict=True
        )
    }


def _blocks(plan: Plan) -> dict[str, str]:
    found: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for row in plan.rows:
        seen[row.name] += 1
        again = f" ({seen[row.name]})" if seen[row.name] > 1 else ""
        stored = STORAGE_WORDS.get(row.storage, row.storage)
        found[row.name + again] = f"{row.sharded}; parameters {stored}"
    return found


def _collectives(plan: Plan) -> dict[str, str]:
    totals: Counter[tuple[str, str]] = Counter()
    times: defaultdict[tuple[str, str], float] = defaultdict(float)
    unknown: set[tuple[str, str]] = set()
    for block in plan.figures.blocks if plan.figures else ():
        for move in block.moves:
            key = (move.kind, ",".join(move.axes))
            totals[key] += move.total_bytes
            times[key] += move.time_ms or 0.0
            if move.time_ms is None:
                unknown.add(key)
    return {
        f"{kind} over {axes}": format_bytes(size)
        + ("" if (kind, axes) in unknown else f", {times[kind, axes]:.3f} ms")
        for (kind, axes), size in totals.items()
    }
