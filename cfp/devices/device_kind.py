"""Kinds of devices and clusters, as data files describe them, and the files' schema.

Every number has its source. What a file specifies is a peak. Of that programs reach a
share, which is known where a file has measured numbers, too; for the other kinds the
shares of the measured one are expected.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from jax.sharding import Mesh
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from cfp.errors import MeshError, TargetError, nearest
from cfp.profiling.rates import KINDS, Curve, Rates, rising

Basis = Literal["measured", "specified"]
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
Positive = Annotated[float, Field(strict=True, gt=0)]
Points = Annotated[list[tuple[Positive, Positive]], Field(min_length=2)]


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
        values = self.model_dump(by_alias=True).items()
        return {
            name: rising((int(size), ms) for size, ms in value)
            for name, value in values
            if isinstance(value, list)
        }


class _Measured(_Table):
    bfloat16_tflop_per_s: Number | None = None
    float32_tflop_per_s: Number | None = None
    memory_gb_per_s: Number | None = None


class _Numbers(_Measured):
    memory_gib: Number | None = None
    link_gb_per_s: Number | None = None
    network_gb_per_s: Number | None = None
    network_latency_us: Number | None = None


class Description(_Numbers):
    """A file that describes a kind of device, or a cluster.

    Attributes:
        kind: the shipped kind to start from.
        devices_per_host: number of devices of each host.
        rates: measured ones, in the table ``measured``.
    """

    kind: str | None = None
    hosts: Count = 1
    devices_per_host: Count | None = None
    device_kind: str | None = None
    aliases: list[str] = []
    rates: _Measured = Field(_Measured(), alias="measured")
    curves: Curves | None = None

    @property
    def numbers(self) -> dict[str, Number]:
        """The numbers that are given, by name."""
        return _given(self, _Numbers)

    @property
    def measured(self) -> dict[str, Number]:
        """The measured rates that are given, by name."""
        return _given(self.rates, _Measured)


def _given(table: _Measured, kind: type[_Measured]) -> dict[str, Number]:
    found = {name: getattr(table, name) for name in kind.model_fields}
    return {name: number for name, number in found.items() if number is not None}


# Without curves, a kind of device needs these; with them, no rate of links.
REQUIRED = (
    "memory_gib",
    "bfloat16_tflop_per_s",
    "float32_tflop_per_s",
    "memory_gb_per_s",
    "link_gb_per_s",
)


def read(data: Mapping[str, Any], where: str) -> Description:
    """Checks a parsed description.

    Raises:
        TargetError: a name is unknown, or a value is not allowed.
    """
    try:
        return Description.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            fields = Description.model_fields.items()
            known = sorted(field.alias or name for name, field in fields)
            near = get_close_matches(str(first["loc"][0]), known, 1, 0.0)
            raise TargetError(
                f"{where} has an unknown name.",
                expected=f"some of {', '.join(known)}",
                got=path,
                attempt=f"{near[0]} in place of {path}",
            ) from error
        raise TargetError(
            f"{where} has an impossible value.",
            expected=f"{path}: {first['msg']}",
            got=f"{path} = {first['input']!r}"[:200],
            attempt="a value such as link_gb_per_s = { value = 450, basis = "
            '"specified", source = "datasheet" } or hosts = 2; see '
            "docs/planning-ahead.md",
        ) from error


def description_of(mesh: Mesh, rates: Rates) -> str:
    """A description of a host's devices, in TOML, for `cfp.devices.described`.

    Args:
        mesh: the devices, of one host, on one axis.

    Raises:
        MeshError: the mesh has several axes.
    """
    sizes = [(name, size) for name, size in mesh.shape.items() if size > 1]
    if len(sizes) != 1:
        raise MeshError(
            "Curves of one axis describe the links of a host.",
            expected="a mesh with one axis, of the devices of one host",
            got=" x ".join(f"{n}={s}" for n, s in mesh.shape.items()),
            attempt=f"--mesh x={mesh.size} --describe FILE",
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


# The kind whose measurements say what share of a specification programs reach.
_MEASURED_KIND = "h200"
_FOLDER = resources.files("cfp.devices").joinpath("kinds")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        name: as in ``4xh200``.
        devices_per_host: how many stand in a host, usually.
        numbers: what is specified, by name.
        measured: of those, what was measured.
    """

    name: str
    device_kind: str
    devices_per_host: int
    numbers: Mapping[str, Number]
    measured: Mapping[str, Number]
    curves: Curves | None

    def expected(self, name: str) -> float:
        """A rate that programs reach: measured, or a share of what is specified."""
        if name in self.measured:
            return self.measured[name].value
        own = self.numbers[name]
        if own.basis == "measured":
            return own.value
        known = kind(_MEASURED_KIND)
        return own.value * known.measured[name].value / known.numbers[name].value

    @property
    def link_times(self) -> tuple[int, Mapping[str, Curve]]:
        """Devices of a host, and times of collectives among them, by kind.

        They are its own, or the measured kind's at the bandwidth of its own links.
        """
        if self.curves is not None:
            return self.curves.devices, self.curves.times
        known = kind(_MEASURED_KIND)
        assert known.curves is not None, "its file has curves"
        link = "link_gb_per_s"
        slower = known.numbers[link].value / self.numbers[link].value
        times = {
            what: tuple(
                (size, curve[0][1] + (ms - curve[0][1]) * slower) for size, ms in curve
            )
            for what, curve in known.curves.times.items()
        }
        return known.curves.devices, times


