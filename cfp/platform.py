"""Devices of a command: selects JAX's platform, then makes the mesh.

JAX reads its environment variables at the first use of a device. A command therefore
calls `select` first, and `make_mesh` after it.
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
    """Reads mesh axes from ``--devices 4`` or ``--mesh x=2,y=2``; None if neither.

    Raises:
        CfpError: the text is no mesh, or the two contradict each other.
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
    """Lists the mesh shapes of a number of devices, with up to three axes.

    Sizes do not decrease from axis to axis: other orders of the same sizes are left
    out, since they only change which devices are neighbours.
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
    """Makes JAX use a platform, with the mesh's number of virtual devices on CPUs.

    Then joins other processes of the command, if it was started as one of several.

    Args:
        platform: "cpu", "cuda", or None for JAX's choice.
        axes: the mesh, or None for all devices (four on CPUs).

    Raises:
        CfpError: the platform is unknown, or cannot have so many virtual devices.
        ProcessError: other processes of the command did not connect in time.
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
    # JAX has already read the variable, at its import.
    jax.config.update("jax_platforms", platform)
    if platform == "cpu":
        os.environ["XLA_FLAGS"] = flags_for_devices(_share(count))


def flags_for_devices(count: int) -> str:
    """Returns the text of ``XLA_FLAGS`` changed to a number of virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith(_COUNT_FLAG)]
    return " ".join([*kept, f"{_COUNT_FLAG}={count}"])


def _share(count: int) -> int:
    """Returns the number of a mesh's virtual devices that this process has."""
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
    """Makes a command's mesh; with all devices if axes is None.

    Raises:
        CfpError: too few devices are there, or none works; or axes is None, and the
            only device is a CPU.
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
    """Makes a mesh of the first devices; of all, with one axis x, if axes is None.

    Args:
        remedy: sentence for the error of missing devices, in place of the usual one.

    Raises:
        CfpError: too few devices are there, or none works.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX raises AssertionError if JAX_PLATFORMS names a platform without a plugin.
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
    """Makes meshes of all devices, by name such as ``x=2,y=4``, up to `most_axes` axes.

    Raises:
        CfpError: no device works.
    """
    shapes = mesh_shapes(make_mesh(None).size)
    return {
        mesh_text(axes): make_mesh(axes) for axes in shapes if len(axes) <= most_axes
    }


def _by_process(devices: Sequence[Any]) -> str:
    """Writes ``: 4 in process 0, 4 in process 1``; "" for one process."""
    counts = Counter(device.process_index for device in devices)
    if len(counts) == 1:
        return ""
    each = ", ".join(f"{count} in process {i}" for i, count in sorted(counts.items()))
    return f": {each}"
