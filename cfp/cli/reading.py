"""The commands that read plans and compiled programs: show, export, inspect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import typer
from jax.tree_util import keystr, tree_flatten_with_path

from cfp import api
from cfp.cli import options as o
from cfp.cli.options import mode_of, only_json
from cfp.cli.session import check_writable, planned_target, target_of
from cfp.errors import CfpError, StepNotTraceable
from cfp.export.module import Names, Rules, logical_rules, names_by_path
from cfp.models import NAMES, load
from cfp.plan.parts import check_arguments
from cfp.plan.plan import Plan
from cfp.printable import printable
from cfp.profiling.hlo import collective_sites
from cfp.report.passes import sites_text
from cfp.report.progress import Display
from cfp.targets import Target, parse_options
from cfp.view.console import wrapped
from cfp.view.text import diff_data, diff_text, explain_data, explain_text, print_plan
from cfp.view.words import headline

# Options of `cfp show` that go with each mode, by parameter.
_SHOW_TAKES = {
    "explain": ("path", "block", "as_json"),
    "diff": ("path", "as_json"),
    "html": ("path",),
}


@o.command(
    *("path", "explain", "block", "diff", "html", "as_json"),
    explain=o.Option(
        bool, "Explain the choice for each block, and the cost of the runner-up."
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
)
def show(ctx: typer.Context, given: Any) -> None:
    """Show a saved plan: as a table, explained, against another one, or as HTML.

    Example: cfp show plan.json --explain --block layer_0

    Example: cfp show before.json --diff after.json

    Example: cfp show plan.json --html plan.html
    """
    mode_of(ctx, _SHOW_TAKES, {"block": "explain"})
    check_writable(given.html, "--html")
    plan = Plan.load(given.path)
    if given.html is not None:
        plan.report(given.html)
        print(f"Saved {given.html}")
    elif given.diff is not None:
        other = Plan.load(given.diff)
        if given.as_json:
            print(json.dumps(diff_data(plan, other), indent=1))
        else:
            names = str(given.path), str(given.diff)
            print(diff_text(plan, other, names), end="")
    elif given.explain:
        if given.as_json:
            print(json.dumps(explain_data(plan, given.block), indent=1))
        else:
            print(explain_text(plan, given.block), end="")
    elif given.as_json:
        print(plan.to_json())
    else:
        print_plan(plan)


@o.command(
    *("path", "target", "python", "flax", "maxtext", "static"),
    target=o.Argument(
        str,
        "[TARGET]",
        "The planned step and its options. Needed for --flax-logical and "
        "--maxtext-rules (names of dims), and for plans that replace kernels or "
        "rematerialize.",
        default=None,
    ),
    python=o.Option(
        Path,
        "Write a Python module that runs the step with plain JAX.",
        *("--python", "--output", "-o"),
        metavar="FILE",
    ),
    flax=o.Option(
        Path,
        "Write rules from logical names to axes, for nn.logical_to_mesh_sharding.",
        "--flax-logical",
        metavar="FILE",
    ),
    maxtext=o.Option(
        Path,
        "Write logical_axis_rules for a configuration of MaxText.",
        "--maxtext-rules",
        metavar="FILE",
    ),
)
def export(ctx: typer.Context, given: Any) -> None:
    """Write a plan as Python that needs JAX alone, or as rules for logical names.

    The module has the shardings of all arguments and results, and the constraints in
    the step, by line. Its function shard compiles the step under them. A plan that
    replaces kernels or rematerializes needs TARGET: its program goes into the module.
    Rules need TARGET, too: its parameters carry the names.

    Example: cfp export plan.json --python sharded.py

    Example: cfp export plan.json gpt --layers 4 --flax-logical rules.py
    """
    target, python, flax, maxtext = (
        given.target,
        given.python,
        given.flax,
        given.maxtext,
    )
    options = {"--python": python, "--flax-logical": flax, "--maxtext-rules": maxtext}
    wanted = {option: file for option, file in options.items() if file is not None}
    if not wanted:
        raise CfpError(f"Name a file to write, with {', '.join(options)}.")
    for option, file in wanted.items():
        check_writable(file, option)
    plan = Plan.load(given.path)
    found, exported = None, plan
    if target is not None and python is not None and plan.changes_ops:
        attempt = "this command on a machine with the plan's devices"
        found, mesh = target_of(ctx, plan, attempt)
        exported = plan.bind(found.step, *found.args, mesh=mesh)
    elif target is not None:
        found = planned_target(target, ctx.args, plan, static=given.static or ())
        check_arguments(plan.arg_names, plan.arg_types, found.flatten())
    if python is not None:
        exported.export_python(python)
    if flax is not None or maxtext is not None:
        if found is None:
            raise CfpError(
                "A plan has no logical names of dims. Name its step, whose "
                "parameters have logical names: cfp export plan.json TARGET ..."
            )
        rules = logical_rules(plan, names_of(plan, found, ctx.args))
        if flax is not None:
            flax.write_text(flax_text(plan, rules), encoding="utf-8")
        if maxtext is not None:
            maxtext.write_text(maxtext_text(plan, rules), encoding="utf-8")
    for file in wanted.values():
        print(f"Saved {file}")
    if target is not None and not plan.changes_ops and [*wanted] == ["--python"]:
        print(
            wrapped(
                f"{target} has the plan's arguments, and was read for nothing else: "
                "the plan replaces no kernels, rematerializes nothing, and has all "
                "that the module needs"
            )
        )


@o.command(
    *("target", "plan", "preset", "devices", "mesh", "platform", "donate", "static"),
    *("as_json", "quiet"),
    target=o.Argument(
        str,
        "TARGET",
        "A step, as for cfp plan, or a file with the text of a compiled program, of "
        "which the name ends in .txt or .hlo.",
    ),
    plan=o.OPTIONS["saved"],
    platform=o.PLANS_PLATFORM,
)
def inspect(ctx: typer.Context, given: Any) -> None:
    """List a compiled step's collectives with their bytes and source lines.

    The step is compiled under a plan, under a preset, or, with neither, as
    plain jax.jit does with the shardings that its arguments have. Nothing is run.

    Example: cfp inspect gpt --layers 2 --preset zero1 --platform cpu --devices 4
    """
    if given.plan is not None and given.preset is not None:
        raise CfpError("Give --plan plan.json or --preset NAME, not both.")
    with only_json(given.as_json) as print_json:
        if Path(given.target).suffix in (".txt", ".hlo"):
            text = _read(Path(given.target))
        else:
            with Display(given.quiet) as display:
                text = _compiled(ctx, given.plan, given.preset, display)
        sites = collective_sites(text)
        if given.as_json:
            print_json([*map(asdict, sites)])
        else:
            print(sites_text(sites), end="")


def _compiled(
    ctx: typer.Context, path: Path | None, preset: str | None, display: Display
) -> str:
    """Compiles a step, and returns the compiled program's text."""
    saved = Plan.load(path) if path is not None else None
    found, mesh = target_of(ctx, saved)
    if saved is None and preset is not None:
        display.tell("tracing and analysing the step")
        saved = api.plan(
            found.step,
            *found.args,
            mesh=mesh,
            quiet=True,
            static_argnums=found.static,
            donate_argnums=found.donate,
            preset=preset,
            settings=o.settings(per_kind=1, quick=True, no_race=True),
        )
    display.tell("compiling the step")
    if saved is None:
        return _plainly(found)
    used = saved.on(mesh)
    compiled = used.compile(found.step, *found.args, donate_argnums=found.donate)
    return compiled.as_text()


