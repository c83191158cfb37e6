"""`cfp plan`: all passes, for a step or the fastest of its variants; its modes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from cfp.cli import options as o
from cfp.cli.options import is_given, refuse_others
from cfp.cli.output import only_json, plan_json, print_error, save, show, suggest
from cfp.cli.session import (
    analyse,
    check_drawable,
    check_writable,
    parse_pins,
    target_of,
)
from cfp.cli.variants import (
    MeshShapes,
    Microbatches,
    shapes_of,
    variants_data,
    variants_of,
    variants_view,
)
from cfp.cluster.ray.planning import RunnerNeeds, alone, plan_on_ray
from cfp.context import device_memory
from cfp.errors import CfpError
from cfp.passes.profile import measure_all_budgets
from cfp.plan.adapt import adapt_step, check_axes
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings
from cfp.presets.propagated import named_choices
from cfp.profiling.in_flight import Limits
from cfp.profiling.place import Place
from cfp.profiling.store import store_path
from cfp.report import passes
from cfp.report.explained import plot_trade_off, trade_off_data, trade_off_view
from cfp.report.progress import Display
from cfp.search.tradeoff import trade_off
from cfp.units import parse_bytes
from cfp.variants import Fastest, plan_fastest
from cfp.view.console import literal_console
from cfp.view.text import print_plan

_PER_KIND = PlannerSettings().per_kind
_OTHERS = PlannerSettings().others
_LIMITS = Limits()
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Save the plan here, as JSON."),
]

_Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Plan on a Ray cluster: auto, host:port, or local, which starts one here. "
        "Programs are compiled on its CPUs where the platform allows, and run on the "
        "node with the devices; measurements come back to --workdir.",
        rich_help_panel=o.MEASURING,
    ),
]


@o.command
def plan(
    ctx: typer.Context,
    target: o.TargetText,
    devices: o.Devices = None,
    mesh: o.MeshText = None,
    described: o.For = None,
    platform: o.Platform = None,
    memory_budget: o.Budget = None,
    time_budget: o.TimeBudget = None,
    preset: o.Preset = None,
    choose: o.Choose = None,
    pin: o.Pins = None,
    donate: o.Donate = None,
    output: Output = None,
    presets: Presets = False,
    tradeoff: TradeOff = False,
    points: Points = 20,
    plot: Plot = None,
    adapt: Adapt = None,
    mesh_shapes: MeshShapes = None,
    microbatches: Microbatches = None,
    static: o.Static = None,
    attention: o.Attention = None,
    cross_entropy: o.CrossEntropy = None,
    per_kind: o.PerKind = _PER_KIND,
    others: o.Others = _OTHERS,
    quick: o.Quick = False,
    measure: o.Measure = False,
    no_race: o.NoRace = False,
    whole_race: o.WholeRace = False,
    compiled: o.Compile = False,
    ray: _Ray = None,
    retry_failures: o.RetryFailures = False,
    run_timeout: o.RunTimeout = _LIMITS.run_seconds,
    build_timeout: o.BuildTimeout = _LIMITS.build_seconds,
    workdir: o.Workdir = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Plan how to shard a step: analyze, profile, search, race.

    Example: cfp plan gpt --layers 2 --hidden 128 --seq 64 --vocab 512 --platform cpu

    For devices that are not here: cfp plan gpt --for 2x8xh100 --mesh x=2,y=8. With one
    GPU of the kind its own computation is timed; without, choices are by estimates.
    """
    for mode, takes in TAKES.items():
        if is_given(ctx, mode):
            refuse_others(ctx, mode, takes)
            if mode == "tradeoff":
                o.supervise(ctx, workdir)
            RUN[mode](ctx)
            return
    for option in ("points", "plot"):
        if is_given(ctx, option):
            raise CfpError(f"--{option} goes with --tradeoff.")
    o.supervise(ctx, workdir)
    given = Given(params=dict(ctx.params), args=list(ctx.args), obj=ctx.obj)
    parse_bytes(memory_budget)
    parse_pins(pin)
    check_writable(output)
    with only_json(as_json) as print_json:
        found = find(given) if ray is None else find_on_ray(given)
        several = bool(mesh_shapes or microbatches) or len(found.outcomes) > 1
        save(found.plan, output, say=not as_json)
        if as_json:
            more = {"variants": variants_data(found)} if several else {}
            print_json(plan_json(found.plan, more))
            _end_interrupted(found)
            return
        if several:
            show(lambda b: variants_view(found, b))
        print_plan(found.plan, literal_console())
        if ", microbatches " in found.name:
            print("The plan needs its --microbatches: give cfp run the same number.")
        suggest(found.plan, output)
        _end_interrupted(found)


