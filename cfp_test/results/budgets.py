"""Plans under memory budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cfp_test.results.pages import Figures, fixed, gib, plain, table

_HEAD = (
    "budget GiB | plan | compiled GiB | used GiB | own race ms | one race ms | alone ms"
)
_PLANNED = ("free", "budget", "smallest")
# As XLA's option of the same name in the JSON, and as the page says it.
_OPTIONS = {
    "": None,
    "nolhs": "no latency hiding",
    "slop5": "5%",
    "slop3": "3%",
}
_REMAT = {
    "none": "nothing computed again",
    "layers": "layers computed again",
    "no last": "layers but the last computed again",
}


def rows_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """One run: each budget with its plan, what that needs, and its three times."""
    raced = {row["plan"]: row for row in rows if row["what"] == "raced"}
    alone = {row["plan"]: row for row in rows if row["what"] == "measured"}
    lines = []
    order = [row for row in rows if row["what"] in (*_PLANNED, "left out")]
    for row in sorted(order, key=lambda row: row["budget_bytes"] or float("inf")):
        budget = gib(row["budget_bytes"]) or "none"
        if row["budget_bytes"] is not None and row["budget_bytes"] < 2**20:
            budget = f"{row['budget_bytes'] / 2**10:.0f} KiB"
        budget += ", named" if row["what"] == "smallest" else ""
        if row["what"] == "left out":
            lines.append([budget, "not reached in time", *[None] * 5])
        elif not row["feasible"]:
            least = f"nothing fits; {gib(row['least_bytes'])} GiB would do"
            lines.append([budget, least, *[None] * 5])
        else:
            known, ran = raced.get(row["plan"], {}), alone.get(row["plan"], {})
            used = max(ran["peaks_bytes"]) if ran else None
            lines.append(
                [
                    budget,
                    f"{plain(row['winner'])} ({row['plan'].removeprefix('plan_')})",
                    gib(row["peak_bytes"]),
                    gib(used),
                    fixed(row["measured_ms"]),
                    fixed(known.get("time_ms")),
                    fixed(ran.get("time_ms")),
                ]
            )
    return table(_HEAD, lines)


def verdict_of(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Words of the script itself about a run."""
    return next(row for row in rows if row["what"] == "verdict")


def _share(number: float) -> str:
    return f"{100 * number:.1f}%"


def _at(rows: Sequence[Mapping[str, Any]], low: float, high: float) -> list[float]:
    """Times of the plans' own races for budgets between two, in GiB."""
    return [
        row["measured_ms"]
        for row in rows
        if row["what"] == "budget"
        and row["feasible"]
        and low <= row["budget_bytes"] / 2**30 <= high
    ]


def _told(rows: Sequence[Mapping[str, Any]]) -> str:
    """Two presets with the compiler's options, with and without rematerialization."""
    found = {(row["preset"], row["remat"], row["options"]): row for row in rows}
    lines = []
    for remat, title in _REMAT.items():
        for options, name in _OPTIONS.items():
            both = [
                found[preset, remat, options]
                for preset in ("data_parallel", "fully_sharded")
            ]
            cells = [c for r in both for c in (fixed(r["time_ms"], 1), gib(r["temp"]))]
            lines.append([None if options else title, name, *cells])
    return table(
        "| options | data parallel ms | temporaries GiB | fully sharded ms | "
        "temporaries GiB",
        lines,
    )


def budgets(
    first: Mapping[str, Any],
    recompute: Mapping[str, Any],
    likely: Mapping[str, Any],
    named: Sequence[Mapping[str, Any]],
) -> Figures:
    """The figures of the page of budgets."""
    before, after = named
    checks = {"before": verdict_of(before["rows"]), "after": verdict_of(after["rows"])}
    second = [row for row in likely["rows"] if row["run"] == "second pass"]
    fast, slow = (_at(run["rows"], 5.3, 5.8) for run in named)
    shares = {
        f"{name}_{key}": _share(verdict[key])
        for name, verdict in checks.items()
        for key in ("used_share", "compiled_share", "rise_own_races", "rise_one_race")
    }
    return {
        **shares,
        "before": rows_of(before["rows"]),
        "after": rows_of(after["rows"]),
        "likely": rows_of(second),
        "recompute": rows_of(recompute["runs"][-1]["rows"]),
        "two_layers": rows_of(first["budgets_two_layers"]["rows"]),
        "four_layers": rows_of(first["budgets_four_layers"]["rows"]),
        "told": _told(first["options"]["rows"]),
        "faster_before": f"{min(fast):.2f} to {max(fast):.2f}",
        "slower_after": f"{min(slow):.2f} to {max(slow):.2f}",
    }