def _read(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CfpError(f"Cannot read {path}: {error}.") from error
    if "HloModule" not in text:
        raise CfpError(
            f"Expected the text of a compiled program in {path}, which begins with "
            "HloModule. Write it with path.write_text(compiled.as_text())."
        )
    return text


def _plainly(target: Target) -> str:
    step = target.flatten()
    # Over flat leaves: modules may hold values that jax.jit takes for no array.
    given = tuple(place for place, donated in enumerate(step.donated) if donated)
    jitted = jax.jit(step.flat_fn, donate_argnums=given)
    try:
        leaves = step.flatten(target.args, {})
        return jitted.lower(*leaves).compile().as_text() or ""
    except Exception as error:
        # The user's code may raise anything while it is traced.
        raise StepNotTraceable(
            f"JAX could not compile the step: {type(error).__name__}: {error}"
        ) from error


# ------------------------------------------- rules for logical names: Flax and MaxText


def names_of(plan: Plan, target: Target, words: Sequence[str]) -> dict[str, Names]:
    """The names of the dims of a target's arguments, by path.

    A model of the zoo knows them. Other arguments have them as Flax keeps them: in
    boxes such as `nn.LogicallyPartitioned`.

    Args:
        words: the options that followed its name.
    """
    if target.name in NAMES:
        options = parse_options(target.name, words)
        names = load("cfp.models.registry").logical_names(target.name, **options)
        return names_by_path(plan, names)
    return boxed_names(plan, target)


def boxed_names(plan: Plan, target: Target) -> dict[str, Names]:
    """Names of dims from the boxes in a target's arguments."""
    roots = dict.fromkeys(path.partition("/")[0] for path in plan.arg_names)
    dynamic = [a for i, a in enumerate(target.args) if i not in target.static]
    found: dict[str, Names] = {}
    for root, tree in zip(roots, dynamic, strict=False):
        boxes = tree_flatten_with_path(tree, is_leaf=_is_box)[0]
        for path, box in boxes:
            names: Any = getattr(box, "names", None) if _is_box(box) else None
            if names is not None:
                rest = keystr(path, simple=True, separator="/")
                found[f"{root}/{rest}/value" if rest else f"{root}/value"] = names
    return found


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, load("flax.core.meta").AxisMetadata)


