"""Processes that live and die together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO

GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How processes ended.

    Attributes:
        code: 0, or that of the first that failed, as a shell has it.
        first: the number of that one; None if all ended well.
    """

    code: int
    first: int | None = None


def start(
    command: Sequence[str],
    variables: Mapping[str, str],
    stdout: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a process of its own group, which ends with this process.

    Args:
        command: what to start.
        variables: of its environment, besides those of this process.
        stdout: where it writes; errors, too, if given.
    """
    # Whatever ends this process, SIGKILL too, ends those that it has started.
    tied = shutil.which("setpriv") if sys.platform == "linux" else None
    prefix = [tied, "--pdeathsig", "KILL", "--"] if tied else []
    return subprocess.Popen(
        [*prefix, *command],
        env={**os.environ, **variables},
        stdout=stdout,
        stderr=subprocess.STDOUT if stdout is not None else None,
        start_new_session=True,
    )


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes, and what they have started: first with the chance to tidy up."""
    for sent, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        left = [one for one in processes if one.poll() is None]
        for one in left:
            os.killpg(one.pid, sent)
        for one in left:
            try:
                one.wait(patience)
            except subprocess.TimeoutExpired:
                continue  # SIGKILL is next.


def shell_code(code: int) -> int:
    """An exit code as a shell has it: 128 and more for signals."""
    return code if code >= 0 else 128 - code


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> Ended:
    """Waits for all; one that fails ends the others."""
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def watch(number: int, process: subprocess.Popen[bytes]) -> None:
        ended.put((number, process.wait()))

    for numbered in enumerate(processes):
        threading.Thread(target=watch, args=numbered, daemon=True).start()
    try:
        for _ in processes:
            number, code = ended.get()
            if code:
                return Ended(code=shell_code(code), first=number)
        return Ended(code=0)
    finally:
        end(processes)


@contextmanager
def copied(process: subprocess.Popen[bytes], label: str) -> Iterator[None]:
    """Writes a process's lines to standard output, each after a label."""
    out = process.stdout
    assert out is not None, "it writes to a pipe"

    def copy() -> None:
        with out:
            for line in out:
                sys.stdout.write(f"{label}{line.decode(errors='replace')}")
                sys.stdout.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(GRACE_SECONDS)
