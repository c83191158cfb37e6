"""The page of planning times: `planning_time.py` measures them."""

from __future__ import annotations

from statistics import median
from typing import Any


def page(data: dict[str, Any]) -> str:
    """The results page."""
    rows = sorted(data["rows"], key=lambda r: -r["seconds"])
    seconds = [r["seconds"] for r in rows]
    lines = [
        "# Planning time on virtual CPU devices, November 2026",
        "",
        f"Every program of `cfp_test/programs` on x=4, planned with default settings "
        f"from an empty store, one after another: median {median(seconds):.1f} s, "
        f"worst {max(seconds):.1f} s, of {len(rows)} programs.",
        "",
        f"{data['machine']}; Python {data['python']}, jax {data['jax']}; "
        f"{data['date']}; `{data['command']}`. All samples of the races: "
        "the JSON beside this page.",
        "",
        "On GPUs nothing changed: the last column counts the programs that measuring "
        "begins with there. Virtual devices build only the raced ones.",
        "",
        "| program | seconds | of which race | ops | kinds of segments | raced | "
        "estimated | built first on GPUs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['name']} | {r['seconds']:.1f} | {r['race_seconds']:.1f} | {r['ops']} | "
        f"{r['kinds']} | {r['raced']} | {r['strategies_estimated']:.0f} | "
        f"{r['builds_first_on_gpus']} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"
