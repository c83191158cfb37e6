"""`cfp plan`: all passes at once, for a step or the fastest of its variants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cfp.cli import options as o
from cfp.cli.output import save, show, suggest
from cfp.cli.variants import (
    MeshShapes,
    Microbatches,
    variants_data,
    variants_of,
    variants_view,
)
from cfp.context import PlannerSettings
from cfp.plan.plan import Plan
from cfp.profiling.marks import Limits
from cfp.report.console import literal_console
from cfp.report.progress import Display
from cfp.report.tables import print_plan
from cfp.units import parse_bytes
from cfp.variants import plan_fastest

_PER_KIND = PlannerSettings().per_kind
_OTHERS = PlannerSettings().others
_LIMITS = Limits()
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Save the plan here, as JSON."),
]


@o.measuring
def plan(
    ctx: typer.Context,
    target: o.TargetText,
    devices: o.Devices = None,
    mesh: o.MeshText = None,
    described: o.For = None,
    mesh_shapes: MeshShapes = None,
    microbatches: Microbatches = None,
    platform: o.Platform = None,
    memory_budget: o.Budget = None,
    workdir: o.Workdir = None,
    output: Output = None,
    as_json: o.Json = False,
    preset: o.Preset = None,
    pin: o.Pins = None,
    per_kind: o.PerKind = _PER_KIND,
    others: o.Others = _OTHERS,
    attention: o.Attention = None,
    time_budget: o.TimeBudget = None,
    quick: o.Quick = False,
    no_race: o.NoRace = False,
    whole_race: o.WholeRace = False,
    measure: o.Measure = False,
    retry_failures: o.RetryFailures = False,
    run_timeout: o.RunTimeout = _LIMITS.run_seconds,
    build_timeout: o.BuildTimeout = _LIMITS.build_seconds,
    donate: o.Donate = None,
    static: o.Static = None,
    quiet: o.Quiet = False,
) -> None:
    """Plan how to shard a step: analyze, profile, search, race.

    Example: cfp plan gpt --layers 2 --hidden 128 --seq 64 --vocab 512 --platform cpu

    For devices that are not here: cfp plan gpt --for 2x8xh100 --mesh x=2,y=8
    """
    budget = parse_bytes(memory_budget)
    pins = o.parse_pins(pin)
    o.check_writable(output)
    with o.only_json(as_json) as print_json:
        wanted, variants = variants_of(ctx)
        with Display(quiet) as display:
            found = plan_fastest(
                variants,
                static_argnums=wanted.static,
                donate_argnums=wanted.donate,
                memory_budget=budget,
                pins=pins,
                preset=preset,
                cache_dir=workdir,
                settings=o.settings(
                    ctx,
                    per_kind=per_kind,
                    quick=quick,
                    race=not no_race,
                    measure=measure,
                    progress=display.tell,
                ),
            )
        several = bool(mesh_shapes or microbatches)
        save(found.plan, output, say=not as_json)
        if as_json:
            more = {"variants": variants_data(found)} if several else {}
            print_json(plan_json(found.plan, more))
            return
        if several:
            show(lambda b: variants_view(found, b))
        print_plan(found.plan, literal_console())
        if microbatches:
            print("The plan is for its number of microbatches: give cfp run the same.")
        suggest(output)


def plan_json(plan: Plan, more: Mapping[str, Any]) -> str:
    """A plan, which can be loaded from it, with more entries."""
    return json.dumps({**json.loads(plan.to_json()), **more}, indent=1)
