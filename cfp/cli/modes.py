"""The modes of `cfp plan` that search for no plan: presets, trade-off, adaptation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cfp.cli import options as o
from cfp.cli import values
from cfp.cli.commands import is_given
from cfp.cli.output import only_json, plan_json, save, show
from cfp.cli.session import analyse, open_target, target_of
from cfp.context import device_memory
from cfp.passes.tradeoff import measure_all_budgets
from cfp.plan.adapt import adapt_step, check_axes
from cfp.plan.plan import Plan
from cfp.platform import parse_mesh
from cfp.presets.propagated import named_choices
from cfp.report import passes
from cfp.report.console import literal_console
from cfp.report.progress import Display
from cfp.report.tables import print_plan
from cfp.report.tradeoff import plot_trade_off, trade_off_data, trade_off_view
from cfp.search.tradeoff import trade_off
from cfp.units import parse_bytes

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
    pins = values.parse_pins(ctx.params["pin"])
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
    pins = values.parse_pins(given["pin"])
    budget = parse_bytes(given["memory_budget"])
    values.check_drawable(plot)
    if not is_given(ctx, "others"):
        given["others"] = _TRADE_OFF_OTHERS
    with only_json(given["as_json"]) as print_json:
        session = analyse(*target_of(ctx), pins)
        budget = budget or device_memory(session.mesh)
        with Display(given["quiet"]) as display:
            settings = o.settings(
                ctx,
                per_kind=given["per_kind"],
                quick=given["quick"],
                progress=display.tell,
            )
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
    values.check_writable(given["output"])
    with only_json(given["as_json"]) as print_json:
        plan = Plan.load(given["adapt"])
        found, mesh = open_target(
            given["target"],
            ctx.args,
            axes=parse_mesh(given["devices"], given["mesh"]),
            platform_name=given["platform"],
            donate=given["donate"] or (),
            static=given["static"] or (),
            plan=plan,
        )
        check_axes(plan, mesh)
        made = adapt_step(plan, found.flatten(), mesh)
        save(made, given["output"], say=not given["as_json"])
        if given["as_json"]:
            print_json(plan_json(made))
        else:
            print_plan(made, literal_console())


RUN = {"presets": list_presets, "tradeoff": show_trade_off, "adapt": adapt_plan}
