"""Kinds of devices, as data files describe them: every number with its source.

What a file specifies is a peak. Of that programs reach a share, which is known where a
file has measured numbers, too; for the other kinds the shares of the measured one are
expected.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from cfp.devices.schema import REQUIRED, Description, Number, read
from cfp.errors import TargetError, compose, nearest
from cfp.profiling.rates import Curve, rising

# The kind whose measurements say what share of a specification programs reach.
_MEASURED_KIND = "h200"


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
                attempt=f"{nearest(name, known)}a file describes another kind: "
                'cfp.described("cluster.toml") (--for cluster.toml); see '
                "docs/planning-ahead.md",
            )
        )
    file = known[name.lower()]
    text = resources.files("cfp.devices").joinpath("kinds", f"{file}.toml").read_text()
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

    Args:
        given: the description.
        name: for the kind.
        where: the file, for messages.

    Raises:
        TargetError: numbers are missing.
    """
    numbers = given.numbers
    needed = [key for key in REQUIRED if key != "link_gb_per_s" or not given.curves]
    missing = [key for key in needed if key not in numbers]
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
    curves, devices, source = curves_from(given, where)
    return DeviceKind(
        name=name,
        device_kind=given.device_kind or name,
        devices_per_host=given.devices_per_host or 8,
        numbers=numbers,
        measured=given.measured,
        curve_devices=devices,
        curves=curves,
        curve_source=source,
    )


def curves_from(given: Description, where: str) -> tuple[Mapping[str, Curve], int, str]:
    """Returns a description's curves, their number of devices, and their source."""
    if given.curves is None:
        return {}, 0, where
    points = given.curves.points
    curves = {key: rising((int(b), ms) for b, ms in of) for key, of in points.items()}
    return curves, given.curves.devices, given.curves.source or where
