"""The page of plans that were made on one H200."""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import median
from typing import Any

from cfp_test.bench.one_as_n import pairs
from cfp_test.bench.one_as_n_data import FILE as RECORDED

_HEADS = {
    "chosen": (
        "model, links",
        "chosen",
        "predicted ms",
        "best recorded",
        "its prediction",
        "recorded ms",
        "nearest recorded",
        "unlike blocks",
        "recorded ms",
        "behind",
    ),
    "predicted": ("model, links", "program", "alone ms", "predicted ms", "GiB"),
    "ladder": (
        "model",
        "H200",
        "rung",
        "chosen",
        "predicted ms",
        "GiB",
        "crosses hosts",
        "analyze s",
        "estimate s",
        "compile, run s",
        "programs",
        "computations timed",
    ),
}


def page(data: Mapping[str, Any]) -> str:
    """All of it, as Markdown."""
    rows = [row for row in data["rows"] if "failure" not in row]
    chosen = [row for row in rows if row["part"] == "chosen"]
    ladder = [row for row in rows if row["part"] == "ladder"]
    ladder.sort(
        key=lambda r: (r["name"], r.get("hosts", 0) > 0, r["devices"], r["rung"])
    )
    lines = [
        *_table("chosen", [_chosen(row) for row in chosen]),
        "*Its prediction*: what one device says of the best recorded program. "
        "*Nearest*: the recorded program of which the fewest blocks are sharded, or "
        "stored, in another way; *behind*: that one's step, over the best recorded.",
        "",
        "## What else was compiled and predicted",
        "",
        *_table("predicted", [r for row in chosen for r in _predicted(row)]),
        "## From 8 to 1,024",
        "",
        *_table("ladder", [_ladder(row) for row in ladder]),
    ]
    return "\n".join(lines)


def _table(name: str, rows: list[list[str]]) -> list[str]:
    head = list(_HEADS[name])
    cells = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(row)} |" for row in cells] + [""]


def _where(row: Mapping[str, Any]) -> str:
    links = "P2P off" if row["cluster"] == "P2P off" else "NVLink"
    return f"{row['name']}, {links}"


def _chosen(row: Mapping[str, Any]) -> list[str]:
    data = json.loads(RECORDED.read_text())
    [best] = [
        one.predicted.total_ms
        for one in pairs(data, 4)
        if f"{one.model}, {one.links}" == _where(row) and one.row["name"] == row["best"]
    ]
    return [
        _where(row),
        row["winner"],
        f"{row['predicted_ms']:.1f}",
        row["best"],
        f"{best:.1f}",
        f"{row['best_ms']:.1f}",
        row["nearest"],
        f"{row['unlike_blocks']} of {row['blocks']}",
        f"{row['nearest_ms']:.1f}",
        f"{row['nearest_ms'] / row['best_ms'] - 1:.1%}",
    ]


def _predicted(row: Mapping[str, Any]) -> list[list[str]]:
    found = {}
    for one in row["programs"]:
        if not one["failure"]:
            found[one["name"]] = [
                _where(row),
                one["name"],
                f"{median(one['alone_ms']):.1f}",
                f"{median(one['predicted_ms']):.1f}",
                f"{one['peak_bytes'] / 2**30:.2f}",
            ]
    return sorted(found.values(), key=lambda cells: float(cells[3]))


def _ladder(row: Mapping[str, Any]) -> list[str]:
    seconds = row["seconds"]
    hosts = row.get("hosts")
    return [
        row["name"] + (f", {hosts} hosts x 8" if hosts else ""),
        f"{row['devices']:,}",
        row["rung"],
        row["winner"],
        f"{row['predicted_ms']:.1f}",
        f"{row['predicted_bytes'] / 2**30:.1f}",
        row["crosses_hosts"] or "-",
        f"{seconds['analyze']:.1f}",
        f"{seconds['estimate_and_search']:.1f}",
        f"{seconds['compile_and_run']:.1f}",
        str(len(row["programs"])),
        str(row["computations_timed"]),
    ]
