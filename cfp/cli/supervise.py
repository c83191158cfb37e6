"""Runs a command that measures in a child process, and continues when that dies.

The child owns the devices, so that no second process uses them. It notes each build and
run in the store (`cfp.profiling.tasks`), with a deadline. The parent ends a child
past a deadline, records why a child died, and starts the next one, which continues from
the store.

The child is forked before JAX looks for devices: it imports nothing again, and does not
read the command line twice.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cfp.devices.joining import is_asked
from cfp.errors import CfpError
from cfp.profiling import tasks
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import forget, is_late, settle

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_SECONDS = 1.0
_STOPPED_SECONDS = 3.0
# Strategies do kill processes, but not one after another.
_MOST_IN_A_ROW = 10


@dataclass(frozen=True, slots=True)
class Supervision:
    """Permission to run a command in child processes.

    Attributes:
        started: time of the permission. Later failures are not tried again, whatever
            the options.
    """

    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def enter(self, store_path: Path) -> None:
        """Returns in a child, and only there.

        The parent ends with the child's exit code. Where the kernel is not Linux
        this process goes on by itself: a death is then found out the next time.

        Args:
            store_path: the profile store that the command will use.

        Raises:
            CfpError: in the parent: children died again and again.
            KeyboardInterrupt: in the parent: the user insists.
        """
        if sys.platform != "linux":
            return
        sys.stdout.flush()
        sys.stderr.flush()
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        in_a_row = done = 0
        while in_a_row < _MOST_IN_A_ROW:
            ours, theirs = os.pipe()
            if not (child := os.fork()):
                os.close(theirs)
                arguments = (ours, store_path)
                threading.Thread(target=_die_with, args=arguments, daemon=True).start()
                # What is overdue the parent sees, too, and does something about it.
                logging.getLogger(tasks.__name__).setLevel(logging.ERROR)
                signal.pthread_sigmask(signal.SIG_SETMASK, usual)
                return
            os.close(ours)
            with ProfileStore(store_path) as store:
                end = _attend(child, store)
                os.close(theirs)
                if end is not None:
                    raise SystemExit(end)
                now = sum(one.ok for one in store.records())
            in_a_row = in_a_row + 1 if now == done else 1
            done = now
        raise CfpError(
            f"{in_a_row} worker processes crashed in a row. See whether JAX runs "
            "anything on these devices; then go on with --retry-failures."
        )


def _attend(child: int, store: ProfileStore) -> int | None:
    """Waits for a child's end; kills it if something hangs.

    Returns:
        The command's exit code; None if the child died of something that is on record
        now, and another may start.

    Raises:
        KeyboardInterrupt: for the second time, while the child reacts to nothing.
    """
    looked, is_overdue, stop = time.monotonic(), False, 0
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        event = signal.sigtimedwait(_SIGNALS, _LOOK_SECONDS)
        if event is not None and event.si_signo != signal.SIGCHLD:
            if stop == event.si_signo == signal.SIGINT:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                forget(store, child)
                raise KeyboardInterrupt
            # A terminal has signalled the child already; the kernel's codes are above
            # zero.
            stop = event.si_signo
            if event.si_code <= 0:
                os.kill(child, stop)
        # If both were stopped, the child has not had its time.
        was_stopped = time.monotonic() - looked > _STOPPED_SECONDS
        looked = time.monotonic()
        if not was_stopped and is_late(store, child):
            is_overdue = True
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(ended[1])
    exit_code = code if code >= 0 else 128 - code  # As shells have it.
    if stop:
        forget(store, child)
        return exit_code
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    cause = "crashed", f"the process ended {how}"
    is_unknown = is_overdue or -code in _SENT_BY_OTHERS
    if not settle(store, child, None if is_unknown else cause):
        return exit_code  # It has tidied up: an end like any other.
    if sys.stderr.isatty():  # Its live line is there yet, and no cursor.
        sys.stderr.write("\r\x1b[2K\x1b[?25h")
        sys.stderr.flush()
    if not is_asked():
        return None
    # Of several processes a child would find the others at another point.
    why = "took too long" if is_overdue else f"exit code {exit_code}"
    print(
        f"error: This process of several was ended: {why}. SIGABRT is how JAX ends a "
        "process when another one, or the coordinator, is gone. See what the others "
        "printed; then start all processes again: what was measured is kept.",
        file=sys.stderr,
    )
    return exit_code


def _die_with(pipe: int, store_path: Path) -> None:
    """Waits in the child for the parent's end, which closes the pipe."""
    os.read(pipe, 1)
    with ProfileStore(store_path) as store:
        forget(store, os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
