"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Number = float | int | str


class Status(StrEnum):
    """How a check ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    ABSENT = "ABSENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table.

    Attributes:
        name: of the check.
        status: PASS; FAIL, which a remedy goes with; or ABSENT, where there is nothing
            to check.
        reason: what was found, in one sentence.
        remedy: what to do; empty unless something is to be done.
        numbers: what was measured, by name, with units in the names.
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
    """What was checked works."""
    return Result(name=name, status=Status.PASS, reason=reason, numbers=numbers)


def failed(name: str, reason: str, remedy: str, **numbers: Number) -> Result:
    """What was checked does not work, and this mends it."""
    return Result(
        name=name, status=Status.FAIL, reason=reason, remedy=remedy, numbers=numbers
    )


def absent(name: str, reason: str, remedy: str = "") -> Result:
    """There is nothing to check, for this reason."""
    return Result(name=name, status=Status.ABSENT, reason=reason, remedy=remedy)
