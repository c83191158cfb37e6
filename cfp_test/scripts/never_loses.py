"""Plans a model under several memory budgets, and compares with the best preset.

    python cfp_test/scripts/never_loses.py TARGET [TARGET'S OPTIONS] --json FILE
        [--mesh x=4] [--budgets none,0.6,0.35] [--per-kind 16] [--reach 1.1]
        [--compare 1.3] [--repeats 4] [--workdir DIR] [--log]

Budgets are shares of what data parallelism needs, which another process finds out
unless a plan without a budget does. The first plan is made with an empty store unless
``--workdir`` has one. Every plan is made once more from what is
stored by then: cold and warm. The times compared are those of the plan's own race, in
which all take turns. Presets count with the compiler's default options, and in the
faster of their constraint levels. ``--reach`` says what is raced, as the
planner's setting. Those that it leaves out are raced after it, against the plan and the
best preset that was in its race; the clock of the planning has stopped then.
``--compare`` says which of them by prediction: all unless it is given. Prints a line
for each plan, and appends JSON lines; ``--log`` tells on the error stream what begins
at which second.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from cfp import platform
from cfp.cli.session import open_target
from cfp.context import device_memory
from cfp.errors import MemoryBudgetError
from cfp.find import FoundPlan, PlanOptions, find_plan
from cfp.plan.plan import Plan
from cfp.planner_settings import DetailedSettings, PlannerSettings
from cfp.presets.presets import PRESETS, presets
from cfp.profiling.key import environment_parts
from cfp.profiling.store import ProfileStore, store_path
from cfp.profiling.tasks import Progress
from cfp.program.trace import planning_mesh
from cfp.race.candidates import level_name
from cfp.race.compile import Builder
from cfp.race.programs import TOO_FAR, UNMEASURED, RaceResult, programs_of
from cfp.race.turns import race_programs
from cfp.report.progress import progress_text
from cfp.settings import ConstraintLevel, defaults_of
from cfp.solution import Candidate


def parts_of(name: str) -> tuple[str, ConstraintLevel]:
    """A preset's name without its constraint level, and that."""
    for level in ConstraintLevel:
        if name.endswith(way := f", {level} constrained"):
            return name.removesuffix(way), level
    return name, ConstraintLevel.EVERYTHING


def best_preset(plan: Plan) -> tuple[str, float] | None:
    """The fastest preset of a race with default compiler options; None if none ran."""
    found = {}
    for row in plan.race:
        name = parts_of(row.name)[0].removesuffix(", rematerialized")
        is_preset = name.split(" ")[0] in PRESETS and ", " not in name
        if is_preset and row.time_ms is not None and not row.note:
            found[row.name] = row.time_ms
    return min(found.items(), key=lambda item: item[1], default=None)


def compared(
    found: FoundPlan, mesh: Mesh, workdir: Path, budget: int | None, reach: float
) -> list[RaceResult]:
    """The plan, the best preset of its race, and the presets that were not raced.

    Empty if there are none of these. What is predicted to take more than `reach` times
    as long as the plan is left out, and what was estimated to be too far behind to be
    measured unless `reach` has no end.
    """
    plan, analysis = found.plan, found.analysis
    mesh = planning_mesh(mesh)
    choices = presets(analysis.frame)
    limit = reach * (plan.predicted_ms or math.inf)
    absent = []
    for row in plan.race:
        if row.note not in (TOO_FAR, UNMEASURED) or (row.predicted_ms or limit) > limit:
            continue
        if row.note == TOO_FAR:
            absent.append((*parts_of(row.name), row.predicted_ms))
        elif math.isinf(reach):
            absent += [(row.name, level, None) for level in ConstraintLevel]
    best = best_preset(plan)
    known = [(*parts_of(best[0]), None)] if best and absent else []
    entries = [
        Candidate(level_name(name, level), choices[name], predicted, level)
        for name, level, predicted in [*known, *absent]
        if name in choices  # What is rematerialized is not known by name.
    ]
    if not entries:
        return []
    where = environment_parts(list(mesh.devices.flat))
    here = (*where, ("race", "with those that the planner left out"))
    entries = [found.winner, *entries]
    reserve = defaults_of(mesh.devices.flat[0].platform).reserve_bytes
    with closing(ProfileStore(store_path(workdir))) as store:
        builder = Builder(
            program=analysis.frame.program,
            mesh=mesh,
            store=store,
            budget_bytes=budget - reserve if budget else device_memory(mesh),
        )
        return race_programs(builder, programs_of(analysis, entries, here), rounds=2)


