"""Numbers with units, as people write them."""

from __future__ import annotations

import re
from math import ceil

from cfp.errors import CfpError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# Less is hardly a budget for a step: a unit was forgotten.
_LEAST_BARE = 2**20
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: int | float | str | None) -> int | None:
    """A number of bytes from ``80GiB``, ``1.5 GB``, ``8000000000`` or a number.

    Raises:
        CfpError: the text is not a positive amount of memory, or has no unit and is
            less than 1 MiB.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    scale = {**_UNITS, **_BINARY}.get(match[2]) if match else None
    try:
        amount = float(match[1]) * scale if match and scale else 0.0
    except ValueError:
        amount = 0.0
    if amount < 1:
        raise CfpError(
            f"Expected an amount of memory such as '80GiB' or '512MB', got {text!r}."
        )
    number = text.strip() if isinstance(text, str) else ""
    if number and not number[-1].isalpha() and amount < _LEAST_BARE:
        raise CfpError(
            f"An amount of memory without a unit is in bytes, and {number} are too few "
            f"to be meant. Write {number}GiB or {number}MiB, or {number}B for bytes."
        )
    return int(amount)


def format_bytes(count: float, *, up: bool = False) -> str:
    """Bytes for people: ``1.5 GiB``.

    Args:
        up: whether to round up, so that as much as is written does.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            rounded = ceil(count * 100) / 100 if up else count
            return f"{count:.0f} {unit}" if unit == "B" else f"{rounded:.2f} {unit}"
        count /= 1024
    raise AssertionError


def format_flops(flops: float) -> str:
    """Floating-point operations for people: ``5.24 MFLOP``."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 1.0)):
        if abs(flops) >= 0.1 * scale or not prefix:
            amount = flops / scale
            digits = f"{amount:.3g}" if amount < 999.5 else f"{amount:,.0f}"
            return f"{digits} {prefix}FLOP"
    raise AssertionError


def waiting_text(label: str, seconds: float) -> str:
    """Words for the wait for one program to be compiled, and for nothing else."""
    return f"waiting for 1 program to compile, {clock_text(seconds)} so far: {label}"


def clock_text(seconds: float) -> str:
    """Seconds for people: ``2:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
