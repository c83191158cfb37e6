"""Devices of a command, selected before JAX looks for any.

JAX reads these variables at the first use of a device. A command calls `select` first,
and `make_mesh` after it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh

from cfp.devices.joining import Membership, join_if_asked
from cfp.errors import CfpError
from cfp.printable import mesh_text

PLATFORMS = ("cpu", "cuda", "tpu")
DEFAULT_CPU_DEVICES = 4
MOST_CPU_DEVICES = 4096

Axes = tuple[tuple[str, int], ...]

_AXIS_NAMES = ("x", "y", "z")
_COUNT_FLAG = "--xla_force_host_platform_device_count"
_AXIS = re.compile(r"([A-Za-z_]\w*)=0*([1-9]\d*)")

_NO_DEVICE = (
    "Give --for 4xh200 to plan for GPUs that are not here, or --platform cpu for "
    "virtual devices; for GPUs install cfp[cuda], and see that nvidia-smi lists them."
)


def parse_mesh(devices: int | None, mesh: str | None) -> Axes | None:
    """The mesh's axes from ``--devices 4`` or ``--mesh x=2,y=2``; None if neither.

    Raises:
        CfpError: the text is no mesh.
    """
    if mesh is None:
        axes = None if devices is None else (("x", devices),)
    else:
        parts = [_AXIS.fullmatch(part.strip()) for part in mesh.split(",")]
        names = [part[1] for part in parts if part]
        if not all(parts) or len(set(names)) < len(parts):
            raise CfpError(
                f"The mesh {mesh!r} cannot be read. Give each axis once, as in --mesh "
                "x=4 or --mesh x=2,y=2."
            )
        axes = tuple((part[1], int(part[2])) for part in parts if part)
        if devices is not None and devices != prod(size for _, size in axes):
            raise CfpError(
                f"--devices {devices} and the mesh {mesh} contradict each other. Give "
                "only one of them."
            )
    return axes


def mesh_shapes(count: int) -> list[Axes]:
    """The shapes of meshes with so many devices, of up to three axes.

    Sizes grow from axis to axis. The same sizes in another order are the same mesh but
    for which devices are neighbours.
    """
    sizes = [
        (first, second, count // first // second)
        for first in range(1, count + 1)
        for second in range(first, count // first + 1)
        if count % (first * second) == 0 and first * second**2 <= count
    ]
    shapes = [tuple(size for size in shape if size > 1) or (1,) for shape in sizes]
    shapes.sort(key=len)
    return [tuple(zip(_AXIS_NAMES, shape, strict=False)) for shape in shapes]


def select(platform: str | None, axes: Axes | None) -> None:
    """Makes JAX use a platform; on CPUs with as many virtual devices as the mesh has.

    Args:
        platform: "cpu", "cuda", or None for JAX's choice.
        axes: the mesh, or None for all devices (four on CPUs).

    Raises:
        CfpError: the platform is unknown, or cannot have so many virtual devices.
        ProcessError: this is one of several processes, and the others do not come.
    """
    if platform is not None:
        _select(platform, axes)
    join_if_asked()


def _select(platform: str, axes: Axes | None) -> None:
    count = prod(size for _, size in axes) if axes else DEFAULT_CPU_DEVICES
    if platform not in PLATFORMS:
        raise CfpError(
            f"There is no platform {platform!r}. Give --platform "
            f"{'cuda' if platform == 'gpu' else ' or --platform '.join(PLATFORMS)}."
        )
    if platform == "cpu" and count > MOST_CPU_DEVICES:
        raise CfpError(
            f"There cannot be {count} virtual devices, each with threads of its "
            f"own. Give a mesh of up to {MOST_CPU_DEVICES}."
        )
    os.environ["JAX_PLATFORMS"] = platform
    # JAX has read the variable when it was imported.
    jax.config.update("jax_platforms", platform)
    if platform == "cpu":
        os.environ["XLA_FLAGS"] = flags_for_devices(_share(count))


def flags_for_devices(count: int) -> str:
    """Returns ``XLA_FLAGS`` with a number of virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith(_COUNT_FLAG)]
    return " ".join([*kept, f"{_COUNT_FLAG}={count}"])


def _share(count: int) -> int:
    """Counts this process's share of virtual devices, among several processes."""
    member = Membership.of(None, None, None, os.environ)
    if member is None:
        return count
    if count < member.processes:
        raise CfpError(
            f"{count} devices are too few for {member.processes} processes. Give a "
            "larger mesh, or start fewer processes."
        )
    each, more = divmod(count, member.processes)
    return each + (member.process_id < more)


def make_asked_mesh(axes: Axes | None) -> Mesh:
    """The mesh that a command was asked for; over all devices, if axes is None.

    Raises:
        CfpError: there are too few devices, or none that work.
        CfpError: nothing was asked for, and there is one CPU: GPUs were meant, or
            virtual devices.
    """
    mesh = make_mesh(axes)
    if axes is None and mesh.size == 1 and mesh.devices.flat[0].platform == "cpu":
        raise CfpError(
            "This machine has one device, a CPU. Give --devices 4 --platform cpu "
            "for virtual devices, --for 4xh200 to plan for GPUs that are not here, "
            "or --devices 1."
        )
    return mesh


def make_mesh(axes: Axes | None, *, remedy: str = "") -> Mesh:
    """A mesh of the first devices; over all of them, with one axis x, if axes is None.

    Args:
        remedy: a sentence on what to do where devices are missing, if not the usual.

    Raises:
        CfpError: there are too few devices, or none that work.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX asserts that some platform works, where the one named has no plugin.
        reason = (str(error).strip().splitlines() or ["no plugin for the platform"])[0]
        raise CfpError(
            f"JAX finds no device: {reason}. {remedy or _NO_DEVICE}"
        ) from error
    if axes is None:
        axes = parse_mesh(len(devices), None)
        assert axes is not None
    wanted = prod(size for _, size in axes)
    kind = devices[0].platform
    if len(devices) < wanted:
        fewer = f"--devices {len(devices)}, or " if len(devices) > 1 else ""
        remedy = remedy or f"Give {fewer}--platform cpu for virtual devices."
        raise CfpError(
            f"There are too few devices: the mesh {mesh_text(axes)} needs {wanted}, "
            f"and here are {len(devices)} of platform {kind}"
            f"{_by_process(devices)}. {remedy}"
        )
    names, sizes = zip(*axes, strict=True)
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, kinds, devices=devices[:wanted])


def all_meshes(most_axes: int) -> dict[str, Mesh]:
    """Makes the meshes of all devices, by name.

    Raises:
        CfpError: no device works.
    """
    shapes = mesh_shapes(make_mesh(None).size)
    return {
        mesh_text(axes): make_mesh(axes) for axes in shapes if len(axes) <= most_axes
    }


def _by_process(devices: Sequence[Any]) -> str:
    """Lists the numbers of devices of all processes; "" if there is one process."""
    counts = Counter(device.process_index for device in devices)
    if len(counts) == 1:
        return ""
    each = ", ".join(f"{count} in process {i}" for i, count in sorted(counts.items()))
    return f": {each}"
