"""From a command's options to an analysed program on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from jax.sharding import Mesh

from cfp import platform
from cfp.analysis.analyze import Analysis
from cfp.analysis.dump import GLOBAL_FOLDER, dump_analysis
from cfp.cli.output import leave_printing_to_process_0
from cfp.devices.joining import is_follower
from cfp.passes.pipeline import Pins, analyze_step
from cfp.plan.plan import Plan
from cfp.program.step import FlatStep
from cfp.program.trace import Lowering
from cfp.targets import Target, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A target, analysed.

    Attributes:
        target: what was asked for.
        mesh: the devices.
        step: the target's step over flat arguments.
        lowering: its module.
        analysis: its blocks and segments.
        seconds: how long tracing and analysing took.
    """

    target: Target
    mesh: Mesh
    step: FlatStep
    lowering: Lowering
    analysis: Analysis
    seconds: float


def target_of(ctx: typer.Context) -> tuple[Target, Mesh]:
    """The target and the devices that a command was given.

    Raises:
        CfpError: there is no such target, mesh, platform or number of devices.
    """
    given = ctx.params
    return open_target(
        given["target"],
        ctx.args,
        axes=platform.parse_mesh(given["devices"], given["mesh"]),
        platform_name=given["platform"],
        donate=given["donate"] or (),
        static=given["static"] or (),
    )


def open_target(
    text: str,
    options: Sequence[str] = (),
    *,
    axes: platform.Axes | None,
    platform_name: str | None,
    donate: Sequence[int] = (),
    static: Sequence[int] = (),
    plan: Plan | None = None,
    attempt: str = "this command on a machine with the plan's devices; or --platform "
    "cpu, which makes virtual ones",
) -> tuple[Target, Mesh]:
    """Finds a target and its devices.

    Args:
        text, options: the target, as on the command line.
        axes, platform_name: of the devices, if asked for.
        donate, static: positions of arguments.
        plan: whose mesh and platform it is where none are asked for.
        attempt: what to try where the plan's devices are missing.

    Raises:
        CfpError: there is no such target, platform or number of devices.
    """
    of_plan = plan is not None and axes is None
    kind = ""
    if plan is not None:
        kind = "" if platform_name else plan.environment.get("device_kind", "")
        axes = axes or plan.mesh_axes
        on_cpu = plan.environment.get("platform") == "cpu"
        platform_name = platform_name or ("cpu" if on_cpu else None)
    platform.select(platform_name, axes)
    leave_printing_to_process_0()
    # The target first: to say that it does not exist takes no device.
    target = resolve(text, options, donate=donate, static=static)
    if not of_plan:
        return target, platform.make_mesh(axes)
    return target, platform.make_mesh(axes, device_kind=kind, attempt=attempt)


def analyse(
    target: Target, mesh: Mesh, pins: Pins | None = None, plan: Plan | None = None
) -> Session:
    """Traces and analyses a target.

    Args:
        target: the step.
        mesh: the devices.
        pins: shardings to keep.
        plan: of the step, which may keep state in the memory of the host.

    Raises:
        CfpError: its step cannot be traced, or the pins do not fit.
    """
    step = target.flatten()
    if plan is not None:
        step = step.with_state_in_host(plan.in_host)
    found = analyze_step(step, mesh, pins)
    assert isinstance(found.mesh, Mesh), "its devices are there"
    return Session(
        target=target,
        mesh=found.mesh,
        step=step,
        lowering=found.lowering,
        analysis=found.analysis,
        seconds=found.seconds,
    )


def dump_session(session: Session, workdir: Path | None) -> Path | None:
    """Writes the analysis below the working folder, if there is one."""
    if workdir is None or is_follower():
        return None
    folder = workdir / GLOBAL_FOLDER
    dump_analysis(folder, session.analysis, session.lowering.text)
    return folder
