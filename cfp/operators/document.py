"""Results as a file, and what became slower since an earlier one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfp.errors import CfpError, compose
from cfp.operators.benchmark import Row
from cfp.operators.operator import OperatorError

FORMAT = 1
KIND = "cfp operators"


def to_json(environment: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "environment": dict(environment),
        "rows": [row.to_json() for row in rows],
    }


def write(file: Path, environment: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes a file in one go, so that an interrupted run leaves a whole one.

    Raises:
        CfpError: it cannot be written.
    """
    text = json.dumps(to_json(environment, rows), indent=1) + "\n"
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(text)
        part.replace(file)
    except OSError as error:
        raise CfpError(f"Cannot write {file}: {error.strerror}.") from error


def read(file: Path) -> tuple[dict[str, Any], list[Row]]:
    """The environment and the rows of a file.

    Raises:
        OperatorError: it is no such file.
    """
    try:
        data = json.loads(file.read_text())
        if data["kind"] != KIND or data["format"] != FORMAT:
            raise ValueError(f"kind {data['kind']!r}, format {data['format']!r}")
        return data["environment"], [Row.from_json(row) for row in data["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OperatorError(
            compose(
                f"{file} holds no results of operators.",
                expected=f'what --json writes: kind "{KIND}", format {FORMAT}',
                got=f"{type(error).__name__}: {error}",
                attempt="python -m cfp.operators --json FILE",
            )
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of the median of one pass.

    Attributes:
        name: of operator, implementation, shape, type and pass.
        before_ms, now_ms: medians.
    """

    name: str
    before_ms: float
    now_ms: float

    @property
    def share(self) -> float:
        """Slowdown, as a share of the time before."""
        return self.now_ms / self.before_ms - 1.0


def changes(before: Sequence[Row], now: Sequence[Row]) -> list[Change]:
    """Pairs the rows that both have measured, the most slowed first."""
    known = {row.key: row for row in before}
    found = [
        Change(
            name=" ".join((*row.key, name)),
            before_ms=known[row.key].passes[name].median_ms,
            now_ms=one.median_ms,
        )
        for row in now
        if row.key in known
        for name, one in row.passes.items()
        if name in known[row.key].passes
    ]
    return sorted(found, key=lambda change: -change.share)
