"""The commands that use plans: show them; run, verify and export steps under them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import typer

from cfp import api
from cfp.checking.check import AS_WRITTEN, reference_text
from cfp.checking.trial import Trial, run_trial
from cfp.checking.verify import verified_data, verified_text
from cfp.checking.verify import verify as verify_plan
from cfp.cli import options as o
from cfp.cli.options import Answer, mode_of, save
from cfp.cli.session import analyse, check_writable, target_of
from cfp.errors import CfpError
from cfp.plan.execute import device_difference
from cfp.plan.plan import Plan
from cfp.printable import few, merged_alike
from cfp.view.console import Display, Rows, print_view, row_of, wrapped
from cfp.view.text import diff_data, diff_text, explain_text, print_plan, python_text
from cfp.view.words import throughput

# Options of `cfp show` that go with each mode, by parameter.
_SHOW_TAKES = {
    "explain": ("path", "block"),
    "diff": ("path", "as_json"),
    "html": ("path",),
    "python": ("path",),
}


@o.command(
    *("path", "explain", "block", "diff", "html", "python", "as_json"),
    explain=o.Option(bool, "Explain each block, with strategies to compare."),
    block=o.Option(
        str,
        "With --explain: only blocks with this in their names, or else in those of "
        "arguments that they read, in upper or lower case; with * whole names match.",
        metavar="NAME",
    ),
    diff=o.Option(
        Path,
        "List the differences of another plan from this one: times, memory, arguments, "
        "blocks, collectives.",
        metavar="OTHER",
    ),
    html=o.Option(
        Path,
        "Write the plan as one page of HTML: no network, no scripts.",
        metavar="FILE",
    ),
    python=o.Option(
        bool,
        "Print the PartitionSpecs of arguments, results and constraints, with their "
        "source lines, as Python to paste.",
    ),
)
def show(ctx: typer.Context, given: Any) -> Answer:
    """Show a saved plan: as a table, explained, compared, as HTML or as Python.

    Example: cfp show plan.json --explain --block layer_0

    Example: cfp show before.json --diff after.json

    Example: cfp show plan.json --html plan.html
    """
    mode_of(ctx, _SHOW_TAKES, {"block": "explain"})
    check_writable(given.html, "--html")
    plan = Plan.load(given.path)
    data: Callable[[], Any] = partial(json.loads, plan.to_json())
    if given.html is not None:
        plan.report(given.html)
        text = f"Saved {given.html}\n"
    elif given.diff is not None:
        other, names = Plan.load(given.diff), (str(given.path), str(given.diff))
        data, text = partial(diff_data, plan, other), diff_text(plan, other, names)
    elif given.python:
        text = python_text(plan)
    elif given.explain:
        text = explain_text(plan, given.block)
    else:
        return Answer(data, partial(print_plan, plan))
    return Answer(data, partial(print, text, end=""))


@o.command(
    *("path", "target", "output", "platform", "static", "other_devices"),
    platform=o.PLANS_PLATFORM,
    output=o.Option(
        Path,
        "The file to write: jax.export.deserialize reads it.",
        *("--output", "-o"),
        metavar="FILE",
        default=Path("step.jax"),
    ),
)
def export(ctx: typer.Context, given: Any) -> None:
    """Write a step under a plan as jax.export does: it runs without cfp.

    The file has the program with its shardings; the printed Python code runs it.

    Example: cfp export plan.json gpt --layers 4 -o step.jax
    """
    check_writable(given.output)
    plan = Plan.load(given.path)
    found, mesh = target_of(ctx, plan)
    plan = plan.on(mesh, other_devices=given.other_devices)
    bound = plan.bind(found.step, *found.args)
    bound.export(given.output)
    print(f"Saved {given.output}\n\n{running_text(bound, given.output)}", end="")


def running_text(plan: Plan, path: Path) -> str:
    """Returns Python code that loads a step from `path` and runs it on `args`."""
    names, sizes = [*zip(*plan.mesh_axes, strict=True)] or [("x",), (1,)]
    donated: Sequence[int] = [i for i, one in enumerate(plan.donated) if one]
    if len(donated) > 2 and [*(run := range(donated[0], donated[-1] + 1))] == donated:
        donated = run
    options = f", compiler_options={dict(plan.options)!r}" if plan.options else ""
    explicit = plan.mesh.explicit_axes if plan.mesh else ()
    types = ["Explicit" if name in explicit else "Auto" for name in names]
    return f"""\
import jax

with open({str(path)!r}, "rb") as file:
    exported = jax.export.deserialize(bytearray(file.read()))
