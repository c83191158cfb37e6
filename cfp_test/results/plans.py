"""The part of a results page on saved plans.

A page shows what was measured, which does not depend on the version of cfp that reads
it: so plans of every format are read here, also those that can no longer be applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cfp.plan.parts import AxisRole, MoveFigure, PlanSegment, roles_text
from cfp.view.words import moves_text, scale_text, storage_text

_SEGMENT = TypeAdapter(PlanSegment)
_STRATEGY = TypeAdapter(tuple[AxisRole, ...])
_MOVES = TypeAdapter(tuple[MoveFigure, ...])

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Values of a saved plan that a page shows, for any format of file.

    Attributes:
        mesh_axes: names and sizes.
        environment: what was measured depends on these.
        winner: the name of the candidate that the plan is.
        measured_ms: its time, or None.
        race: the candidates, as `RaceRow` has them.
        rows: the blocks, as `PlanRow` has them.
        search: what planning took.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    environment: Mapping[str, str]
    winner: str
    measured_ms: float | None
    race: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]
    search: Mapping[str, float]

    @classmethod
    def from_json(cls, data: Any) -> Saved:
        """Reads parsed JSON of any format."""
        return cls(
            mesh_axes=tuple((name, size) for name, size in data["mesh_axes"]),
            environment=data["environment"],
            winner=data["winner"],
            measured_ms=data.get("measured_ms"),
            race=[dict(row) for row in data["race"]],
            rows=[_as_text(row, data.get("segments", ())) for row in data["rows"]],
            search=data["search"],
        )

    @classmethod
    def load(cls, path: Path) -> Saved:
        """Reads a file; see `from_json`."""
        return cls.from_json(json.loads(path.read_text()))


def _as_text(row: Mapping[str, Any], segments: Sequence[Any]) -> dict[str, Any]:
    """A block with its choice in words, which files have up to format 4."""
    if "strategy" not in row:
        return dict(row)
    segment = _SEGMENT.validate_python(segments[row["segment"]])
    return {
        **row,
        "kind": segment.kind,
        "sharded": roles_text(_STRATEGY.validate_python(row["strategy"])),
        "storage": storage_text(segment, short=True),
        # In words up to format 7.
        "collectives": row.get("collectives")
        or moves_text(_MOVES.validate_python(row["moves"])),
    }


def section(name: str, plan: Saved) -> list[str]:
    """Formats one plan as lines of Markdown."""
    head = [f"## {name}", "", *_environment(plan), ""]
    return [*head, *_race(plan), "", *_blocks(plan), "", _effort(plan), ""]


def _environment(plan: Saved) -> list[str]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh_axes)
    shown = {"mesh": mesh, **plan.environment}
    wanted = ("mesh", *_SHOWN)
    return [f"- {key}: {shown[key]}" for key in wanted if shown.get(key)]


def _race(plan: Saved) -> list[str]:
    lines = [
        "| plan | measured ms | samples from, to (count) | predicted ms | memory GiB |",
        "| --- | --- | --- | --- | --- |",
    ]

    def order(row: Mapping[str, Any]) -> float:
        return row["time_ms"] if row["time_ms"] is not None else float("inf")

    for row in sorted(plan.race, key=order):
        name = f"**{row['name']}**" if row["name"] == plan.winner else row["name"]
        if row["time_ms"] is None:
            measured, spread = row["note"], "-"
        else:
            samples = row["samples_ms"]
            measured = f"{row['time_ms']:.2f}"
            spread = f"{min(samples):.2f} to {max(samples):.2f} ({len(samples)})"
        known = row["predicted_ms"]
        predicted = "-" if known is None else f"{known:.2f}"
        memory = f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "-"
        lines.append(f"| {name} | {measured} | {spread} | {predicted} | {memory} |")
    if scaled := scale_text(plan.search, plan.measured_ms):
        lines += ["", scaled]
    return lines


def _blocks(plan: Saved) -> list[str]:
    """One line for each different block of the plan."""
    lines = [
        "| block | sharded | parameters | collectives |",
        "| --- | --- | --- | --- |",
    ]
    seen = set()
    for row in plan.rows:
        place = row["name"].rsplit("/", 2)[-2:]
        key = (row["kind"], row["op"], tuple(place), row["sharded"])
        if key not in seen:
            seen.add(key)
            cells = (row["name"], row["sharded"], row["storage"], row["collectives"])
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _effort(plan: Saved) -> str:
    search = plan.search
    return (
        f"Planning: {search.get('strategies_measured', 0):.0f} strategies measured, "
        f"{search.get('strategies_cached', 0):.0f} from the cache, "
        f"{search.get('strategies_failed', 0):.0f} failed; profile "
        f"{search.get('profile_seconds', 0.0):.1f} s, search "
        f"{search.get('search_seconds', 0.0):.1f} s, race "
        f"{search.get('race_seconds', 0.0):.1f} s."
    )
