"""Places of a plan's constraints in the step: equations, with their source lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from cfp.fields import Count, Spec, Words, matching

_VALUE = r"(in|out|entry|yield) \d{1,6}"
_WHICH = r"\d{1,8}(-\d{1,8})?(,\d{1,8}(-\d{1,8})?)*"
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

    primitive: Words
    type: Words
    value: Annotated[str, matching(_VALUE, "a value such as 'out 0'")]
    which: Annotated[str, matching(_WHICH, "numbers of equations")]
    spec: Spec
    source: Words


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
    equations: Annotated[int, Field(strict=True, ge=0, le=2**24)]
    digest: Words
    inner: Count

    def __post_init__(self) -> None:
        for site in self.sites:
            if max(map(int, _NUMBER.findall(site.which))) >= self.equations:
                raise ValueError(f"numbers of {self.equations} equations")
