"""Kinds of devices and clusters, as data files describe them, and the files' schema.

Every number has its source. A specified rate is a peak. GPUs reach a share of it: the
share of the measured kind is assumed for the others. No TPU was measured, and their
published rates count in full.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from jax.sharding import Mesh
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cfp.errors import CfpError, known_names
from cfp.profiling.rates import KINDS, Curve, Rates, rising

Count = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
Positive = Annotated[float, Field(strict=True, gt=0)]
Points = Annotated[list[tuple[Positive, Positive]], Field(min_length=2)]
Basis = Literal["measured", "specified"]


class _Table(BaseModel):
    """A table of TOML without other names than those of its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Number(_Table):
    """A number with its origin; in a file, a number alone is a specification.

    The origin is for readers of the file: here only the basis matters.

    Attributes:
        value: in the unit of its name.
        basis: "measured" or "specified".
        source: a record of ours, or a document of the vendor.
    """

    value: Annotated[float, Field(strict=True, gt=0, lt=1e7)]
    basis: Basis = "specified"
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        return data if isinstance(data, Mapping) else {"value": data}


class Curves(_Table):
    """Times of collectives by size: [bytes, milliseconds].

    Attributes:
        devices: number of devices of a host that took part.
    """

    devices: Count = 2
    basis: Basis = "specified"
    source: str = ""
    all_reduce: Points = Field(alias="all-reduce")
    all_gather: Points = Field(alias="all-gather")
    reduce_scatter: Points = Field(alias="reduce-scatter")
    all_to_all: Points = Field(alias="all-to-all")

    @property
    def times(self) -> Mapping[str, Curve]:
        """Curves by kind of collective, as `cfp.profiling.rates` names them."""
        values = self.model_dump(by_alias=True)
        return {k: rising((int(size), ms) for size, ms in values[k]) for k in KINDS}


class DeviceKind(_Table):
    """A kind of device, or a cluster of some.

    Attributes:
        hosts, devices_per_host: of a cluster; for a kind, the most devices of a host.
        measured: measured rates, beside the specified ones.
        link_gb_per_s: of TPUs the rate of one link in one direction; each dim of a
            slice has two links.
        link_latency_us: of TPUs the time from a device to its neighbour.
        target_config: of GPUs the description for XLA's compiler, in its own format.
        torus_dims: of TPUs the number of dims of a slice; 0 without a torus.
        torus_ring: a slice's dim of a multiple of this closes to a ring.
    """

    name: str
    device_kind: str = ""
    aliases: tuple[str, ...] = ()
    hosts: Count = 1
    devices_per_host: Count = 8
    memory_gib: Number
    bfloat16_tflop_per_s: Number
    float32_tflop_per_s: Number
    memory_gb_per_s: Number
    link_gb_per_s: Number | None = None
    link_latency_us: Number = Number(value=1.0)
    network_gb_per_s: Number | None = None
    # One message over a network of InfiniBand or RoCE, where a description says
    # nothing: about what network adapters are sold with.
    network_latency_us: Number = Number(value=5.0)
    target_config: str = ""
    torus_dims: int = 0
    torus_ring: int = 1
    measured: dict[str, Number] = {}
    curves: Curves | None = None

    @model_validator(mode="after")
    def _has_links(self) -> DeviceKind:
        if self.curves is None and self.link_gb_per_s is None:
            raise ValueError("a device needs link_gb_per_s, or curves")
        return self

    @property
    def platform(self) -> str:
        """The platform by JAX's name."""
        return "tpu" if self.torus_dims else "gpu"

    @property
    def memory_bytes(self) -> int:
        """Memory of a device."""
        return int(self.memory_gib.value * 2**30)

    def specified(self, name: str) -> float:
        """A rate as its file specifies it."""
        return getattr(self, name).value

    def expected(self, name: str) -> float:
        """Returns a rate that programs reach: measured, or a share of the specified."""
        own: Number = self.measured.get(name) or getattr(self, name)
        if own.basis == "measured" or self.torus_dims:
            return own.value
        known = kind(_MEASURED_KIND)
        return own.value * known.measured[name].value / known.specified(name)

    @property
    def link_times(self) -> tuple[int, Mapping[str, Curve]]:
        """Returns the devices of a host, and times of their collectives, by kind.

        The times are measured, or the measured kind's at the bandwidth of the own
        links.
        """
        if self.curves is not None:
            return self.curves.devices, self.curves.times
        known = kind(_MEASURED_KIND)
        assert known.curves and known.link_gb_per_s and self.link_gb_per_s
        slower = known.link_gb_per_s.value / self.link_gb_per_s.value
        times = {
            what: tuple(
                (size, curve[0][1] + (ms - curve[0][1]) * slower) for size, ms in curve
            )
            for what, curve in known.curves.times.items()
        }
        return known.curves.devices, times


