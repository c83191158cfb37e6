"""Clusters described by text or TOML files, for planning without their devices.

A cluster has hosts with equally many devices of one kind. Devices of a host communicate
over its links, hosts over the network. A mesh takes devices host by host, so that small
last axes stay within a host. In a slice of TPUs, axes lie along the dims of a grid.

The files in `cfp/cost/kinds` describe kinds of devices, with sources for their rates
and memory. A specified rate is a peak, and GPUs reach a share of it. That share was
measured on one kind (H200), and is assumed for GPUs without measured rates. No TPU was
measured: their specified rates count in full.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata, resources
from math import isqrt, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cfp.errors import CfpError, NoSuchFile, known_names
from cfp.profiling.collectives import (
    KINDS,
    Curve,
    Rates,
    axis_groups,
    rising,
    sent_share,
)
from cfp.settings import defaults_of

Axes = tuple[tuple[str, int], ...]

# Share of a GPU's memory that JAX uses by default.
TAKEN_SHARE = 0.75
_SHORT = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)x(?P<kind>[A-Za-z][\w-]*)")
_SLICE = re.compile(r"(?P<kind>[A-Za-z][\w-]*):([1-9]\d*(?:x[1-9]\d*)*)")
_CHIPS = re.compile(r"([A-Za-z]\w*)-(1|2|4|8|16|32|64|128|256)")
# Bytes at the points of a curve that is linear in size.
_SIZES = (1 << 10, 1 << 20, 1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts with equally many devices of one kind, or a slice of TPUs.

    Attributes:
        text: the description, such as "2x8xh100" or "v5e:4x4", or a file's name.
        per_host: devices of a host; a slice counts as one host.
        torus: sizes of a slice's dims; empty for GPUs and files.
    """

    text: str
    kind: DeviceKind = field(repr=False)
    hosts: int
    per_host: int
    torus: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of devices."""
        return self.hosts * self.per_host

    @property
    def rings(self) -> tuple[bool, ...]:
        """For each dim of a slice, True if its ends are linked to form a ring."""
        closed = tuple(size % self.kind.torus_ring == 0 for size in self.torus)
        # Slices of 3 dims consist of cubes, and close only if all cubes are whole.
        return closed if len(closed) < 3 else (all(closed),) * len(closed)

    def has(self, axes: Axes) -> bool:
        """True if `jax.make_mesh` accepts axes of all devices; True without torus."""
        return not self.torus or self.places(axes) is not None

    def places(self, axes: Axes) -> np.ndarray | None:
        """Slice coordinates [*axes, 3] of a mesh's devices; None if JAX refuses it."""
        return _places(self.kind.device_kind, self.torus, tuple(s for _, s in axes))


