"""`cfp.plan` on a Ray cluster: a step travels, and its plan comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from cfp.cluster.ray.planning import RunnerNeeds, plan_on_ray
from cfp.errors import DeviceError, compose
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings
from cfp.profiling.place import Place
from cfp.profiling.store import store_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of :func:`cfp.plan`, as data.

    Attributes:
        fn: the step.
        args, kwargs: its arguments: shapes in place of arrays.
        axes: of the mesh.
        options: all other options.
        settings: how much to measure.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    axes: tuple[tuple[str, int], ...]
    options: Mapping[str, Any]
    settings: PlannerSettings


def plan_step(
    plan: Callable[..., Plan],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh | AbstractMesh,
    *,
    cache_dir: str | Path | None,
    settings: PlannerSettings,
    **options: Any,
) -> Plan:
    """Plans a step on the cluster that the settings name.

    Args:
        plan: :func:`cfp.plan`.
        fn: the step.
        args, kwargs: its arguments.
        mesh: the devices that are meant: the first of the runner's.
        cache_dir: where all measurements are kept.
        settings: how much to measure.
        options: as for :func:`cfp.plan`.

    Returns:
        The plan, for the step; on the mesh, if its devices are here.
    """
    address = settings.ray
    assert address is not None, "planning is for a Ray cluster"
    given_args, given_kwargs = jax.tree.map(_shape_of, (args, dict(kwargs)))
    asked = Asked(
        fn=fn,
        args=given_args,
        kwargs=given_kwargs,
        axes=tuple(mesh.shape.items()),
        options=options,
        settings=replace(settings, ray=None, progress=None),
    )
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None
    made = plan_on_ray(
        partial(_plan_there, plan, asked),
        address=address,
        store=store_path(cache_dir),
        needs=RunnerNeeds.of(platform, asked.axes),
    )
    made = made.on(mesh) if isinstance(mesh, Mesh) else made
    return made.bind(fn, *args, **kwargs)


def alone(plan: Plan) -> Plan:
    """A plan as a file would have it: without step, devices and programs."""
    return replace(
        plan,
        sites=plan.found_sites,
        mesh=None,
        step=None,
        out_tree=None,
        raced=None,
        tuned=None,
    )


def _plan_there(
    plan: Callable[..., Plan], asked: Asked, place: Place, folder: Path
) -> Plan:
    names = tuple(name for name, _ in asked.axes)
    sizes = tuple(size for _, size in asked.axes)
    devices = jax.devices()
    count = AbstractMesh(sizes, names).size
    if len(devices) < count:
        raise DeviceError(
            compose(
                "The runner has too few devices.",
                expected=f"{count} devices",
                got=f"{len(devices)} of platform {devices[0].platform}",
                attempt="a smaller mesh; for virtual CPU devices, XLA_FLAGS="
                f"--xla_force_host_platform_device_count={count} where this runs",
            )
        )
    made = plan(
        asked.fn,
        *asked.args,
        mesh=jax.make_mesh(sizes, names, devices=devices[:count]),
        quiet=True,
        cache_dir=folder,
        settings=replace(asked.settings, place=place),
        **asked.options,
        **asked.kwargs,
    )
    return alone(made)


def _shape_of(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return value
