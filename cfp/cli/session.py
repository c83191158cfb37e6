"""From a command's options to an analysed program on a mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from cfp import platform
from cfp.analysis.dump import GLOBAL_FOLDER, dump_analysis
from cfp.cli.options import leave_printing_to_process_0
from cfp.errors import CfpError
from cfp.models import MODELS
from cfp.passes import Analyzed, Pins, analyze_step
from cfp.plan.parts import check_arguments, check_donated
from cfp.plan.plan import Plan
from cfp.profiling.coordination import is_follower
from cfp.program.step import typed_as_returned
from cfp.targets import Target, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(Analyzed):
    """A target, analysed on a mesh of JAX devices, which may be virtual."""

    target: Target
    mesh: Mesh


def target_of(ctx: Any, plan: Plan | None = None) -> tuple[Target, Mesh]:
    """Selects JAX's platform, finds the target of a command's options, makes its mesh.

    Args:
        ctx: the command's context, or an object with its params and args. Without axes
            the mesh is the plan's, else one of all devices. Without a platform it is
            "cpu" if the plan's is, else JAX's choice.
        plan: a saved plan, whose static arguments are a default, too.

    Raises:
        CfpError: the target or platform is unknown, devices are missing, or a model is
            named for a plan with static arguments.
    """
    given, text = ctx.params, ctx.params["target"]
    axes = platform.parse_mesh(given.get("devices"), given.get("mesh"))
    platform_name, static = given.get("platform"), given["static"] or ()
    of_plan, remedy = plan is not None and axes is None, ""
    if plan is not None:
        kind = plan.environment.get("device_kind", "the planned kind")
        on_cpu = plan.environment.get("platform") == "cpu"
        here = "; or try it here with --other-devices, on virtual ones with "
        here = f"{here}--platform cpu" * (on_cpu or not plan.draws)
        remedy = f"Run this command on devices of {kind}{here}."
        axes = axes or plan.mesh_axes or (("x", 1),)  # A plan of one device has none.
        platform_name = platform_name or ("cpu" if on_cpu else None)
        known = [i for i in plan.static or () if isinstance(i, int)]
        if known and not static and text in MODELS:
            raise CfpError(
                f"The plan's step has static arguments {known}, and {text} has none. "
                "Give the function that was planned, file.py:function."
            )
        static = static or known
    platform.select(platform_name, axes)
    leave_printing_to_process_0()
    # The target first: an unknown target is reported without devices.
    donate = given.get("donate") or ()
    target = resolve(text, ctx.args, donate=donate, static=static)
    if not of_plan:
        return target, platform.make_command_mesh(axes)
    return target, platform.make_mesh(axes, remedy=remedy)


def analyse(
    target: Target, mesh: Mesh, pins: Pins | None = None, plan: Plan | None = None
) -> Session:
    """Traces and analyses a target.

    Args:
        plan: a plan of this step, whose donation and state in host memory are used.

    Raises:
        CfpError: the step cannot be traced, or the pins or the plan do not fit.
    """
    step = target.flatten()
    if plan is not None:
        check_arguments(plan.arg_names, plan.arg_types, step)
        check_donated(plan.donated, step)
        step = step.with_state_in_host(plan.in_host).with_donated(plan.donated)
        step = typed_as_returned(step)
    found = analyze_step(step, mesh, pins)
    assert isinstance(found.mesh, Mesh), "its devices are there"
    parts = {one.name: getattr(found, one.name) for one in fields(found)}
    return Session(target=target, **parts)


def open_session(ctx: Any) -> Session:
    """Traces and analyses the target of a command's options, with its pins."""
    return analyse(*target_of(ctx), parse_pins(ctx.params["pin"]))


def dump_session(session: Session, workdir: Path | None) -> Path | None:
    """Writes the analysis below `workdir` in process 0; returns its folder, or None."""
    if workdir is None or is_follower():
        return None
    folder = workdir / GLOBAL_FOLDER
    dump_analysis(folder, session.analysis, session.lowering.text)
    return folder


# ------------------------------------------------------------------- values of options


def parse_pins(texts: Sequence[str] | None) -> dict[str, PartitionSpec]:
    """Returns {pattern: spec} of ``PATTERN=None,x``; ``x+y`` is two axes of one dim.

    Raises:
        CfpError: a text is no pin.
    """
    pins = {}
    for text in texts or ():
        pattern, equals, spec = text.rpartition("=")
        if not equals or not pattern:
            raise CfpError(
                f"The pin {text!r} cannot be read. Write a pattern, =, and an axis or "
                "None for each dim, such as --pin 'state/params/*/kernel=None,x'."
            )
        entries = [part.strip() for part in spec.split(",")] if spec.strip() else []
        dims = (() if e in ("None", "-", "") else tuple(e.split("+")) for e in entries)
        pins[pattern] = PartitionSpec(
            *(d[0] if len(d) == 1 else d or None for d in dims)
        )
    return pins


def check_writable(path: Path | None, option: str = "-o") -> None:
    """Checks, before anything is measured, that the output file can be written.

    Raises:
        CfpError: the file cannot be written.
    """
    if path is None or is_follower():
        return
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if str(path).startswith("-"):
        problem = f"it looks like an option; a file of that name is ./{path}"
    elif path.is_dir():
        problem = "it is a folder"
    elif there != path and not there.is_dir():
        problem = f"{there} is no folder"
    elif not os.access(there, os.W_OK):
        problem = f"{there} is not writable"
    else:
        return
    raise CfpError(f"Cannot write {path}: {problem}. Name another file with {option}.")