types = tuple(jax.sharding.AxisType[name] for name in {types})
mesh = jax.make_mesh({sizes}, {names}, axis_types=types)
step = jax.jit(exported.call, donate_argnums={donated}{options})
leaves = jax.device_put(jax.tree.leaves(args), [*exported.in_shardings_jax(mesh)])
results = step(*leaves)
"""


_FAILURES_SHOWN = 5
_DRAWN = (
    "The step ran on random numbers (an integer scalar is 1) in place of {}, given as "
    "shapes. Its results, such as a loss, say nothing about training."
)


@o.command(
    *("target", "plan", "preset", "choose", "steps", "check", "tolerance", "seed"),
    *("devices", "mesh", "platform", "memory_budget", "workdir", "as_json", "donate"),
    *("static", "kernels", "precision", "per_kind", "quick", "no_race", "measure"),
    *("other_devices", "quiet"),
    plan=o.OPTIONS["saved"],
    platform=o.PLANS_PLATFORM,
    steps=o.Option(int, "Number of steps to run.", default=10, min=1),
    check=o.Option(
        bool,
        "Compare with the same steps on one device; exit code 1 if they differ. If one "
        "device has no room, a preset shards them. If the step's code names several "
        "devices, they run as written on these.",
    ),
    tolerance=o.Option(
        float,
        "Relative L2 distance that passes a check: by default 1e-5, 1e-12 for steps in "
        "float64, and 1e-2 with kernels that take less than float32.",
        min=1e-15,  # The last bit of float64.
    ),
    seed=o.Option(int, "Seed of random arguments.", default=0),
)
def run(ctx: typer.Context, given: Any) -> Answer:
    """Run a step for real: under a plan, a preset, or else a new plan.

    Example: cfp run gpt --layers 2 --hidden 128 --plan plan.json --check
    """
    if given.plan is not None and given.preset is not None:
        raise CfpError("Give --plan plan.json or --preset NAME, not both.")
    if given.plan is not None and given.memory_budget is not None:
        raise CfpError(
            "--memory-budget is for a new plan, and --plan names a finished one. Leave "
            "out one of them; cfp show plan.json prints a plan's memory."
        )
    saved = Plan.load(given.plan) if given.plan is not None else None
    with Display(given.quiet) as display:
        found, devices_mesh = target_of(ctx, saved)
        if saved is not None:
            used = saved.on(devices_mesh, other_devices=given.other_devices)
        else:
            used = api.plan(
                found.step,
                *found.args,
                mesh=devices_mesh,
                static_argnums=found.static,
                donate_argnums=found.donate,
                memory_budget=given.memory_budget,
                preset=given.preset,
                cache_dir=given.workdir,
                settings=o.settings(ctx, display.tell),
            )
        trial = run_trial(
            used,
            found,
            steps=given.steps,
            check=given.check,
            tolerance=given.tolerance,
            seed=given.seed,
            progress=display.tell,
        )
    where = used.mesh_axes, used.environment, [*devices_mesh.devices.flat]
    if elsewhere := device_difference(*where):
        elsewhere += ": results are the step's; times are not the planned devices'."

    def show() -> None:
        _print_trial(trial)
        # Throughput compares with the rates of the planned devices.
        rates = None if elsewhere else throughput(used, trial.median_ms)
        for text in filter(None, (rates, elsewhere)):
            print(text)

    return Answer(partial(trial_data, trial, used), show, bool(trial.failures))


def trial_data(trial: Trial, plan: Plan) -> dict[str, Any]:
    """Collects a trial's results for JSON."""
    rates = throughput(plan, trial.median_ms)
    largest = [
        _finite({"path": one.path, "relative_l2": one.relative_l2})
        for one in trial.every[:1]
    ]
    return {
        "plan": plan.winner,
        "peak_bytes": plan.peak_bytes,
        "segments_recomputed": len(plan.constraints.rematerialized),
        "compiler_options": dict(plan.options),
        "median_ms": trial.median_ms,
        "throughput": rates and asdict(rates),
        "steps": [
            {"time_ms": s.time_ms, "metrics": _finite(s.metrics)} for s in trial.steps
        ],
        "random_arguments": bool(trial.drawn),
        "checked": trial.checked,
        "checked_against": reference_text(trial.preset) if trial.checked else None,
        "passed": not trial.failures if trial.checked else None,
        "tolerance": trial.tolerance,
        "largest_difference": next(iter(largest), None),
        "failures": [
            _finite(
                {
                    "step": number,
                    "path": trial.named(one.path),
                    "relative_l2": one.relative_l2,
                    "allowed": one.allowed,
                }
            )
            for number, one in trial.failures
        ],
        "from_as_written": _finite(trial.steps[-1].comparison.rounded),
        "compared_by_norm_alone": sorted(map(trial.named, trial.undecided)),
    }


def _finite(data: Mapping[str, Any]) -> dict[str, Any]:
    """Copies data with None for infinite numbers and NaN; nested data stay."""
    return {
        name: None if isinstance(x, float) and not isfinite(x) else x
        for name, x in data.items()
    }


