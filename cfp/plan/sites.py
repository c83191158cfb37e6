"""Places of a plan's constraints in the step: equations, with their source lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cfp.analysis.strategies import Spec
from cfp.printable import printable

_MOST_EQUATIONS = 2**24
_VALUE = re.compile(r"(in|out|entry|yield) \d{1,6}")
_WHICH = re.compile(r"\d{1,8}(-\d{1,8})?(,\d{1,8}(-\d{1,8})?)*")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Equations of one kind at one line whose values are sharded alike.

    Attributes:
        primitive: of the equations, such as ``dot_general``.
        type: of their first results: ``float32[8,16]``.
        value: which value is meant: ``out 0`` or ``in 1``; or, of a scan's body, what
            goes in or comes out: ``entry 2``, ``yield 0``.
        which: numbers among all equations of this primitive and type: ``0-3,8``.
        spec: for each dim the mesh axes that it is sharded over.
        source: ``file:line``, or "".
    """

    primitive: str
    type: str
    value: str
    which: str
    spec: Spec
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """All of a plan's.

    Attributes:
        sites: in the order of the step.
        equations: how many equations the step has.
        digest: of their primitives and types.
        inner: how many constraints are on values inside of what one equation is
            lowered to; these the compiler decides.
    """

    sites: tuple[Site, ...]
    equations: int
    digest: str
    inner: int


def sites_to_json(sites: Sites) -> dict[str, Any]:
    """Sites as plain data."""
    return asdict(sites)


def sites_from_json(data: Mapping[str, Any]) -> Sites:
    """Sites from parsed JSON.

    Raises:
        KeyError, TypeError, ValueError: the data are damaged.
    """
    equations = data["equations"]
    if type(equations) is not int or not 0 <= equations <= _MOST_EQUATIONS:
        raise ValueError(f"expected a number of equations, got {equations!r}")
    inner = data["inner"]
    if type(inner) is not int or inner < 0:
        raise ValueError(f"expected a number of constraints, got {inner!r}")
    return Sites(
        sites=tuple(_site(site, equations) for site in data["sites"]),
        equations=equations,
        digest=_words(data["digest"]),
        inner=inner,
    )


def _site(data: Mapping[str, Any], equations: int) -> Site:
    names = ("primitive", "type", "value", "which", "source")
    words = {name: _words(data[name]) for name in names}
    if not _VALUE.fullmatch(words["value"]):
        raise ValueError(f"expected a value such as 'out 0', got {words['value']!r}")
    numbers = [int(n) for n in _NUMBER.findall(words["which"])]
    if not _WHICH.fullmatch(words["which"]) or max(numbers) >= equations:
        raise ValueError(f"expected numbers of equations, got {words['which']!r}")
    spec = tuple(tuple(map(_words, names)) for names in data["spec"])
    return Site(**words, spec=spec)


def _words(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return printable(value)
