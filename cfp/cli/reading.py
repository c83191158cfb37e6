"""The commands that read plans: show and export."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from cfp.cli import options as o
from cfp.cli.options import Answer, mode_of
from cfp.cli.session import check_writable, target_of
from cfp.plan.plan import Plan
from cfp.view.diff import diff_data, diff_text
from cfp.view.explain import explain_text
from cfp.view.python import python_text
from cfp.view.text import print_plan

# Options of `cfp show` that go with each mode, by parameter.
_SHOW_TAKES = {
    "explain": ("path", "block"),
    "diff": ("path", "as_json"),
    "html": ("path",),
    "python": ("path",),
}


@o.command(
    *("path", "explain", "block", "diff", "html", "python", "as_json"),
    explain=o.Option(
        bool, "Explain each block, with the cost of all strategies for it."
    ),
    block=o.Option(
        str,
        "With --explain: only blocks with this in their names, in upper or lower case; "
        "* stands for anything.",
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
    *("path", "target", "output", "static", "other_devices"),
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

    The file has the program with its shardings. What is printed runs it.

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
    """Python that runs an exported step on the leaves of its arguments."""
    names, sizes = [*zip(*plan.mesh_axes, strict=True)] or [("x",), (1,)]
    donated = [i for i, one in enumerate(plan.donated) if one]
    options = f", compiler_options={dict(plan.options)!r}" if plan.options else ""
    return f"""\
import jax

with open({str(path)!r}, "rb") as file:
    exported = jax.export.deserialize(bytearray(file.read()))
auto = (jax.sharding.AxisType.Auto,) * {len(sizes)}
mesh = jax.make_mesh({sizes}, {names}, axis_types=auto)
step = jax.jit(exported.call, donate_argnums={donated}{options})
leaves = jax.device_put(jax.tree.leaves(args), [*exported.in_shardings_jax(mesh)])
results = step(*leaves)
"""
