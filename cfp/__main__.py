"""``python -m cfp`` is the ``cfp`` command."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from typing import Any

OLDEST_PYTHON = (3, 11)


class _Pipe(io.FileIO):
    """A file, pipe or socket that drops output after its reader has left.

    `cfp show plan.json | head` ends without an error, and planning goes on to save its
    plan.
    """

    def write(self, data: Any) -> int:
        """Writes bytes, or drops them if the reader has left; returns their number."""
        try:
            return super().write(data)
        except (BrokenPipeError, ConnectionResetError):
            return memoryview(data).nbytes


def _outlive_readers() -> None:
    """Lets the process go on after the reader of its stdout or stderr has left."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # It was closed: >&-
            setattr(sys, name, open(os.devnull, "w"))
        if not isinstance(stream, io.TextIOWrapper):
            continue
        with contextlib.suppress(OSError, ValueError):  # It is in memory, or closed.
            text = io.TextIOWrapper(
                io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, text)


def main() -> None:
    """Runs the ``cfp`` command.

    `cfp doctor` starts without JAX or any other package, so that it can name missing
    ones. Other commands import what they need.
    """
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"cfp needs Python 3.11, 3.12 or 3.13; this is {found}, {sys.executable}.\n"
            "  try: python3.11 -m venv, and install cfp there"
        )
    _outlive_readers()
    if sys.argv[1:2] == ["doctor"]:
        from cfp.cluster.doctor import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    # While modules are loaded nothing is garbage, and what they hold stays: looking at
    # it again and again took the collector a third of the time until a command begins.
    gc.disable()
    try:
        from cfp.cli import main as command
    except KeyboardInterrupt:
        print("error: Interrupted.", file=sys.stderr)
        sys.exit(130)
    gc.freeze()
    gc.set_threshold(500_000)  # Programs are large, and little of them is garbage.
    gc.enable()
    command()


if __name__ == "__main__":
    main()
