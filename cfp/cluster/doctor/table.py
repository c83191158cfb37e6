"""What the doctor found, as a table for people and as data for programs."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Sequence
from typing import Any

from cfp.cluster.doctor.machine import Machine
from cfp.cluster.doctor.result import Result, Status

_NAME_WIDTH = 14
_STATUS_WIDTH = 7
_REMEDY = "-> "
LEAST_WIDTH = 60


def row(result: Result, width: int) -> str:
    """One result, with the reason and the remedy beside it.

    Args:
        result: what a check found.
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
    """How many checks ended how."""
    counts = {s: sum(r.status is s for r in results) for s in Status}
    failures = [r.name for r in results if r.status is Status.FAIL]
    said = ", ".join(f"{count} {status.value}" for status, count in counts.items())
    return said + (f": {', '.join(failures)}" if failures else "")


def document(machine: Machine, results: Sequence[Result]) -> dict[str, Any]:
    """All results as data that JSON can hold."""
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
