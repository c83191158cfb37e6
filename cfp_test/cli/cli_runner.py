"""Runs command lines: many in one process of its own, or each in its own.

Commands choose JAX's platform for their process, so they never run in that of the
tests.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cfp_test.support.forking import quick_python
from cfp_test.support.quick_flags import QUICK_FLAGS
from cfp_test.support.waiting import GUARD_SECONDS

ROOT = Path(__file__).parents[2]
COLUMNS = "200"  # how wide the commands print

_MEASURING = ("plan", "profile", "run", "search", "verify")
_BATCH = """
import gc, json, sys
gc.disable()  # While modules are loaded, as the command does.
from typer.testing import CliRunner
from cfp.cli import app
from cfp_test.support.injected import hold_times
from pytest import MonkeyPatch
hold_times(MonkeyPatch())
gc.freeze()
gc.enable()
found = []
for argv in json.load(sys.stdin):
    result = CliRunner().invoke(app, argv)
    odd = result.exception is not None and not isinstance(
        result.exception, SystemExit
    )
    trace = repr(result.exception) if odd else ""
    found.append([result.exit_code, result.stdout, result.stderr, trace])
json.dump(found, sys.stdout)
"""


class Outcome(NamedTuple):
    """Outcome of a command line; `crash` is an exception that was not caught."""

    code: int
    out: str
    err: str
    crash: str = ""


def environment(**more: str) -> dict[str, str]:
    """The environment of a user who has set nothing up, but for quick compiles.

    Args:
        more: variables; flags of XLA are added to those of the tests.
    """
    more["XLA_FLAGS"] = f"{QUICK_FLAGS} {more.get('XLA_FLAGS', '')}".strip()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "CFP_CACHE_DIR")
    }
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": COLUMNS, **more}


def run_batch(
    lines: Sequence[Sequence[str]], folder: Path, **variables: str
) -> list[Outcome]:
    """Runs commands one after another in one process, with a working folder."""
    done = subprocess.run(
        [quick_python(), "-c", _BATCH],
        input=json.dumps([list(line) for line in lines]),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(CFP_CACHE_DIR=str(folder / "cache"), **variables),
        timeout=GUARD_SECONDS,
        check=True,
    )
    return [Outcome(*found) for found in json.loads(done.stdout)]


def steady_python(folder: Path) -> str:
    """An interpreter for shell scripts, in which times follow from what is compiled."""
    path = folder / "steady_python"
    path.write_text(
        f'#!/bin/sh\nexec "{quick_python()}" -m cfp_test.support.injected "$@"\n'
    )
    path.chmod(0o700)
    return str(path)


def refusals(lines: list[list[str]], outcomes: list[Outcome]) -> dict[str, str]:
    """The messages of commands by what was typed; each ends in one."""
    texts = {}
    for line, outcome in zip(lines, outcomes, strict=False):
        assert (outcome.crash, outcome.code, outcome.out) == ("", 2, ""), line
        assert "Traceback" not in outcome.err, line
        # Sizes are those of a compiled program.
        text = re.sub(r"[\d.]+ ([KM]iB|B)\b( \(\d+%\))?", r"# \1", outcome.err)
        texts[" ".join(line).replace("\n", " ")] = text
    return texts


def run_one(*words: str, folder: Path, python: str = "", **variables: str) -> Outcome:
    """Runs one command in its own process.

    Where it measures, times follow from what is compiled.

    Args:
        words: the command.
        folder: where it runs.
        python: an interpreter, if not one that has loaded cfp already.
        variables: of its environment.
    """
    steady = ["-m", "cfp_test.support.injected"] if words[0] in _MEASURING else []
    done = subprocess.run(
        [python or quick_python(), *steady, "-m", "cfp", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(CFP_CACHE_DIR=str(folder / "cache"), **variables),
        timeout=GUARD_SECONDS,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_exported(code: str, folder: Path) -> str:
    """Runs a program that runs an exported plan on four virtual devices.

    Args:
        code: of the program.
        folder: where it runs, and where it imports from.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(
            PYTHONPATH=str(folder),
            JAX_PLATFORMS="cpu",
            XLA_FLAGS="--xla_force_host_platform_device_count=4",
        ),
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
