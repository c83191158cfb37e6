"""Runs a measuring command in a child process; restarts it if a measurement kills it.

Only the child uses the devices. It notes each build and run in the store
(`cfp.profiling.tasks`), with a deadline. The parent kills a child past a deadline, and
records failures. The next child continues from the store. A command of several
processes has no next child.

The child is forked before JAX looks for devices, so that it neither imports again nor
reads the command line again.
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

from cfp.errors import CfpError
from cfp.platform import is_join_asked
from cfp.profiling import tasks
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import forget, is_late, settle

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_SECONDS = 1.0
_STOPPED_SECONDS = 3.0
# Number of crashes in a row, without a new measurement, that end the command.
_MOST_IN_A_ROW = 10


@dataclass(frozen=True, slots=True)
class Supervision:
    """Permission to run a command in child processes.

    Attributes:
        started: start of the command. ``--retry-failures`` retries only failures from
            before this time.
    """

    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def enter(self, store_path: Path) -> None:
        """Forks, and returns in the child only; other systems than Linux do not fork.

        The parent supervises children, and exits with the last child's exit code.

        Args:
            store_path: the profile store that the command will use.

        Raises:
            CfpError: in the parent, if ten children died in a row without progress.
            KeyboardInterrupt: in the parent, if the user interrupts twice.
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
                # The parent itself handles overdue work.
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
            f"{in_a_row} worker processes in a row crashed or hung. Check that JAX "
            "runs on these devices, then run the command again with --retry-failures."
        )


def _attend(child: int, store: ProfileStore) -> int | None:
    """Waits for a child's end; kills it past a deadline; a second interrupt raises.

    Returns the command's exit code. None starts another child: this one died in a
    recorded build or run, the parent got no signal, and the command has one process.
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
            # A terminal's signal (code above zero) has reached the child, too.
            stop = event.si_signo
            if event.si_code <= 0:
                os.kill(child, stop)
        # If both processes were stopped, the deadline does not count.
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
    of_others = (*_SENT_BY_OTHERS, *([signal.SIGABRT] if is_join_asked() else ()))
    if not settle(store, child, None if is_overdue or -code in of_others else cause):
        return exit_code  # No work was in progress: an ordinary end.
    if sys.stderr.isatty():  # Erases the child's live line, and shows the cursor.
        sys.stderr.write("\r\x1b[2K\x1b[?25h")
        sys.stderr.flush()
    if not is_join_asked():
        return None
    # Of several processes, a new child would be out of step with the others.
    why = "took too long" if is_overdue else f"exit code {exit_code}"
    print(
        f"error: This process of several was ended: {why}. JAX ends a process by "
        "SIGABRT if another process or the coordinator is gone. See the output of the "
        "others, then start all processes again; measurements are kept.",
        file=sys.stderr,
    )
    return exit_code


def _die_with(pipe: int, store_path: Path) -> None:
    """Kills this child once the parent is gone; clears its work in the store first."""
    os.read(pipe, 1)
    with ProfileStore(store_path) as store:
        forget(store, os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
