"""Reads attributes of ops from their text."""

from __future__ import annotations

import re

from cfp.patterns.expression import COMPARE
from cfp.program.graph import Op

_NUMBERS = re.compile(r"-?\d+")
_DIRECTION = re.compile(r"comparison_direction ([A-Z]{2})")
_IN_BODY = re.compile(r"(%\d+):\S+=stablehlo\.(\w+)\(([^;)]*)")
# The body of an argmax of values %0, %2 at places %1, %3, as JAX writes it.
_ARGMAX = (
    ("compare", "%0,%2", "GT"),
    ("compare", "%0,%0", "NE"),
    ("or", "%4,%5", ""),
    ("compare", "%0,%2", "EQ"),
    ("compare", "%1,%3", "LT"),
    ("and", "%7,%8", ""),
    ("or", "%6,%9", ""),
    ("select", "%6,%0,%2", ""),
    ("select", "%10,%1,%3", ""),
)


def numbers(text: str, name: str) -> tuple[int, ...]:
    """The numbers of an attribute such as ``name = [0, 1]``; () if it is not there."""
    match = re.search(rf"\b{name} ?= ?(?:array<i64)?[:\[]?([-\d, ]*)", text)
    return tuple(map(int, _NUMBERS.findall(match[1]))) if match else ()


def direction(op: Op) -> str | None:
    """The direction of a comparison, such as EQ."""
    match = _DIRECTION.search(op.attributes)
    return match[1] if match else None


def is_argmax(op: Op) -> bool:
    """True for the reduction of values and places to the place of the largest."""
    _, _, body = op.attributes.partition("body=")
    directions = iter(_DIRECTION.findall(body))
    found = [
        (kind, operands, next(directions, "") if kind == COMPARE else "")
        for _, kind, operands in _IN_BODY.findall(body)
    ]
    ends = body.rpartition("stablehlo.return(")[2]
    return tuple(found) == _ARGMAX and ends.startswith("%11,%12")
