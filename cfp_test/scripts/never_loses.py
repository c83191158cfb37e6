"""Plans a model under several memory budgets, and compares with the best classic.

    python cfp_test/scripts/never_loses.py TARGET [TARGET'S OPTIONS] --json FILE
        [--mesh x=4] [--budgets none,0.6,0.35] [--per-kind 16] [--reach 1.3]
        [--repeats 4] [--workdir DIR]

Budgets are shares of what data parallelism needs. The first plan is made with an
empty store unless ``--workdir`` has one, and once more from what it stored: cold and
warm. The times compared are those of the plan's own race, in which all take turns.
Classics count with the compiler's default options, and in the faster of the ways to
tell the compiler of them; all of them are raced unless ``--reach`` says who is too far
behind for it by prediction. Prints a line for each budget, and appends JSON lines.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from cfp import api, platform
from cfp.cli.session import open_target
from cfp.errors import MemoryBudgetError
from cfp.plan import Plan
from cfp.planner_parts import PlannerSettings
from cfp.presets import CLASSICS
from cfp.search.measure import Told


def best_classic(plan: Plan) -> tuple[str, float] | None:
    """The fastest classic of a race with default compiler options; None if none ran."""
    ways = [f", {extent} told" for extent in Told]
    found = {}
    for row in plan.race:
        name = row.name
        for way in ways:
            name = name.removesuffix(way)
        name = name.removesuffix(", recomputed")
        is_classic = name.split(" ")[0] in CLASSICS and ", " not in name
        if is_classic and row.time_ms is not None and not row.note:
            found[row.name] = row.time_ms
    return min(found.items(), key=lambda item: item[1], default=None)


def row_of(plan: Plan, budget: int | None, seconds: float) -> dict[str, Any]:
    """One plan as plain data."""
    best = best_classic(plan)
    # In the race, as the classics: what wins among abridged programs runs once more.
    measured = next((r.time_ms for r in plan.race if r.name == plan.winner), None)
    return {
        "budget_bytes": budget,
        "winner": plan.winner,
        "measured_ms": measured,
        "predicted_ms": plan.predicted_ms,
        "peak_bytes": plan.peak_bytes,
        "best_classic": best[0] if best else None,
        "best_classic_ms": best[1] if best else None,
        "ratio": measured / best[1] if best and measured else None,
        "plan_seconds": seconds,
        "search": dict(plan.search),
        "environment": dict(plan.environment),
        "race": [
            {
                "name": r.name,
                "predicted_ms": r.predicted_ms,
                "samples_ms": list(r.samples_ms),
                "peak_bytes": r.peak_bytes,
                "note": r.note,
            }
            for r in plan.race
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--mesh")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--platform")
    parser.add_argument("--budgets", default="none,0.6,0.35")
    parser.add_argument("--per-kind", type=int, default=16)
    parser.add_argument("--reach", type=float, default=float("inf"))
    parser.add_argument("--repeats", type=int, default=PlannerSettings().repeats)
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args()
    axes = platform.parse_mesh(options.devices, options.mesh)
    target, mesh = open_target(
        options.target, rest, axes=axes, platform_name=options.platform
    )
    with tempfile.TemporaryDirectory() as temporary:
        workdir = options.workdir or Path(temporary)

        def plan(budget: int | None, preset: str | None = None) -> tuple[Plan, float]:
            begun = time.perf_counter()
            made = api.plan(
                target.step,
                *target.args,
                mesh=mesh,
                static_argnums=target.static,
                donate_argnums=target.donate,
                memory_budget=budget,
                preset=preset,
                cache_dir=workdir,
                settings=PlannerSettings(
                    per_kind=options.per_kind,
                    reach=options.reach,
                    repeats=options.repeats,
                ),
            )
            return made, time.perf_counter() - begun

        def tell(row: dict[str, Any]) -> None:
            row = {"target": [options.target, *rest], **row}
            text = ("race", "environment", "search")
            print(json.dumps({k: v for k, v in row.items() if k not in text}))
            print(json.dumps(row["search"]) if "search" in row else "", flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")

        first, seconds = plan(None)
        tell({"what": "cold", **row_of(first, None, seconds)})
        again, seconds = plan(None)
        tell({"what": "warm", **row_of(again, None, seconds)})
        shares = [share for share in options.budgets.split(",") if share != "none"]
        whole = plan(None, "data_parallel")[0].peak_bytes if shares else None
        for share in shares:
            assert whole is not None, "it was compiled"
            budget = int(float(share) * whole)
            what = f"{share} of data parallel"
            try:
                made, seconds = plan(budget)
            except MemoryBudgetError as error:
                least = error.smallest_feasible_bytes
                tell({"what": what, "budget_bytes": budget, "least_bytes": least})
                continue
            tell({"what": what, **row_of(made, budget, seconds)})


if __name__ == "__main__":
    main()
