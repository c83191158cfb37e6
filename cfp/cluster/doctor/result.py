"""Results of checks: as data, as a table, and as JSON."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cfp.cluster.doctor.machine import Machine

Number = float | int | str

_NAME_WIDTH = 14
_STATUS_WIDTH = 7
_REMEDY = "-> "
LEAST_WIDTH = 60


class Status(StrEnum):
    """The outcome of a check."""

    PASS = "PASS"
    FAIL = "FAIL"
    ABSENT = "ABSENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table.

    Attributes:
        name: of the check.
        status: PASS; FAIL, with a remedy; or ABSENT, where there is nothing to check.
        reason: the finding, in one sentence.
        remedy: a command or a hint; empty unless something is to be done.
        numbers: measurements by name, with units in the names.
    """

    name: str
    status: Status
    reason: str
    remedy: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict)

    def __post_init__(self):
        if (self.status is Status.FAIL) and not self.remedy:
            raise ValueError(f"{self.name} fails without a remedy: {self.reason}")


def passed(name: str, reason: str, **numbers: Number) -> Result:
    """Makes the result of a check that works."""
    return Result(name=name, status=Status.PASS, reason=reason, numbers=numbers)


def failed(name: str, reason: str, remedy: str, **numbers: Number) -> Result:
    """Makes the result of a check that does not work, with its remedy."""
    return Result(
        name=name, status=Status.FAIL, reason=reason, remedy=remedy, numbers=numbers
    )


def absent(name: str, reason: str, remedy: str = "") -> Result:
    """Makes the result of a check for which there is nothing to check."""
    return Result(name=name, status=Status.ABSENT, reason=reason, remedy=remedy)


def row(result: Result, width: int) -> str:
    """Formats one result, with the reason and the remedy beside it.

    Args:
        result: of a check.
        width: of the console, in characters.
    """
    indent = " " * (_NAME_WIDTH + _STATUS_WIDTH)
    room = max(width, LEAST_WIDTH) - len(indent)
    # A path or a command stays in one piece.
    wrap = {"width": room, "break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(result.reason, **wrap)
    if result.remedy:
        lines += textwrap.wrap(
            _REMEDY + result.remedy, subsequent_indent=" " * len(_REMEDY), **wrap
        )
    head = f"{result.name:<{_NAME_WIDTH}}{result.status.value:<{_STATUS_WIDTH}}"
    return head + f"\n{indent}".join(lines)


def summary(results: Sequence[Result]) -> str:
    """Counts results by status, and names the failures."""
    counts = {s: sum(r.status is s for r in results) for s in Status}
    failures = [r.name for r in results if r.status is Status.FAIL]
    said = ", ".join(f"{count} {status.value}" for status, count in counts.items())
    return said + (f": {', '.join(failures)}" if failures else "")


def document(machine: Machine, results: Sequence[Result]) -> dict[str, Any]:
    """Makes a JSON document of all results."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "architecture": platform.machine(),
        "python": ".".join(map(str, machine.version)),
        "ok": all(r.status is not Status.FAIL for r in results),
        "checks": [
            {
                "name": r.name,
                "status": r.status.value,
                "reason": r.reason,
                "remedy": r.remedy,
                "numbers": dict(r.numbers),
            }
            for r in results
        ],
    }
