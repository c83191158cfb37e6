"""The pages of several processes, and of a slow link between two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfp_test.results.pages import Figures, fixed, table


def processes(data: Mapping[str, Any]) -> Figures:
    """Models in several processes, a row for each model and layout."""
    rows = [
        [
            row["model"],
            row["layout"],
            _all_alike(row["plans"]) and _all_alike(row["losses"]),
            f"{row['winner']} of {len(row['raced'])}",
            row["sharded_arguments"],
            f"{row['largest']:.1e}",
            row["preset_sharded_arguments"],
            f"{row['preset_largest']:.1e}",
            _checks(row["passed"]),
            _restored(row),
            f"{row['plan_seconds']:.0f}",
        ]
        for row in data["rows"]
    ]
    head = (
        "model | devices of each process | same plan and losses | plan | sharded "
        "arguments | off by | fully sharded: sharded arguments | off by | checks | "
        "restored on | planned in s"
    )
    commits = ", ".join(dict.fromkeys(row["commit"] for row in data["rows"]))
    return {
        "rows": table(head, rows),
        "jax": data["jax"],
        "python": data["python"],
        "commits": commits,
        "dates": ", ".join(dict.fromkeys(row["date"] for row in data["rows"])),
    }


def processes_on_gpus(data: Mapping[str, Any]) -> Figures:
    """The same, and the plans that they chose."""
    choices = [
        [
            row["model"],
            row["layout"],
            ", ".join(dict.fromkeys(row["shardings"])),
            row["winner"].replace("_", " "),
            fixed(row["predicted_ms"], 1),
            ", ".join(fixed(ms, 1) for ms in row["step_ms"]),
        ]
        for row in data["rows"]
    ]
    head = (
        "model | devices of each process | shardings | plan | predicted ms | "
        "second step ms"
    )
    return {**processes(data), "choices": table(head, choices)}


def _all_alike(values: list[Any]) -> str:
    return "yes" if all(value == values[0] for value in values) else "NO"


def _checks(passed: list[bool]) -> str:
    return f"{sum(passed)} of {len(passed)} processes pass"


def _restored(row: Mapping[str, Any]) -> str:
    if row["restored"][0] is None:
        return "not possible with Orbax"
    equal = "" if all(row["restored"]) else ", NOT EQUAL"
    return row["restored_on"] + equal


def slow_link(data: Mapping[str, Any]) -> Figures:
    """A slow link: curves, plans and times."""
    plans = [row for row in data["rows"] if row["what"] == "plan"]
    [timed] = [row for row in data["rows"] if row["what"] == "time"]
    sizes = list(plans[0]["all_reduce_ms"]["x"])
    curves = table(
        " | ".join(
            ["link", "axis", *(f"{int(size) // 1024} KiB, ms" for size in sizes)]
        ),
        [
            [plan["link"], axis, *(f"{curve[size]:.1f}" for size in sizes)]
            for plan in plans
            for axis, curve in plan["all_reduce_ms"].items()
        ],
    )
    chosen = table(
        "argument | "
        + " | ".join(f"plan made with the {p['link']} link" for p in plans),
        [
            [name, *(_spec(plan["shardings"][name]) for plan in plans)]
            for name in plans[0]["shardings"]
        ],
    )
    medians = timed["median_ms"]
    times = table(
        "plan made with | median step, ms | all samples, ms | sends",
        [
            [
                f"the {name} link",
                f"{medians[name]:.1f}",
                ", ".join(f"{ms:.0f}" for ms in timed["samples_ms"][name]),
                "; ".join(
                    f"{count} {what}"
                    for what, count in timed["collectives"][name].items()
                ),
            ]
            for name in medians
        ],
    )
    return {
        "curves": curves,
        "plans": chosen,
        "times": times,
        "ratio": f"{medians['fast'] / medians['slow']:.2f}",
        "jax": data["jax"],
        "cores": str(data["cores"]),
        "megabytes": f"{data['bytes_per_second'] / 1e6:.0f}",
        "delay": f"{data['delay_seconds'] * 1e3:.0f}",
        "date": timed["date"],
        "commit": timed["commit"],
    }


def _spec(dims: list[list[str]]) -> str:
    return "(" + ", ".join("+".join(axes) or "-" for axes in dims) + ")"
