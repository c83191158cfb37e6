"""Descriptions of clusters that are not here, and meshes of their devices.

A cluster is some hosts of equally many devices of one kind. Devices of a host talk over
its links, hosts over the network. A mesh goes over all devices in order, host by host,
so its last axes stay within a host for as long as they fit into one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from cfp.devices.device_kind import (
    DeviceKind,
    Number,
    kind,
    kind_from,
    kinds,
    read,
)
from cfp.errors import MeshError, TargetError
from cfp.profiling.rates import Curve, Rates, axis_groups, sent_share
from cfp.settings import defaults_of

Axes = tuple[tuple[str, int], ...]

# What JAX takes of a GPU's memory by default.
_TAKEN_SHARE = 0.75
# One message over a network of InfiniBand or RoCE, where a description says nothing:
# about what network adapters are sold with.
_NETWORK_LATENCY_US = Number(value=5.0)
_SHORT = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Some hosts of equally many devices."""

    text: str
    kind: DeviceKind
    hosts: int
    per_host: int

    @property
    def count(self) -> int:
        """All devices."""
        return self.hosts * self.per_host


@dataclass(frozen=True, kw_only=True)
class DescribedMesh:
    """A mesh of a cluster that is not there; stands for one where steps are planned.

    Attributes:
        axes: names and sizes, in order; the last ones are neighbours.
    """

    cluster: Cluster
    axes: Axes

    @property
    def shape(self) -> Mapping[str, int]:
        """Sizes of the axes by name, like a mesh's."""
        return dict(self.axes)

    @property
    def abstract(self) -> AbstractMesh:
        """For JAX to lower programs for."""
        names, sizes = zip(*self.axes, strict=True)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    @property
    def memory_bytes(self) -> int:
        """Memory of a device that programs may use."""
        whole = self.cluster.kind.numbers["memory_gib"].value * 2**30
        return int(_TAKEN_SHARE * whole)

    @property
    def crossing(self) -> tuple[str, ...]:
        """Axes along which devices of different hosts stand."""
        return tuple(n for n, s in self.axes if s > 1 and self._within((n,)) < s)

    @property
    def environment(self) -> dict[str, str]:
        """The environment on which plans and estimates depend, as of real devices."""
        return {
            "described": self.cluster.text,
            "platform": "gpu",
            "device_kind": self.cluster.kind.device_kind,
            "devices": str(self.cluster.count),
            "hosts": str(self.cluster.hosts),
            "crosses_hosts": ",".join(self.crossing),
            "jax_version": jax.__version__,
            "jaxlib_version": metadata.version("jaxlib"),
        }

    @property
    def rates(self) -> Rates:
        """The rates of compute, memory and collectives, by the description."""
        known = self.cluster.kind
        curves = {
            (what, group): self._curve(what, group)
            for what in known.link_times[1]
            for group in axis_groups(self.axes)
        }
        defaults = defaults_of(self.environment["platform"])
        return Rates(
            mesh=self.axes,
            curves=curves,
            matmul_flops_per_ms={
                dtype: known.expected(f"{dtype}_tflop_per_s") * 1e9
                for dtype in ("float32", "bfloat16")
            },
            memory_bytes_per_ms=known.expected("memory_gb_per_s") * 1e6,
            combined_bytes=defaults.combined_bytes,
            launch_ms=defaults.launch_ms,
        )

    def _within(self, group: Iterable[str]) -> int:
        """Counts the devices of a group in one host, at most."""
        strides, step = {}, 1
        for name, size in reversed(self.axes):
            strides[name] = step
            step *= size
        places = [0]
        for name in group:
            sizes = range(self.shape[name])
            places = [p + i * strides[name] for p in places for i in sizes]
        hosts = [place // self.cluster.per_host for place in places]
        return max(hosts.count(host) for host in set(hosts))

    def _curve(self, what: str, group: tuple[str, ...]) -> Curve:
        """The curve of one kind of collective over some axes."""
        ways, times = self.cluster.kind.link_times
        known = times[what]
        size = prod(self.shape[name] for name in group)
        near = self._within(group)
        more = sent_share(what, size) / sent_share(what, ways)
        floor = known[0][1]
        inside = [(b, floor + (ms - floor) * more) for b, ms in known]
        if near == size:
            return tuple(inside)
        far = size // near
        # Each device of a host has an adapter. In a ring all of a host's are used for
        # what passes from host to host; of an all-to-all each sends its own part.
        numbers = self.cluster.kind.numbers
        adapter = numbers["network_gb_per_s"].value * 1e6
        link = numbers.get("link_gb_per_s")
        if numbers["network_gb_per_s"].basis == "specified" and link is not None:
            adapter *= _reached(what, known, ways, link.value * 1e6)
        latency = numbers.get("network_latency_us", _NETWORK_LATENCY_US).value / 1e3
        if what == "all-to-all":
            share = (size - near) / size / size / adapter
        else:
            share = sent_share(what, size) / (near * adapter)
        steps = (far - 1) * (2 if what == "all-reduce" else 1)
        return tuple(
            (b, max(ms, floor + b * share) + steps * latency) for b, ms in inside
        )


def _reached(what: str, known: Curve, ways: int, link_bytes_per_ms: float) -> float:
    """The share of a link that large collectives use, at most all of it."""
    largest, ms = known[-1]
    sent = largest * sent_share(what, ways) / (ms - known[0][1])
    return min(1.0, sent / link_bytes_per_ms)


def described(text: str, **axes: int) -> DescribedMesh:
    """A mesh of a cluster that is described, for :func:`cfp.plan`.

    Args:
        text: ``4xh200``, ``2x8xh100`` (hosts, devices of each, kind), or a file:
            ``cluster.toml``.
        axes: sizes of the mesh's axes, such as ``x=2, y=8``; by default one axis of the
            devices of a host, and before it one of the hosts if there are several.

    Raises:
        TargetError: the description is no cluster, or lacks what is needed.
        MeshError: the axes are not the cluster's devices.
    """
    return mesh_of(cluster_of(text), tuple(axes.items()) or None)


def mesh_of(cluster: Cluster, axes: Axes | None) -> DescribedMesh:
    """A mesh of a cluster's devices.

    Raises:
        MeshError: the axes are not the cluster's devices.
        TargetError: several hosts, and nothing is known of the network between them.
    """
    if axes is None:
        sizes = [size for size in (cluster.hosts, cluster.per_host) if size > 1] or [1]
        axes = tuple(zip("xy", sizes, strict=False))
    count = prod(size for _, size in axes)
    if count != cluster.count or any(size < 1 for _, size in axes):
        raise MeshError(
            "The mesh is not of the cluster's devices.",
            expected=f"a mesh of all devices of {cluster.text}, {cluster.count}"
            f" (hosts = {cluster.hosts}, devices_per_host = {cluster.per_host})",
            got=" x ".join(f"{name}={size}" for name, size in axes) or "one device",
            attempt=f"one axis of all devices, x={cluster.count} (--mesh "
            f"x={cluster.count})",
        )
    kind_name = cluster.kind.name
    if cluster.hosts > 1 and "network_gb_per_s" not in cluster.kind.numbers:
        raise TargetError(
            f"Nothing is known of a network between hosts of {kind_name}.",
            expected="network_gb_per_s, what one device sends to another host",
            got=f"{cluster.hosts} hosts, and no such number",
            attempt=f'a file: kind = "{kind_name}", hosts = '
            f"{cluster.hosts}, devices_per_host = {cluster.per_host}, "
            "network_gb_per_s = 25",
        )
    return DescribedMesh(cluster=cluster, axes=axes)


def cluster_of(text: str) -> Cluster:
    """Reads a description.

    Raises:
        TargetError: it is none.
    """
    if text.endswith(".toml"):
        return _from_file(Path(text))
    match = _SHORT.fullmatch(text.strip())
    if match is None:
        raise TargetError(
            "The description of a cluster cannot be read.",
            expected="4xh200, 2x8xh100 (hosts x devices of each x kind), or the "
            "name of a .toml file; kinds are " + ", ".join(kinds()),
            got=repr(text),
            attempt='cfp.described("4xh200") (--for 4xh200)',
        )
    counts = {"hosts": int(match[1] or 1), "devices_per_host": int(match[2])}
    return _cluster({**counts, "kind": match[3]}, text, text)


def _from_file(path: Path) -> Cluster:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TargetError(
            f"The description {path} cannot be read.",
            expected="a file in TOML",
            got=f"{type(error).__name__}: {error}",
            attempt="see docs/planning-ahead.md for one",
        ) from error
    return _cluster(data, path.name, str(path))


def _cluster(data: Mapping[str, Any], text: str, where: str) -> Cluster:
    given = read(data, where)
    if given.kind is None:
        found = kind_from(given, Path(text).stem, where)
    else:
        found, own = kind(given.kind), given.numbers
        # The file's own numbers win, also over measured ones of the kind.
        kept = {k: n for k, n in found.measured.items() if k not in own}
        found = replace(found, numbers={**found.numbers, **own}, measured=kept)
        if given.curves or "link_gb_per_s" in own:
            found = replace(found, curves=given.curves)
    per_host = given.devices_per_host or found.devices_per_host
    return Cluster(text=text, kind=found, hosts=given.hosts, per_host=per_host)
