"""Plans and steps with operators and without, by one GPU that plays four."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from cfp_test.results.pages import Figures, fixed, table


def operator_plans(data: Mapping[str, Any]) -> Figures:
    """The page of what `cfp_test/scripts/operator_plans_gpu.py` wrote."""
    rows = data["rows"]
    steps = [row for row in rows if row["row"]["what"] == "step"]
    plans = [row for row in rows if row["row"]["what"] == "plan"]
    lines = [
        f"# Plans with operators on one {data['hardware']} that plays four",
        "",
        f"jax {data['jax']}, {data['date']}, commit {data['commit']}; "
        f"`{data['command']}`. Programs are those of all devices, and collectives do "
        "nothing: times are of the computation alone.",
        "",
        *(line for note in data["notes"] for line in (note, "")),
        "## Fully sharded steps",
        "",
        "Differences are to the step as it is written.",
        "",
        table("step | operators | ms | | peak GB | | why not", _steps(steps, True)),
        "",
        "## Plans",
        "",
        "The step's time is predicted: the computation that was run, and collectives "
        "by the description of the cluster.",
        "",
        table(
            "step | operators offered | memory budget, GB | chosen | with | "
            "computation ms | predicted step ms | GB | why not",
            [_plan(row) for row in plans],
        ),
    ]
    if compiled := data.get("compiled"):
        lines += [
            "",
            "## Compiled without a GPU",
            "",
            f"Fully sharded steps for four of the kind, by JAX's CUDA plugin, jax "
            f"{compiled['jax']}, {compiled['date']}, commit {compiled['commit']}; "
            f"`{compiled['command']}`. Nothing was run.",
            "",
            table(
                "step | operators | peak GB | | why not",
                _steps(compiled["rows"], False),
            ),
        ]
    lines += [
        "",
        "All samples, whole messages and the plans are in the JSON beside this page, "
        "which `python -m cfp_test.results` makes.",
    ]
    return {"page": "\n".join(lines) + "\n"}


def _steps(rows: list[Mapping[str, Any]], timed: bool) -> list[list[Any]]:
    written = {r["row"]["model"]: r for r in rows if not r["row"]["kernel"]}
    names = (("time_ms", 1.0),) if timed else ()
    cells = []
    for row in rows:
        base = written.get(row["row"]["model"], {})
        found: list[Any] = []
        for name, unit in (*names, ("peak_bytes", 1e9)):
            value, before = row.get(name), base.get(name)
            share = value / before - 1.0 if value and before else None
            found.append(None if value is None else fixed(value / unit, 2))
            is_base = row is base or share is None
            found.append(None if is_base else f"{share:+.1%}")
        kernel = row["row"]["kernel"] or "as written"
        cells.append([row["row"]["model"], kernel, *found, _why(row)])
    return cells


def _plan(row: Mapping[str, Any]) -> list[Any]:
    asked = row["row"]
    alone = [
        median(one["alone_ms"])
        for one in row.get("programs", ())
        if one["name"] == row["winner"]
        and one["peak_bytes"] == row["predicted_bytes"]
        and one["alone_ms"]
    ]
    budget = asked.get("budget_bytes")
    kernels = ", ".join(row.get("kernels", ())) or ("none" if "winner" in row else None)
    predicted, size = row.get("predicted_ms"), row.get("predicted_bytes")
    return [
        asked["model"],
        "cudnn, vocabulary/8" if asked["operators"] else "none",
        None if budget is None else fixed(budget / 1e9, 1),
        row.get("winner"),
        kernels,
        fixed(min(alone), 2) if alone else None,
        None if predicted is None else fixed(predicted, 2),
        None if size is None else fixed(size / 1e9, 2),
        _why(row),
    ]


def _why(row: Mapping[str, Any]) -> str | None:
    text = " ".join(row.get("failure", "").split()).replace("|", "/")
    return f"{text[:140]} ..." if len(text) > 140 else text or None