def _print_trial(trial: Trial) -> None:
    headings = ["step", "ms", *trial.steps[0].metrics]
    headings += ["off by", "of allowed", "in"] if trial.checked else []
    rows = []
    for number, step in enumerate(trial.steps):
        row = [str(number), f"{step.time_ms:.2f}"]
        row += [f"{value:.6g}" for value in step.metrics.values()]
        if (nearest := step.comparison.nearest) is not None:
            off, share = nearest.relative_l2, nearest.relative_l2 / nearest.allowed
            row += [f"{off:.2g}", f"{share:.0%}", trial.named(nearest.path)]
        rows.append(row_of(*row, *[""] * (len(headings) - len(row))))
    print_view(Rows(title="", headings=tuple(headings), rows=rows).table)
    if trial.drawn and any(step.metrics for step in trial.steps):
        print(wrapped(_DRAWN.format(few(trial.drawn))))
    print(f"Median step time: {trial.median_ms:.3f} ms")
    if trial.checked:
        print("\n".join(map(wrapped, check_lines(trial))))


def check_lines(trial: Trial) -> Iterator[str]:
    """Describes the outcome of a trial with --check, in one or more lines."""
    if not trial.every:
        yield "Check: the step returns nothing to compare."
        return
    against, largest = reference_text(trial.preset), trial.every[0]
    if failures := trial.failures:
        yield (
            f"Check FAILED: largest relative L2 difference from {against}: "
            f"{largest.relative_l2:.2g} in {trial.named(largest.path)}, tolerance "
            f"{trial.tolerance:g}"
        )
        for number, one in failures[:_FAILURES_SHOWN]:
            yield (
                f"  step {number}: {trial.named(one.path)} is off by "
                f"{one.relative_l2:.2g}, may be by {one.allowed:.2g}"
            )
        if (more := len(failures) - _FAILURES_SHOWN) > 0:
            yield f"  and {more} more"
        return
    rounding = _rounding_text(trial)
    text = f"Check passed: all results equal those of {against} within limits"
    if (nearest := trial.every.nearest) is not None:
        share = nearest.relative_l2 / nearest.allowed
        text += (
            f". Nearest to its limit is {trial.named(nearest.path)}: off by "
            f"{nearest.relative_l2:.2g} (relative L2), {share:.0%} of the allowance"
        )
        if nearest.relative_l2 > trial.tolerance:
            text += f"; above {trial.tolerance:g}, but no more than rounding does "
            text += f"there {rounding}"
    yield text
    same = {x.path for x in trial.every if x.change == 0.0}
    same -= {x.path for x in trial.every if x.change}
    if same := merged_alike(sorted(map(trial.named, same))):
        yield f"Unchanged in all steps, so not checked (more --steps?): {few(same)}"
    if undecided := sorted(map(trial.named, trial.undecided)):
        names = few(undecided, most=_FAILURES_SHOWN)
        yield (
            f"These leaves are dominated by rounding {rounding}; only their norms were "
            f"compared: {names}"
        )
    if trial.preset == AS_WRITTEN:
        yield (
            "The step's code names several devices, and does not run on one. The plan "
            "was compared with the step as written on the same devices, which checks "
            "only the ops that cfp itself shards."
        )
    elif trial.preset:
        yield (
            "The unsharded step does not fit on one device. The plan was compared with "
            f"the step as written, sharded over the same devices by {trial.preset}."
        )
    if off := trial.steps[-1].comparison.rounded:
        texts = (f"{trial.named(path)} by {far:.2g}" for path, far in off.items())
        yield (
            "Largest distances to the step without --precision (state: of its change): "
            f"{', '.join(texts)}"
        )


def _rounding_text(trial: Trial) -> str:
    if trial.narrow:
        return "in the plan's kernels"
    if trial.preset == AS_WRITTEN:
        return "as it is written"
    return f"{'under' if trial.preset else 'on'} {reference_text(trial.preset)}"


@o.command(
    *("path", "target", "seconds", "other_devices", "platform", "workdir", "output"),
    *("as_json", "donate", "static", "quiet"),
    platform=o.PLANS_PLATFORM,
    seconds=o.Option(float, "About how long it may take.", default=60.0, min=1),
)
def verify(ctx: typer.Context, given: Any) -> Answer:
    """Time a plan, and presets, on its devices.

    Prints the prediction's error. -o saves the fastest plan, with its measured time.

    Example: cfp verify plan.json gpt --layers 4 -o measured.json
    """
    o.supervise(ctx, given.workdir)
    check_writable(given.output)
    plan = Plan.load(given.path)
    with Display(given.quiet) as display:
        found, mesh = target_of(ctx, plan)
        plan = plan.on(mesh, other_devices=given.other_devices)
        best = verify_plan(
            plan,
            analyse(found, mesh, plan=plan),
            seconds=given.seconds,
            cache_dir=given.workdir,
            progress=display.tell,
        )
    saved = save(best, given.output)

    def show() -> None:
        for line in (*verified_text(plan, best), *saved):
            print(wrapped(line))
        print()
        print_plan(replace(best, rows=()))

    return Answer(partial(verified_data, plan, best), show)
