"""The gain of each kind of choice, model by model: a file, a page and a plot.

``python -m cfp_test.bench.worth --for 8xh100 --json FILE [--picture FILE]`` plans
models for described devices, where all gains are by estimates; without ``--for`` it
plans for the devices that are here, and what raced is measured. ``--pieces FOLDER``
takes the plans that `cfp_test.bench.side_by_side` left there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import cfp
from cfp.report.plots import figure
from cfp_test.bench.side_by_side import AXES, joined
from cfp_test.results.pages import Figures, fixed, table

WIDE = ("--layers", "4", "--hidden", "4096", "--heads", "32")
# The model's own options, and what is asked for besides.
MODELS: Mapping[str, Sequence[str]] = {
    "gpt": ("gpt", *WIDE, "--batch", "64", "--seq", "1024"),
    "gpt, 8 GiB": (
        *("gpt", *WIDE, "--batch", "64", "--seq", "1024"),
        *("--memory-budget", "8GiB"),
    ),
    "llama, 4k tokens": ("llama", *WIDE, "--batch", "16", "--seq", "4096"),
    "bert": ("bert", *WIDE, "--batch", "128", "--seq", "512"),
    "moe": ("moe", "--layers", "4", "--batch", "64"),
}
# How kinds of choices are called in figures, in the order of the plot.
KINDS = (
    "mesh",
    "sharding",
    "storage",
    "rematerialization",
    "attention kernels",
    "compiler options",
    "microbatches",
)


def measure(cluster: str | None, models: Sequence[str]) -> dict[str, Any]:
    """Plans each model as a user would, in a process and with a store of its own."""
    rows = []
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            words = ["-m", "cfp", "plan", *MODELS[name], "--quiet", "-o", str(file)]
            words += ["--workdir", folder, *(["--for", cluster] if cluster else [])]
            done = subprocess.run(
                [sys.executable, *words], capture_output=True, text=True, check=False
            )
            if done.returncode:
                rows.append({"model": name, "error": done.stderr.strip()})
                continue
            plan = cfp.Plan.load(file)
        assert plan.figures is not None, "a new plan has figures"
        rows.append(
            {
                "model": name,
                "command": " ".join(["cfp", "plan", *MODELS[name]]),
                "mesh": dict(plan.mesh_axes),
                "winner": plan.winner,
                "step_ms": plan.measured_ms or plan.predicted_ms,
                "planning_s": plan.search.get("planning_seconds"),
                "rung": plan.rung,
                "worth": [
                    {
                        "name": one.name,
                        "with_ms": one.with_ms,
                        "without_ms": one.without_ms,
                        "is_measured": one.is_measured,
                    }
                    for one in plan.figures.worth
                ],
            }
        )
    return {
        "for": cluster,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "jax": version("jax"),
        "commit": _commit(),
        "rows": rows,
    }


def collected(folder: Path) -> dict[str, Any]:
    """Reads the plans that `cfp_test.bench.side_by_side` left in a folder.

    Raises:
        ValueError: there is none.
    """
    rows = []
    for piece in joined(folder)["pieces"]:
        plans = {"": piece.get("planning", {}), **piece.get("budgets", {})}
        model = piece["model"] + (", P2P off" if piece["p2p_disabled"] else "")
        rows += [
            _row(model + (f", {share} of the memory" if share else ""), piece, plan)
            for share, plan in plans.items()
            if plan.get("worth")
        ]
    if not rows:
        raise ValueError(f"{folder} has no plans of side_by_side")
    environment = piece["environment"]
    return {
        "for": f"two {environment['device_kind']}",
        "date": piece["date"],
        "jax": environment["jax_version"],
        "commit": _commit(),
        "measured": True,
        "rows": rows,
    }


def _row(
    name: str, piece: Mapping[str, Any], plan: Mapping[str, Any]
) -> dict[str, Any]:
    raced = [median(row["samples_ms"]) for row in plan["race"] if row["samples_ms"]]
    return {
        "model": name,
        "command": f"cfp_test.bench.side_by_side --pieces {piece['piece']}",
        "mesh": dict(AXES),
        "winner": plan["winner"],
        "step_ms": min(raced, default=plan["predicted_ms"]),
        "planning_s": plan["planning_s"],
        "worth": plan["worth"],
    }


def _commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        words, capture_output=True, text=True, check=True
    ).stdout.strip()


def share(one: Mapping[str, Any]) -> float | None:
    """Computes how many times as long a step takes without a kind of choice."""
    if one["without_ms"] is None:
        return None
    return one["without_ms"] / one["with_ms"] if one["with_ms"] else 1.0


def page(data: Mapping[str, Any]) -> Figures:
    """A row for each kind of choice of each model, all of them."""
    rows = []
    for run in data["rows"]:
        if "error" in run:
            rows.append([run["model"], None, None, None, None, None, run["error"]])
            continue
        for one in run["worth"]:
            times = share(one)
            rows.append(
                [
                    run["model"],
                    one["name"],
                    fixed(one["with_ms"], 2),
                    fixed(one["without_ms"], 2),
                    None if times is None else f"{times:.3f}",
                    "measured" if one["is_measured"] else "predicted",
                    "nothing fits without it" if times is None else None,
                ]
            )
    plans = [
        [
            run["model"],
            f"`{run['command']}`",
            ",".join(f"{axis}={size}" for axis, size in run["mesh"].items()),
            run["winner"],
            fixed(run["step_ms"], 1),
            fixed(run["planning_s"], 0),
        ]
        for run in data["rows"]
        if "error" not in run
    ]
    name = Path(data["name"]).stem
    where = data["for"] or "the devices that were there"
    described = (
        " Devices are described, and nothing ran: all figures are estimates, which say "
        "which kinds of choices may matter, and not by how much in earnest."
        if data["for"] and not data.get("measured")
        else ""
    )
    lines = [
        "# The gain of each kind of choice, model by model",
        "",
        f"Plans for {where}, jax {data['jax']}, {data['date']}; `python -m "
        f"cfp_test.bench.worth`.{described} A step with all there is to choose from, "
        "and the best without one kind: without sharding every block is data parallel, "
        "without a mesh there is one axis.",
        "",
        f"![the gain of each kind of choice](../pictures/{name}.png)",
        "",
        table("model | kind | with ms | without ms | times | how | note", rows),
        "",
        "Predictions of a kind of choice are of the mesh that was taken.",
        "",
        table("model | command | mesh | plan | step ms | planning s", plans),
        "",
        f"Raw: [JSON]({name}.json).",
    ]
    return {"page": "\n".join(lines) + "\n"}


def draw(data: Mapping[str, Any], file: Path) -> None:
    """Draws a group of bars for each model: times as long without."""
    runs = [run for run in data["rows"] if "error" not in run]
    with figure(file, figsize=(9, 4.5)) as axes:
        width = 0.8 / len(KINDS)
        for number, kind in enumerate(KINDS):
            found = [
                next((share(o) for o in run["worth"] if o["name"] == kind), 1.0)
                for run in runs
            ]
            heights = [100 * ((times or 1.0) - 1.0) for times in found]
            places = [i + (number - len(KINDS) / 2) * width for i in range(len(runs))]
            axes.bar(places, heights, width, label=kind)
        axes.set_xticks(range(len(runs)), [run["model"] for run in runs])
        axes.set_ylabel("longer without it, %")
        axes.set_yscale("symlog", linthresh=10)
        ticks = (0, 2, 5, 10, 20, 50, 100)
        axes.set_yticks(ticks, map(str, ticks))
        axes.legend(fontsize="small", ncols=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--for", dest="cluster", help="described devices")
    parser.add_argument("--pieces", type=Path, help="what side_by_side wrote")
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.pieces:
        found = collected(options.pieces)
    else:
        found = measure(options.cluster, options.models)
    data = {"name": options.json.name, **found}
    options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.picture:
        draw(data, options.picture)
    print(page(data)["page"])


if __name__ == "__main__":
    main()