def _end_interrupted(found: Fastest) -> None:
    """Ends a command that was interrupted, and has a plan all the same.

    Raises:
        typer.Exit: it was.
    """
    if found.interrupted:
        print_error("Interrupted: the plan is the best of what was finished by then.")
        raise typer.Exit(o.INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The command's parameters as data, under the names of `typer.Context`.

    Attributes:
        params: its options.
        args: the target's own options.
        obj: the command's supervision.
    """

    params: dict[str, Any]
    args: list[str]
    obj: Any

    @property
    def context(self) -> typer.Context:
        """The same as a context, for functions that read these three alone."""
        return cast(typer.Context, self)


def find(given: Given, place: Place | None = None) -> Fastest:
    """Runs all passes on the devices of this process.

    Args:
        given: the command's parameters.
        place: another place to compile programs and keep records, if any.
    """
    options = given.params
    with Display(options["quiet"]) as display:
        wanted = variants_of(given.context)
        settings = o.settings(given.context, progress=display.tell)
        return plan_fastest(
            wanted.variants,
            static_argnums=wanted.target.static,
            donate_argnums=wanted.target.donate,
            memory_budget=parse_bytes(options["memory_budget"]),
            pins=parse_pins(options["pin"]),
            preset=options["preset"],
            cache_dir=options["workdir"],
            settings=replace(settings, place=place),
            rule_out=wanted.rule_out,
            leaner=wanted.leaner,
        )


def find_on_ray(given: Given) -> Fastest:
    """Runs all passes on the devices of a node of a Ray cluster."""
    options = given.params
    if options["described"] is not None:
        raise CfpError("--ray does not go with --for: described devices never run.")
    shapes, _ = shapes_of(options)
    return plan_on_ray(
        partial(_find_there, given, os.getcwd()),
        address=options["ray"],
        store=store_path(options["workdir"]),
        needs=RunnerNeeds.of(options["platform"], shapes[0]),
    )


def _find_there(given: Given, folder: str, place: Place, workdir: Path) -> Fastest:
    # Where hosts share a file system, names of files mean the same there.
    if os.path.isdir(folder):
        os.chdir(folder)
    found = find(replace(given, params={**given.params, "workdir": workdir}), place)
    outcomes = tuple(
        replace(one, plan=one.plan and alone(one.plan)) for one in found.outcomes
    )
    return replace(found, plan=alone(found.plan), outcomes=outcomes)


# -------------------------------------------------------------- modes without a search

# Some strategies are measured for their memory: they make nothing faster.
_TRADE_OFF_OTHERS = 4

_PANEL = "Instead of a new plan"
Presets = Annotated[
    bool,
    typer.Option(
        "--presets",
        help="List the presets for the step: data parallel, fully sharded, ...",
        rich_help_panel=_PANEL,
    ),
]
TradeOff = Annotated[
    bool,
    typer.Option(
        "--tradeoff",
        help="Show the step time for each amount of memory. Measures as for a plan "
        "with plenty of memory, and the fastest strategies also rematerialized. All "
        "times and sizes are predicted.",
        rich_help_panel=_PANEL,
    ),
]
Points = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="With --tradeoff: number of points of the curve.",
        min=2,
        rich_help_panel=_PANEL,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --tradeoff: draw the curve, as .png, .svg or .pdf.",
        rich_help_panel=_PANEL,
    ),
]
Adapt = Annotated[
    Path | None,
    typer.Option(
        metavar="PLAN",
        help="Carry a saved plan over to more layers of the same segments, another "
        "batch, or another number of devices (--mesh). Nothing is compiled or "
        "measured: the new plan is marked as predicted, and cfp verify times it.",
        rich_help_panel=_PANEL,
    ),
]

_OF_A_STEP = ("target", "platform", "as_json", "donate", "static", "quiet")
# Options that go with each mode, by parameter.
TAKES = {
    "presets": (*_OF_A_STEP, "devices", "mesh", "pin"),
    "tradeoff": (
        *(*_OF_A_STEP, "devices", "mesh", "pin", "points", "plot", "workdir"),
        *("memory_budget", "time_budget", "per_kind", "others", "quick"),
        *("retry_failures", "run_timeout", "build_timeout"),
    ),
    "adapt": (*_OF_A_STEP, "devices", "mesh", "output"),
}


def list_presets(ctx: typer.Context) -> None:
    """Prints the presets for a step."""
    as_json = ctx.params["as_json"]
    pins = parse_pins(ctx.params["pin"])
    with only_json(as_json) as print_json:
        session = analyse(*target_of(ctx), pins)
        found = passes.presets_data(
            session.analysis, named_choices(session.analysis.frame)
        )
        if as_json:
            print_json(json.dumps(found, indent=1))
            return
        show(lambda b: passes.presets_view(found, b))


def show_trade_off(ctx: typer.Context) -> None:
    """Prints step times by memory, and draws them with --plot."""
    given = ctx.params
    plot = given["plot"]
    pins = parse_pins(given["pin"])
    budget = parse_bytes(given["memory_budget"])
    check_drawable(plot)
    if not is_given(ctx, "others"):
        given["others"] = _TRADE_OFF_OTHERS
    with only_json(given["as_json"]) as print_json:
        session = analyse(*target_of(ctx), pins)
        budget = budget or device_memory(session.mesh)
        with Display(given["quiet"]) as display:
            settings = o.settings(ctx, measure=True, progress=display.tell)
            problem = measure_all_budgets(
                session.analysis, session.mesh, given["workdir"], settings
            )
            display.tell("Solving under one budget after another")
            found = trade_off(problem, given["points"])
        if plot is not None:
            plot_trade_off(problem, found, plot, budget)
        if given["as_json"]:
            data = trade_off_data(session.analysis, problem, found, budget)
            print_json(json.dumps(data, indent=1))
            return
        show(lambda b: trade_off_view(session.analysis, problem, found, budget, b))
        if plot is not None:
            print(f"Saved {plot}")


def adapt_plan(ctx: typer.Context) -> None:
    """Carries a plan over to another step of the same segments.

    Raises:
        CfpError: segments do not match; names the first difference.
    """
    given = ctx.params
    check_writable(given["output"])
    with only_json(given["as_json"]) as print_json:
        plan = Plan.load(given["adapt"])
        found, mesh = target_of(ctx, plan)
        check_axes(plan, mesh)
        made = adapt_step(plan, found.flatten(), mesh)
        save(made, given["output"], say=not given["as_json"])
        if given["as_json"]:
            print_json(plan_json(made))
        else:
            print_plan(made, literal_console())


RUN = {"presets": list_presets, "tradeoff": show_trade_off, "adapt": adapt_plan}
