"""The differences of two plans, as text and as plain data."""

from __future__ import annotations

from collections import Counter

from cfp.analysis.strategies import Spec
from cfp.plan.parts import Detail, roles_text
from cfp.plan.plan import Plan
from cfp.printable import format_bytes, merged_alike, mesh_text
from cfp.view import words
from cfp.view.console import wrapped
from cfp.view.rows import merged_moves

_MOST_CHANGES = 4


def diff_data(first: Plan, second: Plan) -> dict[str, tuple[str, str]]:
    """Lists differences as plain data: the value in both plans, or ""."""
    one, two = _facts(first), _facts(second)
    pairs = {name: (one.get(name, ""), two.get(name, "")) for name in {**one, **two}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def diff_text(
    first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")
) -> str:
    """Lists differences, one a line; repeated layers share a line."""
    lines = [f"{names[0]} -> {names[1]}"]
    groups: dict[tuple[str, str], list[str]] = {}
    for name, pair in diff_data(first, second).items():
        groups.setdefault(pair, []).append(name)
    for (before, after), members in groups.items():
        change = f"{before or '-'} -> {after or '-'}"
        merged = merged_alike(members)
        lines += [f"  {words.elided(one)}: {change}" for one in merged[:_MOST_CHANGES]]
        if (more := len(merged) - _MOST_CHANGES) > 0:
            lines.append(f"  and {more} more, also {change} (--json lists all)")
    if len(lines) == 1:
        lines.append("The plans do not differ.")
    return "\n".join(map(wrapped, lines)) + "\n"


def _facts(plan: Plan) -> dict[str, str]:
    """Collects facts about a plan by name."""
    found = {"plan": plan.winner, "memory": words.memory_text(plan)}
    times = {"measured": plan.measured_ms}
    times[f"predicted {words.basis_text(plan)}"] = plan.predicted_ms
    found |= {name: f"{ms:.3f} ms" for name, ms in times.items() if ms is not None}
    found |= {"program": plan.fingerprint[:12], "mesh": mesh_text(plan.mesh_axes)}
    found |= {"constraint level": str(plan.level), **plan.environment}
    found |= {f"compiler option {name}": text for name, text in plan.options.items()}
    arguments = zip(plan.arg_names, plan.arg_types, plan.arg_specs, strict=True)
    for name, kind, spec in arguments:
        found[f"type of {name}"] = kind
        found[f"sharding of {name}"] = _spec_text(spec)
    seen: Counter[str] = Counter()
    for row in plan.rows:
        seen[row.name] += 1
        again = f" ({seen[row.name]})" if seen[row.name] > 1 else ""
        stored = words.parameters_text(words.storage_text(plan.segments[row.segment]))
        sharded = roles_text(row.strategy, Detail.DIMS)
        found[f"block {row.name}{again}"] = f"{sharded}; {stored}"
    for one in merged_moves(move for row in plan.rows for move in row.moves):
        name = f"collective {one.kind} over {','.join(one.axes)}"
        found[name] = format_bytes(one.total_bytes)
    return found


def _spec_text(spec: Spec) -> str:
    """Writes a sharding as a PartitionSpec's entries: ``None, x``."""
    dims = ["+".join(names) or "None" for names in spec]
    return ", ".join(dims) if any(spec) else "replicated"
