"""`cfp tradeoff`: how fast a step can be in how much memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cfp.cli import options as o
from cfp.cli import values
from cfp.cli.output import show
from cfp.cli.session import analyse, target_of
from cfp.context import device_memory
from cfp.passes.tradeoff import measure_all_budgets
from cfp.planner_settings import PlannerSettings
from cfp.profiling.marks import Limits
from cfp.report.progress import Display
from cfp.report.tradeoff import plot_trade_off, trade_off_data, trade_off_view
from cfp.search.tradeoff import trade_off
from cfp.units import parse_bytes

_PER_KIND = PlannerSettings().per_kind
# What makes nothing faster may need less memory.
_MORE = 4
_LIMITS = Limits()


@o.measuring
def tradeoff(
    ctx: typer.Context,
    target: o.TargetText,
    devices: o.Devices = None,
    mesh: o.MeshText = None,
    platform: o.Platform = None,
    memory_budget: o.Budget = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, as .png, .svg or .pdf."),
    ] = None,
    points: Annotated[
        int, typer.Option(help="How many points of the curve to find.", min=2)
    ] = 20,
    workdir: o.Workdir = None,
    as_json: o.Json = False,
    pin: o.Pins = None,
    per_kind: o.PerKind = _PER_KIND,
    others: o.Others = _MORE,
    time_budget: o.TimeBudget = None,
    quick: o.Quick = False,
    retry_failures: o.RetryFailures = False,
    run_timeout: o.RunTimeout = _LIMITS.run_seconds,
    build_timeout: o.BuildTimeout = _LIMITS.build_seconds,
    donate: o.Donate = None,
    static: o.Static = None,
    quiet: o.Quiet = False,
) -> None:
    """Show how fast a step can be in how much memory, and what changes on the way.

    Measures what cfp plan would with plenty of memory, and the fastest strategies also
    rematerialized in the backward pass. All times and sizes are predicted.

    Example: cfp tradeoff gpt --layers 2 --hidden 128 --seq 64 --plot curve.png
    """
    pins = values.parse_pins(pin)
    budget = parse_bytes(memory_budget)
    values.check_drawable(plot)
    with o.only_json(as_json) as print_json:
        session = analyse(*target_of(ctx), pins)
        budget = budget or device_memory(session.mesh)
        with Display(quiet) as display:
            settings = o.settings(
                ctx, per_kind=per_kind, quick=quick, progress=display.tell
            )
            problem = measure_all_budgets(
                session.analysis, session.mesh, workdir, settings
            )
            display.tell("Solving under one budget after another")
            found = trade_off(problem, points)
        if plot is not None:
            plot_trade_off(problem, found, plot, budget)
        if as_json:
            data = trade_off_data(session.analysis, problem, found, budget)
            print_json(json.dumps(data, indent=1))
            return
        show(lambda b: trade_off_view(session.analysis, problem, found, budget, b))
        if plot is not None:
            print(f"Saved {plot}")
