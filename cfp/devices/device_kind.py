"""Kinds of devices, as data files describe them: every number with its source.

What a file specifies is a peak. Of that programs reach a share, which is known where a
file has measured numbers, too; for the other kinds the shares of the measured one are
expected.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from cfp.errors import TargetError, compose
from cfp.profiling.rates import KINDS as COLLECTIVES
from cfp.profiling.rates import Curve, rising

BASES = ("measured", "specified")
_REQUIRED = (
    "memory_gib",
    "bfloat16_tflop_per_s",
    "float32_tflop_per_s",
    "memory_gb_per_s",
    "link_gb_per_s",
)
_OPTIONAL = ("network_gb_per_s", "network_latency_us")
# What else a file may say; `hosts` and `kind` of a cluster.
_OTHERS = ("aliases", "curves", "device_kind", "devices_per_host", "measured")
_OF_CLUSTERS = ("hosts", "kind")
_RATES = ("bfloat16_tflop_per_s", "float32_tflop_per_s", "memory_gb_per_s")
_MOST_DEVICES = 1 << 20
_MOST = 1e7  # More than this of any unit above no device has.
# The kind whose measurements say what share of a specification programs reach.
_MEASURED_KIND = "h200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number and where it is from.

    Attributes:
        value: in the unit that its name says.
        basis: "measured" or "specified".
        source: a record of ours, or a document of the vendor.
    """

    value: float
    basis: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        name: as in ``4xh200``.
        device_kind: as JAX calls it.
        devices_per_host: how many stand in a host, usually.
        numbers: what is specified, by name.
        measured: of those, what was measured.
        curve_devices: of how many devices of a host the curves are; 0 without curves.
        curves: by kind of collective.
        curve_source: where they are from.
    """

    name: str
    device_kind: str
    devices_per_host: int
    numbers: Mapping[str, Number]
    measured: Mapping[str, Number]
    curve_devices: int
    curves: Mapping[str, Curve]
    curve_source: str

    def expected(self, name: str) -> Number:
        """A rate that programs reach: measured, or a share of what is specified."""
        if name in self.measured:
            return self.measured[name]
        own = self.numbers[name]
        if own.basis == "measured":
            return own
        known = kind(_MEASURED_KIND)
        share = known.measured[name].value / known.numbers[name].value
        return Number(
            value=own.value * share,
            basis="specified",
            source=f"{share:.2f} (as of {known.device_kind}) of {own.source}",
        )

    @property
    def link_curves(self) -> tuple[Mapping[str, Curve], int, str]:
        """Curves inside a host, of how many devices, and where they are from."""
        if self.curves:
            return self.curves, self.curve_devices, self.curve_source
        known = kind(_MEASURED_KIND)
        link = self.numbers["link_gb_per_s"]
        slower = known.numbers["link_gb_per_s"].value / link.value
        curves = {
            what: tuple(
                (size, curve[0][1] + (ms - curve[0][1]) * slower) for size, ms in curve
            )
            for what, curve in known.curves.items()
        }
        source = f"{known.curve_source}, at the bandwidth of {link.source}"
        return curves, known.curve_devices, source


@cache
def kinds() -> Mapping[str, str]:
    """The shipped kinds: the file's name by each name that it goes by."""
    found = {}
    for file in resources.files("cfp.devices").joinpath("kinds").iterdir():
        if file.name.endswith(".toml"):
            name = file.name.removesuffix(".toml")
            aliases = tomllib.loads(file.read_text(encoding="utf-8"))["aliases"]
            found |= dict.fromkeys((name, *aliases), name)
    return dict(sorted(found.items()))


def compiler_target(name: str) -> str:
    """Reads the description by which XLA compiles for a kind, in its protocol's text.

    Raises:
        TargetError: it is not shipped for that kind.
    """
    folder = resources.files("cfp.devices").joinpath("kinds")
    file = folder.joinpath(f"{name}.txtpb")
    if not file.is_file():
        known = sorted(
            one.name.removesuffix(".txtpb")
            for one in folder.iterdir()
            if one.name.endswith(".txtpb")
        )
        raise TargetError(
            compose(
                "The compiler has no description of that kind of device.",
                expected=f"one of {', '.join(known)}",
                got=name,
                attempt="without --compile, by estimates",
            )
        )
    return file.read_text(encoding="utf-8")


@cache
def kind(name: str) -> DeviceKind:
    """A shipped kind, by its name.

    Raises:
        TargetError: there is none of that name.
    """
    known = kinds()
    if name.lower() not in known:
        raise TargetError(
            compose(
                "There is no such kind of device.",
                expected=f"one of {', '.join(known)}",
                got=repr(name),
                attempt="a file that describes it: --for cluster.toml (see "
                "docs/planning-ahead.md)",
            )
        )
    file = known[name.lower()]
    text = resources.files("cfp.devices").joinpath("kinds", f"{file}.toml").read_text()
    return kind_from(tomllib.loads(text), file, f"{file}.toml")