# The kind whose measurements say what share of a specification GPUs reach.
_MEASURED_KIND = "h200"
_FOLDER = resources.files("cfp.devices").joinpath("kinds")


def read(data: Mapping[str, Any], name: str, where: str) -> DeviceKind:
    """Reads a parsed description, which may start from a shipped kind.

    Its own numbers win, also over measured ones of that kind.

    Raises:
        CfpError: a name is unknown, or a value is missing or not allowed.
    """
    data = dict(data)
    if isinstance(start := data.pop("kind", None), str):
        base = kind(start).model_dump(by_alias=True, exclude_unset=True)
        measured = base.get("measured", {}).items()
        base["measured"] = {k: number for k, number in measured if k not in data}
        if "link_gb_per_s" in data:
            base.pop("curves", None)
        data = base | data
    try:
        return DeviceKind.model_validate({"name": name, "device_kind": name, **data})
    except ValidationError as error:
        first, near = error.errors()[0], ""
        path = ".".join(map(str, first["loc"]))
        value = "" if first["type"] == "missing" else f" = {first['input']!r}"[:200]
        if first["type"] == "extra_forbidden":
            near = f"{known_names(path, DeviceKind.model_fields)} "
        raise CfpError(
            f"{where}: {path}{value}: {first['msg']}. {near}kind = "
            f'"{_MEASURED_KIND}" starts from a shipped kind; see '
            "docs/planning-ahead.md."
        ) from error


@cache
def kinds() -> Mapping[str, DeviceKind]:
    """The shipped kinds, by each name that they go by."""
    found = {}
    for file in _FOLDER.iterdir():
        if file.name.endswith(".toml"):
            data = tomllib.loads(file.read_text(encoding="utf-8"))
            one = read(data, file.name.removesuffix(".toml"), file.name)
            found |= dict.fromkeys((one.name, *one.aliases), one)
    return dict(sorted(found.items()))


def kind(name: str) -> DeviceKind:
    """Returns a shipped kind by its name.

    Raises:
        CfpError: the name is unknown.
    """
    if (known := kinds().get(name.lower())) is None:
        raise CfpError(
            f"There is no kind of device {name!r}. {known_names(name, kinds())} A file "
            'describes another: --for cluster.toml, cfp.described("cluster.toml").'
        )
    return known


@cache
def kind_of(device_kind: str) -> DeviceKind | None:
    """Returns a shipped kind by JAX's name for it, or None."""
    every = kinds().values()
    return next((one for one in every if one.device_kind == device_kind), None)


def description_of(mesh: Mesh, rates: Rates) -> str:
    """A description of a host's devices, in TOML, for `cfp.devices.described`.

    Args:
        mesh: the devices, of one host, on one axis.

    Raises:
        CfpError: the mesh has several axes.
    """
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    if len(sizes) != 1:
        raise CfpError(
            "A host is described by curves of one axis, and the mesh is "
            f"{dict(mesh.shape)}. Give --mesh x={mesh.size} --describe FILE."
        )
    [(axis, count)] = sizes.items()
    device = mesh.local_devices[0]
    source = (
        f"measured on {count} of {device.device_kind}, {datetime.now(UTC):%Y-%m-%d}"
    )
    numbers = {
        "memory_gib": _memory_bytes(mesh) / 2**30,
        **{f"{t}_tflop_per_s": r / 1e9 for t, r in rates.matmul_flops_per_ms.items()},
        "memory_gb_per_s": rates.memory_bytes_per_ms / 1e6,
    }
    origin = 'basis = "measured"', f'source = "{source}"'
    measured = ", ".join(origin)
    lines = [
        f'device_kind = "{device.device_kind}"',
        f"devices_per_host = {count}",
        *(f"{k} = {{ value = {v:.6g}, {measured} }}" for k, v in numbers.items()),
        "",
        "# [bytes of the whole tensor of a group, ms]",
        "[curves]",
        f"devices = {count}",
        *origin,
    ]
    for what in KINDS:
        points = (f"[{size}, {ms:.6g}]" for size, ms in rates.curves[what, (axis,)])
        lines.append(f"{what} = [{', '.join(points)}]")
    return "\n".join(lines) + "\n"


def _memory_bytes(mesh: Mesh) -> float:
    """All memory of a device; of virtual ones a part of the host's."""
    stats = mesh.local_devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
        return stats["bytes_limit"] / fraction
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size