@dataclass(frozen=True, kw_only=True)
class DescribedMesh:
    """A mesh of a described cluster, for planning.

    Attributes:
        axes: names and sizes; GPUs are taken host by host, along the last axis first.
    """

    cluster: Cluster
    axes: Axes

    @property
    def shape(self) -> Mapping[str, int]:
        """Sizes of the axes by name, like a mesh's."""
        return dict(self.axes)

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh without devices, for lowering."""
        names, sizes = zip(*self.axes, strict=True)
        platform = {"gpu": "cuda"}.get(self.cluster.kind.platform, "tpu")
        device = AbstractDevice(self.cluster.kind.device_kind, None, platform)
        types = (AxisType.Auto,) * len(names)
        return AbstractMesh(sizes, names, axis_types=types, abstract_device=device)

    @property
    def memory_bytes(self) -> int:
        """Bytes of a device's memory that JAX lets programs use by default."""
        share = 1.0 if self.cluster.torus else TAKEN_SHARE
        return int(share * self.cluster.kind.memory_bytes)

    @property
    def crossing(self) -> tuple[str, ...]:
        """Axes along which a group of devices spans hosts; empty for TPU slices."""
        return tuple(n for n, s in self.axes if s > 1 and self._within((n,)) < s)

    @property
    def outer(self) -> frozenset[str]:
        """Axes between hosts; of a slice on several hosts the first one of size > 1."""
        several = self.cluster.count > self.cluster.kind.devices_per_host
        first = [n for n, s in self.axes if s > 1][: bool(self.cluster.torus) * several]
        return frozenset(self.crossing or first)

    @property
    def environment(self) -> dict[str, str]:
        """Facts about the devices and JAX by name, as plans record them."""
        known, of = self.cluster.kind, "x".join(map(str, self.cluster.torus))
        return {
            "described": self.cluster.text,
            "platform": known.platform,
            "device_kind": known.device_kind,
            "devices": str(self.cluster.count),
            **({"slice": f"{known.device_kind} {of}"} if of else {}),
            "hosts": str(self.cluster.hosts),
            "crosses_hosts": ",".join(self.crossing),
            "jax_version": jax.__version__,
            "jaxlib_version": metadata.version("jaxlib"),
        }

    @property
    def rates(self) -> Rates:
        """Expected rates of compute, memory and collectives."""
        known = self.cluster.kind
        curve = self._torus_curve if self.cluster.torus else self._curve
        defaults = defaults_of(known.platform)
        return Rates(
            mesh=self.axes,
            curves={
                (what, group): curve(what, group)
                for what in KINDS
                for group in axis_groups(self.axes)
            },
            matmul_flops_per_ms={
                "float32": known.expected("float32_tflop_per_s") * 1e9,
                "bfloat16": known.expected("bfloat16_tflop_per_s") * 1e9,
            },
            memory_bytes_per_ms=known.expected("memory_gb_per_s") * 1e6,
            combined_bytes=defaults.combined_bytes,
            launch_ms=defaults.launch_ms,
        )

    def _within(self, group: Iterable[str]) -> int:
        """Largest number of a group's devices in one host; the least of all groups."""
        places = np.arange(self.cluster.count).reshape([s for _, s in self.axes])
        # Numbers in a group are its first one plus those of the first group.
        starts = places[self._group(self.shape.keys() - {*group})].ravel()
        numbers = starts[:, None] + places[self._group(group)].ravel()
        hosts = numbers // self.cluster.per_host
        return min(int(np.bincount(row).max()) for row in hosts)

    def _curve(self, what: str, group: tuple[str, ...]) -> Curve:
        """Curve of a collective over GPUs along the axes `group`; may span hosts."""
        known = self.cluster.kind
        ways, times = known.link_times
        points = times[what]
        size = prod(self.shape[name] for name in group)
        near = self._within(group)
        more = sent_share(what, size) / sent_share(what, ways)
        floor = points[0][1]
        inside = [(b, floor + (ms - floor) * more) for b, ms in points]
        if near == size:
            return tuple(inside)
        far = -(-size // near)
        # Each device has a network adapter. A ring uses all adapters of a host at once;
        # in an all-to-all each device sends its own part.
        network, link = known.network_gb_per_s, known.link_gb_per_s
        assert network is not None, "mesh_of has seen it"
        adapter = network.value * 1e6
        if network.basis == "specified" and link is not None:
            # Assume the share of the peak that large collectives reach on a link.
            sent = points[-1][0] * sent_share(what, ways) / (points[-1][1] - floor)
            adapter *= min(1.0, sent / (link.value * 1e6))
        if what == "all-to-all":
            share = (size - near) / size / size / adapter
        else:
            share = sent_share(what, size) / (near * adapter)
        steps = (far - 1) * (2 if what == "all-reduce" else 1)
        waits = steps * known.network_latency_us.value / 1e3
        return tuple((b, max(ms, floor + b * share) + waits) for b, ms in inside)

    def _torus_curve(self, what: str, group: tuple[str, ...]) -> Curve:
        """Curve of a collective along the axes `group` of a torus.

        In each dim, a device has two links if the group fills a ring, else one. An
        all-to-all is bounded by the links between the halves of the group.
        """
        cluster, link = self.cluster, self.cluster.kind.link_gb_per_s
        places = cluster.places(self.axes)
        assert places is not None and link is not None, "mesh_of and read have seen it"
        box = np.ptp(places[self._group(group)].reshape(-1, 3), axis=0) + 1
        size = prod(self.shape[name] for name in group)
        dims = [d for d in range(len(cluster.torus)) if box[d] > 1]
        links = {
            d: 2 if cluster.rings[d] and box[d] == cluster.torus[d] else 1 for d in dims
        }
        # Devices of a group that are not adjacent share links with those in between.
        bytes_per_ms = size / prod(box) * link.value * 1e6
        if what == "all-to-all":
            share = max(box[d] / links[d] for d in dims) / size / 4 / bytes_per_ms
        else:
            share = sent_share(what, size) / sum(links.values()) / bytes_per_ms
        hops = sum((box[d] - 1) / links[d] for d in dims)
        hops *= 2 if what == "all-reduce" else 1
        floor = hops * cluster.kind.link_latency_us.value / 1e3
        return tuple((b, float(floor + b * share)) for b in _SIZES)

    def _group(self, names: Iterable[str]) -> tuple[slice | int, ...]:
        """Index, in the mesh's array, of the first group of devices along some axes."""
        return tuple(slice(None) if n in names else 0 for n, _ in self.axes)


def slice_of(devices: Sequence[Any]) -> str:
    """Returns a slice's name, as ``TPU v5 lite 4x4``; "" if no shipped kind of TPU."""
    if (known := kind_of(devices[0].device_kind)) is None or not known.torus_dims:
        return ""
    box = np.ptp([one.coords for one in devices], axis=0)[: known.torus_dims] + 1
    return f"{known.device_kind} {'x'.join(map(str, box))}"


@cache
def _places(
    device_kind: str, torus: tuple[int, ...], sizes: tuple[int, ...]
) -> np.ndarray | None:
    chip = {"platform": "tpu", "device_kind": device_kind, "core_on_chip": 0}
    places = np.ndindex(*reversed(torus))
    chips = [
        SimpleNamespace(**chip, id=i, process_index=0, coords=(*place[::-1], 0)[:3])
        for i, place in enumerate(places)
    ]
    splits = device_kind == "TPU v5 lite"  # jax.make_mesh splits dims of these only.
    try:
        laid = mesh_utils.create_device_mesh(
            sizes, chips, allow_split_physical_axes=splits
        )
    except NotImplementedError:
        return None
    return np.array([one.coords for one in laid.flat]).reshape(*laid.shape, 3)


def described(text: str, **axes: int) -> DescribedMesh:
    """Makes a mesh of a described cluster, for :func:`cfp.plan`.

    Args:
        text: ``4xh200``, ``2x8xh100`` (hosts x devices per host x kind), ``v5e:4x4`` or
            ``v5e-16`` (a slice of TPUs), or a file: ``cluster.toml``.
        axes: sizes of the mesh's axes, such as ``x=2, y=8``. By default x counts hosts
            and y devices of each; x counts all devices of one host or a slice.

    Raises:
        CfpError: the description is incomplete or unknown, a host has too many devices,
            or the axes do not fit the devices or the slice.
    """
    return mesh_of(cluster_of(text), tuple(axes.items()) or None)


def mesh_of(cluster: Cluster, axes: Axes | None) -> DescribedMesh:
    """Makes a mesh of a cluster's devices; if `axes` is None, by `described`'s default.

    Raises:
        CfpError: the axes do not fit the devices or the slice, or the network between
            hosts is unknown.
    """
    if axes is None:
        sizes = [size for size in (cluster.hosts, cluster.per_host) if size > 1] or [1]
        axes = tuple(zip("xy", sizes, strict=False))
    count, text = prod(size for _, size in axes), cluster.text
    given = " x ".join(f"{name}={size}" for name, size in axes) or "one device"
    if count != cluster.count or any(size < 1 for _, size in axes):
        raise CfpError(
            f"The mesh {given} does not fit {text} (devices = {cluster.count}, hosts = "
            f"{cluster.hosts}, devices_per_host = {cluster.per_host}). Give for "
            f"example x={cluster.count} (--mesh x={cluster.count})."
        )
    found = DescribedMesh(cluster=cluster, axes=axes)
    if not cluster.has(axes):
        raise CfpError(
            f"jax.make_mesh refuses the mesh {given} on the slice {text}: each axis "
            f"must take whole dims of the slice. Give for example x={cluster.count}."
        )
    if cluster.hosts > 1 and cluster.kind.network_gb_per_s is None:
        known, rate = cluster.kind.name, "GB/s from one device to another host"
        remedy = f"Add network_gb_per_s = N ({rate}) to the file."
        if known in kinds():
            remedy = (
                f'Give a file (--for FILE.toml) with kind = "{known}", hosts = '
                f"{cluster.hosts}, devices_per_host = {cluster.per_host}, "
                f"network_gb_per_s = N ({rate})."
            )
        raise CfpError(f"The network between hosts of {known} is unknown. {remedy}")
    return found


def cluster_of(text: str) -> Cluster:
    """Reads a cluster's description in the forms of text that `described` takes.

    Raises:
        CfpError: the text or file is invalid, or a host has too many devices.
    """
    if text.endswith(".toml"):
        path = Path(text)
        try:
            found = read(tomllib.loads(path.read_text()), path.stem, text)
        except (OSError, ValueError) as error:
            absent = isinstance(error, FileNotFoundError)
            raise (NoSuchFile if absent else CfpError)(
                f"The description {path} cannot be read: {type(error).__name__}: "
                f"{error}. docs/planning-ahead.md has an example."
            ) from error
        hosts, per_host = found.hosts, found.devices_per_host
        return Cluster(text=path.name, kind=found, hosts=hosts, per_host=per_host)
    text = text.strip()
    chips = _CHIPS.fullmatch(text)
    if chips and chips[1].lower() in kinds() and kind(chips[1]).torus_dims == 2:
        count = int(chips[2])
        rows = next(n for n in range(isqrt(count), 0, -1) if count % n == 0)
        text = f"{chips[1]}:{rows}x{count // rows}"
    slice_, match = _SLICE.fullmatch(text), _SHORT.fullmatch(text)
    words = match or slice_
    torus = tuple(map(int, slice_[2].split("x"))) if slice_ else ()
    found = kind(words["kind"]) if words else None
    if found is None or len(torus) != found.torus_dims:
        raise CfpError(
            f"The description {text!r} cannot be read. Expected 4xh200, 2x8xh100 "
            "(hosts x devices of each x kind), v5e-16, v5e:4x4, v5p:2x2x4 (slices), or "
            f"a .toml file; kinds are {', '.join(kinds())}."
        )
    hosts, per_host = 1, prod(torus)
    if match is not None:
        hosts, per_host = int(match[1] or 1), int(match[2])
    count, most = hosts * per_host, found.devices_per_host
    if not torus and per_host > most:
        hosts = next(n for n in range(-(-count // most), count + 1) if count % n == 0)
        short = f"{hosts}x{count // hosts}x{found.name}"
        raise CfpError(
            f"A host holds {most} {found.name}, and {text} has {per_host} in one host. "
            f"Give {short} (--for {short}) for several hosts, or a file with "
            "devices_per_host for larger hosts."
        )
    return Cluster(text=text, kind=found, hosts=hosts, per_host=per_host, torus=torus)


# --------------------------------------------------------------------- kinds of devices

Count = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
Positive = Annotated[float, Field(strict=True, gt=0)]
Points = Annotated[list[tuple[Positive, Positive]], Field(min_length=2)]
Basis = Literal["measured", "specified"]


class _Table(BaseModel):
    """Base of TOML tables; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Number(_Table):
    """A number with its origin; a bare number in a file has the basis "specified".

    Attributes:
        value: in the unit that the field's name ends with.
        source: a measurement or a vendor's document, for readers of the file.
    """

    value: Annotated[float, Field(strict=True, gt=0, lt=1e7)]
    basis: Basis = "specified"
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        return data if isinstance(data, Mapping) else {"value": data}


class Curves(_Table):
    """Times of collectives within a host, as points [bytes, milliseconds].

    Bytes are those of the whole tensor of a group.

    Attributes:
        devices: number of devices in the group.
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
        """Curves by kind, such as "all-reduce", after `rising`: times never fall."""
        values = self.model_dump(by_alias=True)
        return {k: rising((int(size), ms) for size, ms in values[k]) for k in KINDS}


class DeviceKind(_Table):
    """A kind of device, or a cluster of them, as a TOML file describes it.

    Attributes:
        device_kind: JAX's name, `jax.Device.device_kind`.
        devices_per_host: of a cluster; for a kind, the most that a host holds.
        measured: rates by field name, of basis "measured", in place of the specified.
        link_gb_per_s: rate of a GPU's links, or of one link of a TPU, in one direction.
        link_latency_us: TPU: time from a device to its neighbour.
        torus_dims: TPU: number of dims of a slice; 0 for GPUs.
        torus_ring: TPU: a dim is a ring if its size is a multiple of this; see `rings`.
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
    # Latency of a message over InfiniBand or RoCE, roughly as vendors specify it.
    network_latency_us: Number = Number(value=5.0)
    torus_dims: int = 0
    torus_ring: int = 1
    measured: dict[str, Number] = {}
    curves: Curves | None = None

    @model_validator(mode="after")
    def _has_links(self) -> DeviceKind:
        if self.curves is None and self.link_gb_per_s is None:
            raise ValueError("link_gb_per_s or curves are needed")
        return self

    @property
    def platform(self) -> str:
        """Platform: "gpu" or "tpu"."""
        return "tpu" if self.torus_dims else "gpu"

    @property
    def memory_bytes(self) -> int:
        """All memory of a device, in bytes."""
        return int(self.memory_gib.value * 2**30)

    def specified(self, name: str) -> float:
        """The number of a field such as `memory_gb_per_s`; `measured` is ignored."""
        return getattr(self, name).value

    def expected(self, name: str) -> float:
        """Measured rate; else the peak, on GPUs times the share that H200 reaches."""
        own: Number = self.measured.get(name) or getattr(self, name)
        if own.basis == "measured" or self.torus_dims:
            return own.value
        known = kind(_MEASURED_KIND)
        return own.value * known.measured[name].value / known.specified(name)

    @property
    def link_times(self) -> tuple[int, Mapping[str, Curve]]:
        """Returns (devices in the group, collectives' curves by kind) within a host.

        Without own curves, H200's are scaled to the bandwidth of this kind's links.
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


# The kind whose measured share of its specification is assumed for other GPUs.
_MEASURED_KIND = "h200"
_FOLDER = resources.files("cfp.cost").joinpath("kinds")


def read(data: Mapping[str, Any], name: str, where: str) -> DeviceKind:
    """Makes a kind of device from a parsed TOML file; `where` names the file.

    A key `kind` starts from a shipped kind. Other keys replace its numbers, measured or
    not; a link rate drops its curves. Without `kind`, `name` is the default name.

    Raises:
        CfpError: a name is unknown, or a value is missing or not allowed.
    """
    data = dict(data)
    if (start := data.pop("kind", None)) is not None:
        base = kind(str(start)).model_dump(by_alias=True, exclude_unset=True)
        measured = base.get("measured", {}).items()
        base["measured"] = {k: number for k, number in measured if k not in data}
        if "link_gb_per_s" in data:
            base.pop("curves", None)
        data = base | data
    try:
        return DeviceKind.model_validate({"name": name, "device_kind": name, **data})
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        value = "" if first["type"] == "missing" else f" = {first['input']!r}"[:200]
        said = f"{first['msg'].removeprefix('Value error, ')}."
        if first["type"] == "extra_forbidden":
            said = f"unknown name. {known_names(path, DeviceKind.model_fields)}"
        raise CfpError(
            f"{where}: {f'{path}{value}: ' * bool(path)}{said} A file with "
            f'kind = "{_MEASURED_KIND}" needs only the values that differ; see '
            "docs/planning-ahead.md."
        ) from error


@cache
def kinds() -> Mapping[str, DeviceKind]:
    """Shipped kinds by name and alias."""
    found = {}
    for file in _FOLDER.iterdir():
        if file.name.endswith(".toml"):
            data = tomllib.loads(file.read_text(encoding="utf-8"))
            one = read(data, file.name.removesuffix(".toml"), file.name)
            found |= dict.fromkeys((one.name, *one.aliases), one)
    return dict(sorted(found.items()))


def kind(name: str) -> DeviceKind:
    """Returns a shipped kind by its name or alias; CfpError if it is unknown."""
    if (known := kinds().get(name.lower())) is None:
        raise CfpError(
            f"There is no kind of device {name!r}. {known_names(name, kinds())} "
            "Describe another in a file: --for cluster.toml, "
            'cfp.described("cluster.toml").'
        )
    return known


@cache
def kind_of(device_kind: str) -> DeviceKind | None:
    """Returns the shipped kind with JAX's `device_kind`, or None."""
    every = kinds().values()
    return next((one for one in every if one.device_kind == device_kind), None)


def description_of(mesh: Mesh, rates: Rates) -> str:
    """Returns a TOML description of a host's devices, with their measured rates.

    Args:
        mesh: devices of one host, on one axis.

    Raises:
        CfpError: not exactly one axis has several devices.
    """
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    if len(sizes) != 1:
        raise CfpError(
            "--describe needs a mesh with one axis of several devices, got "
            f"{dict(mesh.shape)}. Give --mesh x={mesh.size} --describe FILE."
        )
    [(axis, count)] = sizes.items()
    device = mesh.local_devices[0]
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    source = f"measured on {count} of {device.device_kind}, {day}"
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
    """All bytes of a device; without JAX's limit, as on CPUs, a part of the host's."""
    stats = mesh.local_devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
        return stats["bytes_limit"] / fraction
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size
