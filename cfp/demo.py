"""``make demo``: plans a small model on four virtual CPU devices, and runs the plan.

Nothing is needed but this machine. A second run finds the race's times already.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from jax.sharding import Mesh

from cfp import api, platform
from cfp.checking.trial import Trial, run_trial
from cfp.cli import options
from cfp.cli.running import check_text
from cfp.errors import CfpError
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings
from cfp.report.console import literal_console
from cfp.report.progress import Display
from cfp.report.tables import print_plan
from cfp.targets import Target, model_target

FOLDER = Path("build") / "demo"
AXES = (("x", 4),)
OPTIONS = {
    "layers": 2,
    "hidden": 128,
    "heads": 4,
    "seq": 32,
    "vocab": 4096,
    "batch": 8,
    "dtype": "float32",
}
STEPS = 8
# Each compares the whole state with one device's, which takes longer than a step.
CHECKED_STEPS = 2
PER_KIND = 8
# Two ways to add up the same numbers agree this well in float32.
LOSS_TOLERANCE = 1e-4


def main() -> int:
    """Runs the demo; returns the exit code."""
    try:
        return demo(FOLDER)
    except CfpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"Interrupted. What was measured is kept in {FOLDER}; run the demo again "
            "to go on.",
            file=sys.stderr,
        )
        return 130


def demo(folder: Path) -> int:
    """Plans, saves, runs and checks; all that it writes goes to a folder."""
    started = time.perf_counter()
    platform.select("cpu", AXES)
    mesh = platform.make_mesh(AXES)
    target = model_target("gpt", dict(OPTIONS))
    print("A GPT with 2 layers of width 128, on 4 virtual devices of this CPU.\n")
    path = folder / "plan.json"
    with Display() as display:
        settings = options.settings(
            per_kind=PER_KIND, quick=True, measure=False, progress=display.tell
        )
        plan = _plan(target, mesh, folder, settings)
        plan.save(path)
        # What a user does next: load the plan and run the step under it.
        plan = Plan.load(path, mesh=mesh)
        checked = run_trial(
            plan, target, steps=CHECKED_STEPS, check=True, progress=display.tell
        )
        ours = run_trial(plan, target, steps=STEPS, progress=display.tell)
        rival = _plan(
            target, mesh, folder, PlannerSettings(race=False), preset="data_parallel"
        )
        data_parallel = run_trial(rival, target, steps=STEPS, progress=display.tell)
    print_plan(plan, literal_console())
    print(f"\n{STEPS} steps under the plan, and under plain data parallelism:")
    _print_losses(ours, data_parallel)
    same = _same_losses(ours, data_parallel)
    print(f"  same loss curve: {'yes' if same else 'NO'}")
    print(
        f"  median step: {ours.median_ms:.2f} ms, data parallel "
        f"{data_parallel.median_ms:.2f} ms ({_ratio(plan, ours, data_parallel)})"
    )
    print(check_text(checked))
    print(
        f"\nSaved {path}; measurements are kept in {folder / 'profiles.sqlite'}.\n"
        f"See it again with: python -m cfp show {path}\n"
        f"Took {time.perf_counter() - started:.0f} s."
    )
    return 0 if same and not checked.failures else 1


def _plan(
    target: Target,
    mesh: Mesh,
    folder: Path,
    settings: PlannerSettings,
    preset: str | None = None,
) -> Plan:
    return api.plan(
        target.step,
        *target.args,
        mesh=mesh,
        donate_argnums=target.donate,
        preset=preset,
        cache_dir=folder,
        settings=settings,
    )


def _print_losses(ours: Trial, theirs: Trial) -> None:
    for name, trial in (("plan", ours), ("data parallel", theirs)):
        losses = " ".join(f"{step.loss:.4f}" for step in trial.steps)
        print(f"  {name:>13}: loss {losses}")


def _same_losses(ours: Trial, theirs: Trial) -> bool:
    pairs = zip(ours.steps, theirs.steps, strict=True)
    return all(
        a.loss is not None
        and b.loss is not None
        and abs(a.loss - b.loss) <= LOSS_TOLERANCE * abs(b.loss)
        for a, b in pairs
    )


def _ratio(plan: Plan, ours: Trial, theirs: Trial) -> str:
    """Both were also timed in the race, in turns and longer than here."""
    raced = {row.name: row.time_ms for row in plan.race}
    best, rival = raced.get(plan.winner), raced.get("data_parallel")
    if plan.winner == "data_parallel":
        return "the plan is data parallelism: nothing was faster here"
    if best and rival:
        return f"in the race {rival / best:.2f} times as fast as data parallel"
    return f"{theirs.median_ms / ours.median_ms:.2f} times as fast"


if __name__ == "__main__":
    raise SystemExit(main())
