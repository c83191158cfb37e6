"""Writes what was measured of devices that are here as a description of them."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from jax.sharding import Mesh

from cfp.errors import MeshError, compose
from cfp.profiling.rates import KINDS, Rates


def description_of(mesh: Mesh, rates: Rates) -> str:
    """A description of a host's devices, in TOML, for `cfp.devices.described`.

    Args:
        mesh: the devices, of one host, on one axis.
        rates: measured on them.

    Raises:
        MeshError: the mesh has several axes.
    """
    sizes = [(name, size) for name, size in mesh.shape.items() if size > 1]
    if len(sizes) != 1:
        raise MeshError(
            compose(
                "Curves of one axis describe the links of a host.",
                expected="a mesh with one axis, of the devices of one host",
                got=" x ".join(f"{n}={s}" for n, s in mesh.shape.items()),
                attempt=f"--mesh x={mesh.size} --describe FILE",
            )
        )
    [(axis, count)] = sizes
    device = mesh.local_devices[0]
    source = (
        f"measured on {count} of {device.device_kind}, {datetime.now(UTC):%Y-%m-%d}"
    )

    def number(value: float) -> str:
        return f'{{ value = {value:.6g}, basis = "measured", source = "{source}" }}'

    lines = [
        f'device_kind = "{device.device_kind}"',
        "aliases = []",
        f"devices_per_host = {count}",
        "",
        f"memory_gib = {number(_memory_bytes(mesh) / 2**30)}",
        *(
            f"{dtype}_tflop_per_s = {number(rate / 1e9)}"
            for dtype, rate in rates.matmul_flops_per_ms.items()
        ),
        f"memory_gb_per_s = {number(rates.memory_bytes_per_ms / 1e6)}",
        "",
        "# [bytes of the whole tensor of a group, ms]",
        "[curves]",
        f"devices = {count}",
        'basis = "measured"',
        f'source = "{source}"',
    ]
    for kind in KINDS:
        lines.append(f"{kind} = [")
        points = rates.curves[kind, (axis,)]
        lines += [f"    [{size}, {ms:.6g}]," for size, ms in points]
        lines.append("]")
    return "\n".join(lines) + "\n"


def _memory_bytes(mesh: Mesh) -> float:
    """All memory of a device; of virtual ones a part of the host's."""
    stats = mesh.local_devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
        return stats["bytes_limit"] / fraction
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size