def flax_text(plan: Plan, rules: Rules) -> str:
    """A Python module with the rules, for `flax.linen.logical_to_mesh_sharding`."""
    lines = [
        f"    ({name!r}, {_flax_axes(axes)}),  # {'sharded' if axes else 'whole'}"
        for name, axes in rules
    ]
    return "\n".join(
        [
            '"""Rules from logical names of dims to axes of the mesh.',
            "",
            printable(headline(plan)).replace("\\", "\\\\").replace('"""', "'''"),
            "",
            "    specs = nn.get_partition_spec(state)",
            "    nn.logical_to_mesh_sharding(specs, mesh, RULES)",
            '"""',
            "",
            f"MESH_AXES = {dict(plan.mesh_axes)!r}",
            "# In order of precedence.",
            "RULES = (",
            *lines,
            ")",
            "",
        ]
    )


def _flax_axes(axes: tuple[str, ...]) -> str:
    if not axes:
        return "None"
    return repr(axes[0] if len(axes) == 1 else axes)


def maxtext_text(plan: Plan, rules: Rules) -> str:
    """The rules in YAML, as a configuration of MaxText has them."""
    lines = [f"  [{_quoted(name)}, [{_list(axes)}]]," for name, axes in rules]
    axes = [name for name, _ in plan.mesh_axes]
    return "\n".join(
        [
            f"# {printable(headline(plan))}",
            f"mesh_axes: [{_list(axes)}]",
            "# In order of precedence.",
            "logical_axis_rules: [",
            *lines,
            "]",
            "",
        ]
    )


def _list(words: Sequence[str]) -> str:
    return ", ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word in single quotes, as YAML reads them."""
    return "'" + printable(word).replace("'", "''") + "'"
