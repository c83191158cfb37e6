"""Writes a results page from saved plans: ``python -m cfp.report.results``.

Every figure on the page comes out of the plans' JSON, which lies beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cfp.plan import Plan
from cfp.plan_parts import RaceRow
from cfp.report.tables import scale_text

_SHOWN = (
    "platform",
    "device_kind",
    "devices",
    "processes",
    "jax_version",
    "jaxlib_version",
    "driver_version",
    "xla_flags",
    "nccl",
    "matmul_precision",
)


def page(title: str, command: str, date: str, plans: dict[str, Plan]) -> str:
    """A results page in Markdown.

    Args:
        title: its heading.
        command: what was run.
        date: when, as an ISO date.
        plans: the plans by the name of what was different about each.
    """
    parts = [f"# {title}", "", f"Measured on {date} with", "", f"    {command}", ""]
    for name, plan in plans.items():
        parts += [f"## {name}", "", *_environment(plan), "", *_race(plan), ""]
        parts += [*_blocks(plan), "", _effort(plan), ""]
    return "\n".join(parts)


def _environment(plan: Plan) -> list[str]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh_axes)
    shown = {"mesh": mesh, **plan.environment}
    wanted = ("mesh", *_SHOWN)
    return [f"- {key}: {shown[key]}" for key in wanted if shown.get(key)]


def _race(plan: Plan) -> list[str]:
    lines = [
        "| plan | measured ms | samples from, to | predicted ms | memory GiB |",
        "| --- | --- | --- | --- | --- |",
    ]

    def order(row: RaceRow) -> float:
        return row.time_ms if row.time_ms is not None else float("inf")

    for row in sorted(plan.race, key=order):
        name = f"**{row.name}**" if row.name == plan.winner else row.name
        if row.time_ms is None:
            measured, spread = row.note, "-"
        else:
            measured = f"{row.time_ms:.2f}"
            spread = f"{min(row.samples_ms):.2f} to {max(row.samples_ms):.2f}"
        predicted = "-" if row.predicted_ms is None else f"{row.predicted_ms:.2f}"
        memory = f"{row.peak_bytes / 2**30:.2f}" if row.peak_bytes else "-"
        lines.append(f"| {name} | {measured} | {spread} | {predicted} | {memory} |")
    if scaled := scale_text(plan):
        lines += ["", scaled]
    return lines


def _blocks(plan: Plan) -> list[str]:
    """One line for each different block of the plan."""
    lines = [
        "| block | sharded | parameters | collectives |",
        "| --- | --- | --- | --- |",
    ]
    seen = set()
    for row in plan.rows:
        place = row.name.rsplit("/", 2)[-2:]
        key = (row.kind, row.op, tuple(place), row.sharded)
        if key not in seen:
            seen.add(key)
            lines.append(
                f"| {row.name} | {row.sharded} | {row.storage} | {row.collectives} |"
            )
    return lines


def _effort(plan: Plan) -> str:
    search = plan.search
    return (
        f"Planning: {search.get('strategies_measured', 0):.0f} strategies measured, "
        f"{search.get('strategies_cached', 0):.0f} from the cache, "
        f"{search.get('strategies_failed', 0):.0f} failed; profile "
        f"{search.get('profile_seconds', 0.0):.1f} s, search "
        f"{search.get('search_seconds', 0.0):.1f} s, race "
        f"{search.get('race_seconds', 0.0):.1f} s."
    )


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--title", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--date", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "plans", nargs="+", metavar="NAME=plan.json", help="a heading and its plan"
    )
    args = parser.parse_args()
    plans = {}
    for item in args.plans:
        name, _, path = item.rpartition("=")
        plans[name] = Plan.load(path)
    args.out.write_text(page(args.title, args.command, args.date, plans))


if __name__ == "__main__":
    main()
