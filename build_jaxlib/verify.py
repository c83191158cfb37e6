"""Installs a wheelhouse into a fresh environment, without a network, and tries it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from build_jaxlib.tools import run
from cfp.errors import CfpError


def create(environment: Path, python: str) -> str:
    """Makes an environment; returns its interpreter."""
    run(
        [python, "-m", "venv", environment],
        attempt="install python3-venv, or run build.py by another Python",
    )
    return str(environment / "bin" / "python")


def install(python: str, wheelhouse: Path) -> None:
    """Installs all of a wheelhouse, and nothing else.

    Raises:
        CfpError: the wheels are for another platform, or were changed.
    """
    run(
        [
            *(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--find-links", wheelhouse / "wheels", "--require-hashes"),
            *("--requirement", wheelhouse / "lock.txt"),
        ],
        environ=offline(),
        attempt="sha256sum -c SHA256SUMS in the wheelhouse; a wheelhouse is for one "
        "version of Python and one architecture, which its name says",
    )


def try_out(python: str) -> None:
    """Has the doctor compile and run a graft.

    Raises:
        CfpError: it does not work.
    """
    done = subprocess.run(
        [python, "-m", "cfp", "doctor", "--only", "graft", "--only", "packages"],
        env=offline(),
        cwd="/",  # Not the clone: the installed package is tried.
        check=False,
    )
    if done.returncode:
        raise CfpError(
            f"What was installed does not work, as the rows above say. Run "
            f"{python} -m cfp doctor."
        )


def offline() -> dict[str, str]:
    """This process's variables, without what would lead pip elsewhere."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1"}


def this_python() -> str:
    """The version of this interpreter, as platforms name it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