@cache
def kinds() -> Mapping[str, str]:
    """The shipped kinds: the file's name by each name that it goes by."""
    found = {}
    for file in _FOLDER.iterdir():
        if file.name.endswith(".toml"):
            name = file.name.removesuffix(".toml")
            aliases = tomllib.loads(file.read_text(encoding="utf-8"))["aliases"]
            found |= dict.fromkeys((name, *aliases), name)
    return dict(sorted(found.items()))


@cache
def kind(name: str) -> DeviceKind:
    """A shipped kind, by its name.

    Raises:
        TargetError: there is none of that name.
    """
    known = kinds()
    if name.lower() not in known:
        raise TargetError(
            "There is no such kind of device.",
            expected=f"one of {', '.join(known)}",
            got=repr(name),
            attempt=f"{nearest(name, known)}a file describes another kind: "
            'cfp.described("cluster.toml") (--for cluster.toml); see '
            "docs/planning-ahead.md",
        )
    file = known[name.lower()]
    text = _FOLDER.joinpath(f"{file}.toml").read_text()
    return kind_from(read(tomllib.loads(text), f"{file}.toml"), file, f"{file}.toml")


@cache
def kind_of(device_kind: str) -> DeviceKind | None:
    """A shipped kind, by JAX's name of it; None if there is none of that name."""
    shipped = map(kind, sorted({*kinds().values()}))
    return next((one for one in shipped if one.device_kind == device_kind), None)


def memory_of(device_kind: str) -> int | None:
    """Memory of a device, by JAX's name of its kind; None if that is not shipped."""
    known = kind_of(device_kind)
    return known and int(known.numbers["memory_gib"].value * 2**30)


def kind_from(given: Description, name: str, where: str) -> DeviceKind:
    """Makes a kind of device of its description.

    Raises:
        TargetError: numbers are missing.
    """
    numbers = given.numbers
    needed = [key for key in REQUIRED if key != "link_gb_per_s" or not given.curves]
    missing = [key for key in needed if key not in numbers]
    if missing:
        raise TargetError(
            f"{where} does not say all of a device.",
            expected=f"numbers for {', '.join(needed)}",
            got=f"none for {', '.join(missing)}",
            attempt=f'{missing[0]} = {{ value = 1.0, basis = "specified", '
            'source = "the vendor\'s datasheet" }, or kind = "h200" to start from '
            "a shipped kind",
        )
    return DeviceKind(
        name=name,
        device_kind=given.device_kind or name,
        devices_per_host=given.devices_per_host or 8,
        numbers=numbers,
        measured=given.measured,
        curves=given.curves,
    )
