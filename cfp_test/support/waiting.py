"""Other processes, and what is waited for: an event ends a wait, never a guess.

The only limit on a wait is `GUARD_SECONDS`, so that what hangs fails at last. No
machine that runs the tests at all is so slow, or so busy, that it would take as long.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

GUARD_SECONDS = 1200.0
_LOOK_SECONDS = 0.02
# Where tests run in the background a shell has them, and their children, ignore it.
_INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def until(
    condition: Callable[[], bool], process: subprocess.Popen[str] | None = None
) -> None:
    """Returns once a condition holds.

    Args:
        condition: looked at again and again.
        process: what is to bring it about.

    Raises:
        AssertionError: the process has ended and it does not hold, or never will.
    """
    started = time.monotonic()
    looks = threading.Event()
    while not condition():
        if process is not None and process.poll() is not None and not condition():
            raise AssertionError(f"ended too early: {process.communicate()}")
        assert time.monotonic() - started < GUARD_SECONDS, "it hangs"
        looks.wait(_LOOK_SECONDS)


@contextlib.contextmanager
def running(
    command: Sequence[str], folder: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process whose output is kept; it ends with the body, and all its children."""
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTIBLE, *command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            # Nothing but its children may be left, or not even those.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def end_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process that leads a group, with all that it has started.

    Nothing happens where it has ended already: its number may be another's by now.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # It has just ended.
            os.killpg(process.pid, signal.SIGKILL)


def end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Returns a process's standard output and standard error until its end."""
    return process.communicate(timeout=GUARD_SECONDS)


def has_taken(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Returns True if a process on Linux has taken note of a signal it was sent."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    pending = sum(
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith(("SigPnd:", "ShdPnd:"))
    )
    return not pending >> (number - 1) & 1
