"""The differences of two plans, as text and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cfp.analysis.strategies import Spec
from cfp.plan.parts import Detail, roles_text
from cfp.plan.plan import Plan
from cfp.printable import merged_alike, mesh_text
from cfp.units import format_bytes
from cfp.view import words
from cfp.view.console import wrapped
from cfp.view.rows import merged_moves
from cfp.view.words import elided

_MOST_CHANGES = 4


def diff_data(first: Plan, second: Plan) -> dict[str, Any]:
    """The differences as plain data: of each, what it is in both plans."""
    one, two = _facts(first), _facts(second)
    found = {part: _unlike(one[part], two[part]) for part in one}
    sizes = found["Arguments of other types or sizes"]
    found["Arguments of other types or sizes"] = {
        name: pair for name, pair in sizes.items() if None not in pair
    }
    return found


def diff_text(
    first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")
) -> str:
    """The differences, folded; those of repeated layers stand once."""
    lines = [f"{names[0]} -> {names[1]}"]
    for title, changes in diff_data(first, second).items():
        lines += ["", title, *_lines(changes)] if changes else []
    if len(lines) == 1:
        lines.append("The plans do not differ.")
    return "\n".join(map(wrapped, lines)) + "\n"


def _lines(changes: Mapping[str, Sequence[str | None]]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, (before, after) in changes.items():
        groups.setdefault((before or "-", after or "-"), []).append(name)
    for (before, after), members in groups.items():
        names = [elided(name) for name in merged_alike(members)]
        for name in names[:_MOST_CHANGES]:
            yield f"  {name}: {before} -> {after}"
        if len(names) > _MOST_CHANGES:
            more = len(names) - _MOST_CHANGES
            yield f"  and {more} more, also {before} -> {after} (--json lists all)"


def _unlike(
    first: Mapping[str, str], second: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    return {
        name: (first.get(name), second.get(name))
        for name in {**first, **second}
        # An empty value reads as one that is not there.
        if (first.get(name) or None) != (second.get(name) or None)
    }


def _facts(plan: Plan) -> dict[str, Mapping[str, str]]:
    """Facts about a plan by part, each with its name."""
    times = {"measured": plan.measured_ms}
    times[f"predicted {words.basis_text(plan)}"] = plan.predicted_ms
    return {
        "Figures": {
            "plan": plan.winner,
            **{name: f"{ms:.3f} ms" for name, ms in times.items() if ms is not None},
            "memory": words.memory_text(plan),
        },
        "Program and mesh": {
            "program": plan.fingerprint[:12],
            "mesh": mesh_text(plan.mesh_axes),
            "constraint level": str(plan.level),
        },
        "Versions and devices": plan.environment,
        "Compiler options": plan.options,
        "Arguments of other types or sizes": dict(
            zip(plan.arg_names, plan.arg_types, strict=True)
        ),
        "Arguments, by how each dim is sharded": dict(
            zip(plan.arg_names, map(_spec_text, plan.arg_specs), strict=True)
        ),
        "Blocks": _blocks(plan),
        "Collectives (bytes of all blocks together)": {
            f"{one.kind} over {','.join(one.axes)}": format_bytes(one.total_bytes)
            for one in merged_moves(move for row in plan.rows for move in row.moves)
        },
    }


def _spec_text(spec: Spec) -> str:
    """A sharding as a PartitionSpec's entries: ``None, x``."""
    dims = ["+".join(names) or "None" for names in spec]
    return ", ".join(dims) if any(spec) else "replicated"


def _blocks(plan: Plan) -> dict[str, str]:
    found: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for row in plan.rows:
        seen[row.name] += 1
        again = f" ({seen[row.name]})" if seen[row.name] > 1 else ""
        stored = words.storage_text(plan.segments[row.segment])
        sharded = roles_text(row.strategy, Detail.DIMS)
        found[row.name + again] = f"{sharded}; {words.parameters_text(stored)}"
    return found
