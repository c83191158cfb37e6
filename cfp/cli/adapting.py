"""`cfp adapt`: a plan's choices for more layers, or another batch size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cfp.cli import options as o
from cfp.cli import values
from cfp.cli.finding import Output
from cfp.cli.output import save
from cfp.cli.session import analyse, open_target
from cfp.plan.adapt import carry_over
from cfp.plan.plan import Plan
from cfp.report.tables import print_plan


@o.command
def adapt(
    ctx: typer.Context,
    path: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A saved plan.", show_default=False)
    ],
    target: o.TargetText,
    platform: o.PlansPlatform = None,
    output: Output = None,
    as_json: o.Json = False,
    donate: o.Donate = None,
    static: o.Static = None,
) -> None:
    """Carry a plan over to more layers of the same segments, or to another batch.

    Nothing is compiled or measured: the new plan is marked as predicted, and cfp verify
    times it. Refused, with the first difference, where segments do not match.

    Example: cfp adapt plan.json gpt --layers 48 -o deeper.json
    """
    values.check_writable(output)
    with o.only_json(as_json) as print_json:
        plan = Plan.load(path)
        found, mesh = open_target(
            target,
            ctx.args,
            axes=None,
            platform_name=platform,
            donate=donate or (),
            static=static or (),
            plan=plan,
        )
        session = analyse(found, mesh)
        made = carry_over(
            plan, session.analysis, session.step, session.lowering.out_tree, mesh
        )
        save(made, output, say=not as_json)
        if as_json:
            print_json(json.dumps(json.loads(made.to_json()), indent=1))
        else:
            print_plan(made, Console())
