"""Runs other programs, and says what was run where one fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cfp.errors import CfpError

ROOT = Path(__file__).resolve().parent.parent
_SHOWN_LINES = 12


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    attempt: str,
) -> str:
    """Runs a command to its end, and returns what it printed.

    Args:
        command: its name and arguments.
        environ: the variables; this process's if None.
        folder: where it runs.
        attempt: what to try if it fails.

    Raises:
        CfpError: it failed.
    """
    words = [os.fspath(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environ, cwd=folder, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CfpError(
            f"{' '.join(words)} failed:\n"
            + ("\n".join(said[-_SHOWN_LINES:]) or f"exit {done.returncode}")
            + f"\nTry: {attempt}."
        )
    return done.stdout


def find_uv() -> str:
    """The command uv, beside this Python or on the PATH.

    Raises:
        CfpError: it is not installed.
    """
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise CfpError(
            "uv, which resolves for other platforms, is not on the PATH. Run "
            f"{sys.executable} -m pip install uv."
        )
    return found
