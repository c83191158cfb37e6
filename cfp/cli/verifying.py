"""`cfp verify`: a plan from elsewhere, on the devices that it is for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cfp.checking.verify import check_devices, verified_data, verified_text
from cfp.checking.verify import verify as verify_plan
from cfp.cli import options as o
from cfp.cli import values
from cfp.cli.finding import Output
from cfp.cli.output import only_json, save
from cfp.cli.session import analyse, open_target
from cfp.plan.plan import Plan
from cfp.report.explain_plan import wrapped
from cfp.report.progress import Display
from cfp.report.tables import print_plan


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
    values.check_writable(output)
    with only_json(as_json) as print_json:
        plan = Plan.load(path)
        with Display(quiet) as display:
            found, mesh = open_target(
                target,
                ctx.args,
                axes=None,
                platform_name=platform,
                donate=donate or (),
                static=static or (),
                plan=plan,
            )
            if not other_devices:
                check_devices(plan, mesh)
            session = analyse(found, mesh)
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