@cache
def kind_of(device_kind: str) -> DeviceKind | None:
    """A shipped kind, by JAX's name of it; None if there is none of that name."""
    shipped = map(kind, sorted({*kinds().values()}))
    return next((one for one in shipped if one.device_kind == device_kind), None)


def memory_of(device_kind: str) -> int | None:
    """Memory of a device, by JAX's name of its kind; None if that is not shipped."""
    known = kind_of(device_kind)
    return known and int(known.numbers["memory_gib"].value * 2**30)


def kind_from(data: Mapping[str, Any], name: str, where: str) -> DeviceKind:
    """A kind of device from parsed TOML.

    Args:
        data: the parsed file.
        name: what it is to be called.
        where: the file, for messages.

    Raises:
        TargetError: numbers are missing, or cannot be.
    """
    curves = _curves(data.get("curves", {}), where)
    needed = [key for key in _REQUIRED if key != "link_gb_per_s" or not curves]
    missing = [key for key in needed if key not in data]
    if missing:
        raise TargetError(
            compose(
                f"{where} does not say all of a device.",
                expected=f"numbers for {', '.join(needed)}",
                got=f"none for {', '.join(missing)}",
                attempt=f'{missing[0]} = {{ value = 1.0, basis = "specified", '
                'source = "the vendor\'s datasheet" }, or kind = "h200" to start from '
                "a shipped kind",
            )
        )
    names = [key for key in (*_REQUIRED, *_OPTIONAL) if key in data]
    measured = data.get("measured", {})
    return DeviceKind(
        name=name,
        device_kind=str(data.get("device_kind", name)),
        devices_per_host=count_of(data.get("devices_per_host", 8), where),
        numbers={key: number_of(data[key], key, where) for key in names},
        measured={k: number_of(measured[k], k, where) for k in _RATES if k in measured},
        curve_devices=count_of(data["curves"].get("devices", 2), where)
        if curves
        else 0,
        curves=curves,
        curve_source=str(data.get("curves", {}).get("source", where)),
    )


def check_names(data: Mapping[str, Any], where: str) -> None:
    """Refuses names that mean nothing, such as misspelt ones: they would not count.

    Raises:
        TargetError: there are some.
    """
    known = sorted((*_REQUIRED, *_OPTIONAL, *_OTHERS, *_OF_CLUSTERS))
    unknown = [name for name in data if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, 1, 0.0)
        raise TargetError(
            compose(
                f"{where} has a name that means nothing.",
                expected=f"some of {', '.join(known)}",
                got=", ".join(unknown),
                attempt=f"{near[0]} in place of {unknown[0]}",
            )
        )


def number_of(data: Any, name: str, where: str) -> Number:
    """A number, by itself or with its basis and source.

    Raises:
        TargetError: it is none that a device can have.
    """
    given = data if isinstance(data, Mapping) else {"value": data}
    value, basis = given.get("value"), given.get("basis", "specified")
    real = float(value) if isinstance(value, int | float) else 0.0
    if isinstance(value, bool) or not 0 < real < _MOST or basis not in BASES:
        raise TargetError(
            compose(
                f"{where} has an impossible number.",
                expected=f"{name} above 0 and below {_MOST:.0e}, with basis "
                f'"{BASES[0]}" or "{BASES[1]}"',
                got=f"{name} = {value!r}, basis {basis!r}",
                attempt=f"{name} in the unit that its name says, such as "
                '{ value = 450, basis = "specified", source = "datasheet" }',
            )
        )
    source = str(given.get("source", Path(where).name))
    return Number(value=real, basis=basis, source=source)


def count_of(data: Any, where: str) -> int:
    """A whole number of hosts or devices.

    Raises:
        TargetError: it is none.
    """
    if (
        isinstance(data, bool)
        or not isinstance(data, int)
        or not 0 < data <= _MOST_DEVICES
    ):
        raise TargetError(
            compose(
                f"{where} has an impossible count.",
                expected="a whole number of hosts or devices, from 1 to "
                f"{_MOST_DEVICES}",
                got=repr(data),
                attempt="hosts = 2 or devices_per_host = 8, for instance",
            )
        )
    return data


def _curves(data: Mapping[str, Any], where: str) -> Mapping[str, Curve]:
    found = {}
    for key in COLLECTIVES if data else ():
        given = data.get(key)
        points = given if isinstance(given, list) else []
        pairs = [p for p in points if isinstance(p, list) and len(p) == 2]
        if len(pairs) < 2 or len(pairs) < len(points) or min(map(min, pairs)) <= 0:
            raise TargetError(
                compose(
                    f"{where} has curves that cannot be read.",
                    expected=f"for each of {', '.join(COLLECTIVES)} two points or "
                    "more, [bytes, milliseconds], both above 0",
                    got=f"{key} = {given!r}"[:200],
                    attempt="cfp profile --curves --describe FILE on such devices",
                )
            )
        found[key] = rising((int(size), float(ms)) for size, ms in points)
    return found
