"""The commit that a benchmark ran at."""

from __future__ import annotations

import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]


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