def comparison_row(results: Sequence[RaceResult]) -> dict[str, Any]:
    """That race as plain data."""
    if not results:
        return {}
    planned, *rivals = results
    best = min(rivals, key=lambda result: result.time_ms)
    ratio = planned.time_ms / best.time_ms if planned.ran and best.ran else None
    return {
        "compared_ratio": ratio,
        "compared_classic": best.name if best.ran else None,
        "compared": [
            {
                "name": result.name,
                "predicted_ms": result.candidate.predicted_ms,
                "samples_ms": list(result.samples_ms),
                "peak_bytes": result.peak_bytes,
                "fits": result.fits,
                "note": result.reason,
            }
            for result in results
        ],
    }


def row_of(plan: Plan, budget: int | None, seconds: float) -> dict[str, Any]:
    """One plan as plain data."""
    best = best_preset(plan)
    # In the race, as the presets: what wins among truncated programs runs once more.
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


def needed_by(preset: str, plan: Plan | None) -> int | None:
    """Memory that a preset needs on each device, if it was in a plan's race."""
    rows = plan.race if plan is not None else ()
    return next((r.peak_bytes for r in rows if r.name == preset and r.peak_bytes), None)


_STARTED = time.perf_counter()


def log(event: Progress | str) -> None:
    """Tells what happens, and at which second."""
    text = event
    if isinstance(event, Progress):
        text = f"{event.phase}: {progress_text(event, clock=False)}"
    print(f"{time.perf_counter() - _STARTED:8.2f} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("target")
    parser.add_argument("--mesh")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--platform")
    parser.add_argument("--budgets", default="none,0.6,0.35")
    parser.add_argument("--per-kind", type=int, default=16)
    parser.add_argument("--reach", type=float)
    parser.add_argument("--compare", type=float, default=math.inf)
    parser.add_argument("--repeats", type=int, default=PlannerSettings().repeats)
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", action="store_true")
    parser.add_argument("--size-only", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    shares = options.budgets.split(",")
    whole = None
    if "none" not in shares and not options.size_only:
        # What the compiler learns from it would help a cold plan of this process.
        found = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--size-only"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        whole = int(found.stdout.splitlines()[-1])
    axes = platform.parse_mesh(options.devices, options.mesh)
    target, mesh = open_target(
        options.target, rest, axes=axes, platform_name=options.platform
    )
    step = target.flatten()
    with tempfile.TemporaryDirectory() as temporary:
        workdir = Path(temporary)
        if options.workdir and not options.size_only:
            workdir = options.workdir

        def plan(
            budget: int | None, preset: str | None = None
        ) -> tuple[FoundPlan, float]:
            begun = time.perf_counter()
            how = PlanOptions(
                memory_budget=budget,
                preset=preset,
                cache_dir=workdir,
                settings=DetailedSettings(
                    per_kind=options.per_kind,
                    reach=options.reach,
                    repeats=options.repeats,
                    progress=log if options.log else None,
                ),
            )
            found = find_plan(step, mesh, how)
            return found, time.perf_counter() - begun

        def tell(row: dict[str, Any]) -> None:
            row = {"target": [options.target, *rest], **row}
            text = ("race", "environment", "search", "compared")
            print(json.dumps({k: v for k, v in row.items() if k not in text}))
            print(json.dumps(row["search"]) if "search" in row else "", flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")

        def tell_both(what: str, budget: int | None) -> Plan | None:
            made = None
            for state in ("cold", "warm"):
                row = {"what": f"{what}, {state}", "budget_bytes": budget}
                try:
                    found, seconds = plan(budget)
                except MemoryBudgetError as error:
                    tell(row | {"least_bytes": error.smallest_feasible_bytes})
                    continue
                made = found.plan
                row |= row_of(made, budget, seconds)
                if state == "cold":
                    log("comparing with those that were not raced")
                    ran = compared(found, mesh, workdir, budget, options.compare)
                    row |= comparison_row(ran)
                tell(row)
            return made

        if options.size_only:
            print(plan(None, "data_parallel")[0].plan.peak_bytes)
            return
        if "none" in shares:
            free = tell_both("no budget", None)
            shares.remove("none")
            whole = needed_by("data_parallel", free)
        if shares and whole is None:
            whole = plan(None, "data_parallel")[0].plan.peak_bytes
        for share in shares:
            assert whole is not None, "it was compiled"
            tell_both(f"{share} of data parallel", int(float(share) * whole))


if __name__ == "__main__":
    main()
