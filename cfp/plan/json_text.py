"""Reads JSON from files that may hold anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Never

from cfp.errors import PlanFileError

_MOST_BYTES = 64 * 2**20  # The plan of 96 layers has one or two megabytes.


def read_json(path: str | Path) -> Any:
    """Parses a plan's file.

    Raises:
        PlanFileError: it cannot be read, is too large, or is not JSON as plans are.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError as error:
        reason = "it is nested too deeply"
        raise PlanFileError(f"Cannot read a plan from {path}: {reason}.") from error
    except json.JSONDecodeError as error:
        reason = f"it is not JSON, as plan.save and cfp plan -o write it: {error}"
        raise PlanFileError(f"Cannot read a plan from {path}: {reason}") from error
    except (OSError, ValueError) as error:
        raise PlanFileError(f"Cannot read a plan from {path}: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of which no field stands there twice: which one would count?"""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the field {shown(twice)} twice")
    return found


def _no_number(name: str) -> Never:
    raise ValueError(f"{name} is no number of JSON's")


def shown(value: Any) -> str:
    """A value as it may stand in a message: short, and in plain characters."""
    return ascii(value) if len(ascii(value)) <= 60 else ascii(value)[:57] + "..."
