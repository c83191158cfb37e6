"""Rows of a long run, kept in a JSON file as they come, so that the run can go on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

_ROOT = Path(__file__).parents[2]


class Rows:
    """Findings of a run so far.

    Args:
        file: where it is kept; None keeps it in memory alone.
        head: what the rows have in common. A file with another is refused.
        about: what else the file is to say; it may change while rows are added.

    Raises:
        ValueError: the file is of another run.
    """

    def __init__(
        self,
        file: Path | None,
        head: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._file = file
        self._about = dict(about or {})
        # As it is read again: tuples are lists there.
        self._head = json.loads(json.dumps({**head, **_versions()}))
        self.rows: list[dict[str, Any]] = []
        if file is not None and file.exists():
            kept = json.loads(file.read_text())
            self.rows = kept.pop("rows")
            differ = {
                name
                for name in (kept.keys() | self._head.keys()) - self._about.keys()
                if kept.get(name) != self._head.get(name)
            }
            if differ:
                raise ValueError(
                    f"{file} is of a run with another {', '.join(sorted(differ))}. "
                    "Give another file, or remove this one."
                )

    def find(self, **of: Any) -> dict[str, Any] | None:
        """The row with these values, or None."""
        for row in self.rows:
            if all(row.get(name) == value for name, value in of.items()):
                return row
        return None

    def add(self, row: Mapping[str, Any]) -> None:
        """Keeps a row, with the commit and the date that it is of."""
        now = datetime.now(UTC).date().isoformat()
        self.rows.append({**row, "commit": commit(), "date": now})
        if self._file is not None:
            text = json.dumps(
                {**self._head, **self._about, "rows": self.rows}, indent=1
            )
            part = self._file.with_name(f"{self._file.name}.part")
            part.write_text(f"{text}\n")
            os.replace(part, self._file)


def commit() -> str:
    """The checkout's commit; with a + where the package's files differ from it.

    It is "unknown" where files were copied without their history.
    """

    def git(*words: str) -> str:
        made = subprocess.run(
            ["git", "-C", str(_ROOT), *words],
            capture_output=True,
            text=True,
            check=True,
        )
        return made.stdout.strip()

    if not (_ROOT / ".git").exists():
        return "unknown"
    changed = git("status", "--porcelain", "--", "cfp", "cfp_test/programs")
    return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")


def _versions() -> dict[str, str]:
    return {"jax": jax.__version__, "python": platform.python_version()}
