"""`cfp run` and `cfp verify`: a step under a plan, run, checked and timed.

`cfp bench` compares plans with what experts write, and with a cost model.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console

from cfp import api, platform
from cfp.checking.trial import Trial, run_trial
from cfp.checking.verify import (
    ELSEWHERE,
    check_devices,
    verified_data,
    verified_text,
)
from cfp.checking.verify import verify as verify_plan
from cfp.cli import options as o
from cfp.cli.finding import Output
from cfp.cli.options import only_json, print_error, save
from cfp.cli.session import analyse, check_writable, target_of
from cfp.errors import CfpError
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings
from cfp.program.trace import planning_mesh
from cfp.report.progress import Display
from cfp.units import parse_bytes
from cfp.view.console import (
    Fitted,
    console_and_border,
    literal_console,
    new_table,
    wrapped,
)
from cfp.view.text import print_plan
from cfp.view.words import throughput

_FAILURES_SHOWN = 5
_PER_KIND = PlannerSettings().per_kind


@o.command
def run(
    ctx: typer.Context,
    target: o.TargetText,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan saved by cfp plan -o.")
    ] = None,
    preset: o.Preset = None,
    steps: Annotated[int, typer.Option(help="Number of steps to run.", min=1)] = 10,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Run the same steps on one device too, and compare; exit code 1 if "
            "they differ.",
        ),
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Relative L2 distance that passes a check: 1e-5 if not given, 1e-12 "
            "for steps in float64, and 1e-2 with kernels that take less than float32."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random arguments.")] = 0,
    devices: o.Devices = None,
    mesh: o.MeshText = None,
    platform: o.PlansPlatform = None,
    memory_budget: o.Budget = None,
    workdir: o.Workdir = None,
    as_json: o.Json = False,
    donate: o.Donate = None,
    static: o.Static = None,
    per_kind: o.PerKind = _PER_KIND,
    quick: o.Quick = False,
    no_race: o.NoRace = False,
    measure: o.Measure = False,
    quiet: o.Quiet = False,
) -> None:
    """Run a step for real: under a plan, a preset, or a new plan.

    Without --plan or --preset the step is planned first.

    Example: cfp run gpt --layers 2 --hidden 128 --plan plan.json --check
    """
    if plan is not None and preset is not None:
        raise CfpError("Give --plan plan.json or --preset NAME, not both.")
    if plan is not None and memory_budget is not None:
        raise CfpError(
            "--memory-budget is for a new plan, and --plan names a finished one. Leave "
            "out one of them; cfp show plan.json prints a plan's memory."
        )
    budget = parse_bytes(memory_budget)
    with only_json(as_json) as print_json:
        saved = Plan.load(plan) if plan is not None else None
        with Display(quiet) as display:
            found, devices_mesh = target_of(ctx, saved)
            if saved is not None:
                used = saved.on(devices_mesh)
            else:
                settings = o.settings(
                    ctx,
                    no_race=preset is not None or no_race,
                    progress=display.tell,
                )
                used = api.plan(
                    found.step,
                    *found.args,
                    mesh=devices_mesh,
                    static_argnums=found.static,
                    donate_argnums=found.donate,
                    memory_budget=budget,
                    preset=preset,
                    cache_dir=workdir,
                    settings=settings,
                )
            trial = run_trial(
                used,
                found,
                steps=steps,
                check=check,
                tolerance=tolerance,
                seed=seed,
                progress=display.tell,
            )
        if as_json:
            print_json(json.dumps(trial_data(trial, used), indent=1))
        else:
            _print_trial(trial)
            if (rates := throughput(used, trial.median_ms)) is not None:
                print(rates)
    if trial.failures:
        raise typer.Exit(1)


def trial_data(trial: Trial, plan: Plan) -> dict[str, Any]:
    """Makes plain data of a trial."""
    largest, rates = trial.largest, throughput(plan, trial.median_ms)
    return {
        "plan": plan.winner,
        "peak_bytes": plan.peak_bytes,
        "segments_recomputed": len(plan.constraints.rematerialized),
        "compiler_options": dict(plan.options),
        "rematerialized": list(trial.rematerialized),
        "median_ms": trial.median_ms,
        "throughput": rates and asdict(rates),
        "steps": [
            {"time_ms": s.time_ms, "metrics": dict(s.metrics)} for s in trial.steps
        ],
        "checked": trial.checked,
        "passed": not trial.failures if trial.checked else None,
        "tolerance": trial.tolerance,
        "largest_difference": {"path": largest.path, "relative_l2": largest.relative_l2}
        if largest
        else None,
    }


def _print_trial(trial: Trial) -> None:
    console, border = console_and_border(literal_console())
    headings = ["step", "ms", *trial.steps[0].metrics]
    headings += ["off by", "of allowed"] if trial.checked else []
    kinds = dict.fromkeys(headings, "number")
    kinds |= {"in": "text"} if trial.checked else {}
    table = new_table(border, None, kinds)
    for number, step in enumerate(trial.steps):
        row = [str(number), f"{step.time_ms:.2f}"]
        row += [f"{value:.6g}" for value in step.metrics.values()]
        if (nearest := step.comparison.nearest(trial.tolerance)) is not None:
            d, share = nearest
            row += [f"{d.relative_l2:.2g}", f"{share:.0%}", trial.named(d.path)]
        table.add_row(*row)
    console.print(Fitted(table))
    print(f"Median step time: {trial.median_ms:.3f} ms")
    if trial.checked:
        print("\n".join(map(wrapped, check_text(trial).split("\n"))))


def check_text(trial: Trial) -> str:
    """Formats the outcome of a check."""
    largest = trial.largest
    if largest is None:
        return "Check: the step returns nothing to compare."
    failures = trial.failures
    if failures:
        text = (
            "largest relative L2 difference from one device: "
            f"{largest.relative_l2:.2g} in {trial.named(largest.path)}"
        )
        lines = [
            f"  step {number}: {trial.named(d.path)} is off by "
            f"{d.relative_l2:.2g}, may be by "
            f"{trial.steps[number].comparison.allowed(d.path, trial.tolerance):.2g}"
            for number, d in failures[:_FAILURES_SHOWN]
        ]
        if len(failures) > _FAILURES_SHOWN:
            lines.append(f"  and {len(failures) - _FAILURES_SHOWN} more")
        return "\n".join(
            [f"Check FAILED: {text}, tolerance {trial.tolerance:g}", *lines]
        )
    text = "all results equal those of one device within rounding"
    if trial.nearest is not None:
        nearest, share = trial.nearest
        text += (
            f". Nearest to its limit is {trial.named(nearest.path)}: off by "
            f"{nearest.relative_l2:.2g} (relative L2), {share:.0%} of what is allowed"
        )
        if nearest.relative_l2 > trial.tolerance:
            text += (
                f"; above {trial.tolerance:g}, but no more than rounding does there on "
                "one device"
            )
    undecided = sorted(map(trial.named, trial.undecided))
    if undecided:
        names = ", ".join(undecided[:_FAILURES_SHOWN])
        more = len(undecided) - _FAILURES_SHOWN
        text += (
            "\nThese leaves are dominated by rounding even on one device; only their "
            f"norms were compared: {names}" + (f" and {more} more" if more > 0 else "")
        )
    return f"Check passed: {text}"


@o.measuring
def verify(
    ctx: typer.Context,
    path: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A saved plan.", show_default=False)
    ],
    target: o.TargetText,
    seconds: Annotated[
        float, typer.Option(help="About how long it may take.", min=1)
    ] = 60.0,
    other_devices: Annotated[
        bool,
        typer.Option(
            "--other-devices", help="Time it on devices of another kind all the same."
        ),
    ] = False,
    platform: o.PlansPlatform = None,
    workdir: o.Workdir = None,
    output: Output = None,
    as_json: o.Json = False,
    donate: o.Donate = None,
    static: o.Static = None,
    quiet: o.Quiet = False,
) -> None:
    """Time a plan on its devices, with its predicted runners-up and the presets.

    Says how far the prediction was off. The fastest is written with -o, measured.

    Example: cfp verify plan.json gpt --layers 4 -o measured.json
    """
    check_writable(output)
    with only_json(as_json) as print_json:
        plan = Plan.load(path)
        with Display(quiet) as display:
            found, mesh = target_of(ctx, plan, ELSEWHERE)
            if not other_devices:
                check_devices(plan, mesh)
            session = analyse(found, mesh, plan=plan)
            verified = verify_plan(
                plan,
                session.analysis,
                session.step,
                session.lowering.out_tree,
                mesh=session.mesh,
                seconds=seconds,
                cache_dir=workdir,
                progress=display.tell,
            )
        save(verified.best, output, say=not as_json)
        if as_json:
            print_json(json.dumps(verified_data(verified), indent=1))
            return
        print_plan(replace(verified.best, rows=()), Console())
        for line in verified_text(verified):
            print(wrapped(line))


_LIMITS = PlannerSettings().limits
_COMMAND = "cfp_test.bench.command"


@o.command
def bench(
    ctx: typer.Context,
    suite: Annotated[
        str,
        typer.Option(
            help="layers: a few layers at full width; models: whole models; tiny: to "
            "see it work, on a CPU."
        ),
    ] = "layers",
    models: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Some of the models: gpt,moe."),
    ] = None,
    devices: o.Devices = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXES",
            help="Mesh to plan for, such as x=4; may be given more than once.",
        ),
    ] = None,
    platform_name: Annotated[
        str | None, typer.Option("--platform", help="cpu or cuda.")
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Ways to compare: handwritten,cost_model,preset; all, if not given.",
        ),
    ] = None,
    handwritten: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Some of the hand-written strategies."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="How many turns each competitor gets.", min=1)
    ] = 5,
    pytorch: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rows that alpa_test/pytorch wrote."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all results here."),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Earlier results to compare these with."),
    ] = None,
    memory_budget: o.Budget = None,
    workdir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for measurements; a new one that is deleted, if not given, so "
            "that planning costs what it costs the first time.",
        ),
    ] = None,
    per_kind: o.PerKind = _PER_KIND,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Plan with fewer measurements, and time two steps a turn."
        ),
    ] = False,
    no_race: o.NoRace = False,
    retry_failures: o.RetryFailures = False,
    run_timeout: o.RunTimeout = _LIMITS.run_seconds,
    build_timeout: o.BuildTimeout = _LIMITS.build_seconds,
    no_trace: Annotated[
        bool,
        typer.Option("--no-trace", help="Skip tracing, which tells where time goes."),
    ] = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare plans with shardings written by hand, a cost model, and PyTorch.

    All competitors of a configuration are first checked against one device, and then
    timed in turn in one process. What ends that process, or hangs, is out, and another
    process goes on. Options that this command does not know are the models':
    --layers 2 --batch 16 --dtype float32. Runs in a clone of cfp.

    Example: cfp bench --suite tiny --models gpt --devices 4 --platform cpu --quick
    """
    command = _baselines()
    check_writable(json_file, "--json")
    if devices is not None and mesh:
        raise CfpError("Give --devices or --mesh, not both.")
    axes = [platform.parse_mesh(None, text) for text in mesh or ()]
    axes = axes or [platform.parse_mesh(devices, None)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kept = Path(folder) / "journal.json"
        workdir = workdir or Path(folder)
        try:
            o.supervise(ctx, workdir, lambda: command.Journal(kept).steps)
            platform.select(platform_name, axes[0])
            meshes = [planning_mesh(platform.make_mesh(one)) for one in axes]
            if len({one.size for one in meshes}) > 1:
                raise CfpError("All meshes must have the same number of devices.")
            with Display(quiet) as display:
                results = command.bench(
                    suite,
                    _names(models),
                    ctx.args,
                    meshes,
                    settings=o.settings(ctx, progress=display.tell),
                    workdir=workdir,
                    journal=command.Journal(kept),
                    groups=_with_planned(_names(groups)),
                    handwritten=_names(handwritten),
                    rounds=rounds,
                    quick=quick,
                    budget_bytes=parse_bytes(memory_budget),
                    pytorch=pytorch,
                    compare=compare,
                    json_file=json_file,
                    trace=not no_trace,
                    tell=display.tell,
                )
        except KeyboardInterrupt as error:
            finished = len(command.Journal(kept).finished)
            where = f" and stand in {json_file}" if finished and json_file else ""
            print_error(f"Interrupted. Configurations finished: {finished}{where}.")
            raise typer.Exit(o.INTERRUPTED) from error
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
        print(f"Saved {json_file}")


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _with_planned(groups: list[str]) -> list[str]:
    return ["planned", *groups] if groups and "planned" not in groups else groups


def _baselines() -> ModuleType:
    """The part of the repository that is not installed with cfp.

    Raises:
        CfpError: this is no clone of the repository.
    """
    root = Path(__file__).parents[2]
    for folder in (root, Path.cwd()):
        if (folder / "cfp_test" / "bench").is_dir():
            sys.path.insert(0, str(folder))
            return importlib.import_module(_COMMAND)
    raise CfpError(
        "cfp bench compares with baselines that are not part of the installed package. "
        "Clone the repository, and run python -m cfp bench in the clone."
    )
