"""Runs a command that measures in a child process, and goes on when that dies.

The child owns the devices, so that there is never a second process on them. It logs
each build and run (`cfp.profiling.in_flight`), with a deadline. The parent holds no
device: it ends a child that is past a deadline, records why a child died, and starts
the next, which finds the records in the store.

A child is forked from here, before JAX looks for devices: it need not import anything
again, and reads nothing of the command line twice.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cfp.devices.joining import is_asked
from cfp.errors import DeviceError, compose
from cfp.profiling import in_flight
from cfp.profiling.crashes import ProcessEnd, record_crashes
from cfp.profiling.in_flight import InFlightFolder
from cfp.profiling.store import ProfileStore

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_LOOK_SECONDS = 1.0
_STOPPED_SECONDS = 3.0
# Strategies do kill processes, but not one after another.
_MOST_IN_A_ROW = 10


@dataclass(frozen=True, slots=True)
class Supervision:
    """Permission to run a command in child processes.

    Attributes:
        started: when it was given. What failed since is not tried again, whatever
            the command says of failures.
    """

    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def enter(self, store_path: Path, more_done: Callable[[], int] = lambda: 0) -> None:
        """Returns in a child, and only there.

        The parent ends with the child's exit code. Where the kernel is not Linux
        this process goes on by itself: a death is then found out the next time.

        Args:
            store_path: the profile store that the command will use.
            more_done: how much a child has done that the store does not know.

        Raises:
            DeviceError: in the parent: children died again and again.
            KeyboardInterrupt: in the parent: the user insists.
        """
        if sys.platform != "linux":
            return
        sys.stdout.flush()
        sys.stderr.flush()
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        in_a_row = done = 0
        while True:
            parent = _Parent.fork(store_path)
            if parent is None:
                signal.pthread_sigmask(signal.SIG_SETMASK, usual)
                return
            parent.attend()
            if is_asked():
                # A child would find the other processes at another point.
                raise SystemExit(parent.among_several())
            if not parent.may_go_on():
                raise SystemExit(parent.exit_code)
            now = _count_good(store_path) + more_done()
            in_a_row = in_a_row + 1 if now == done else 1
            done = now
            if in_a_row >= _MOST_IN_A_ROW:
                raise DeviceError(
                    f"{in_a_row} worker processes crashed in a row.",
                    expected="devices that run most programs",
                    got="no program that ran to its end",
                    attempt="see whether JAX runs anything on them; then go on "
                    "with --retry-failures",
                )


class _Parent:
    """The parent process, with one child."""

    def __init__(self, child: int, pipe: int, store_path: Path) -> None:
        self._child = child
        self._pipe = pipe
        self._store_path = store_path
        self._folder = InFlightFolder(store_path)
        self._status = 0
        self._overdue = False
        self._stop: int | None = None

    @classmethod
    def fork(cls, store_path: Path) -> _Parent | None:
        """Forks; returns the parent of the child, or None in the child."""
        ours, theirs = os.pipe()
        child = os.fork()
        if child:
            os.close(ours)
            return cls(child, theirs, store_path)
        os.close(theirs)
        threading.Thread(target=_die_with, args=(ours,), daemon=True).start()
        # What is overdue the parent sees, too, and does something about it.
        logging.getLogger(in_flight.__name__).setLevel(logging.ERROR)
        return None

    @property
    def exit_code(self) -> int:
        """The child's exit code; 128 and the signal's number if a signal ended it."""
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code

    def attend(self) -> None:
        """Waits for the child's end; kills it if something hangs.

        Raises:
            KeyboardInterrupt: for the second time, while the child reacts to nothing.
        """
        looked = time.monotonic()
        while True:
            event = signal.sigtimedwait(_SIGNALS, _LOOK_SECONDS)
            done, self._status = os.waitpid(self._child, os.WNOHANG)
            if done:
                os.close(self._pipe)
                return
            if event is not None and event.si_signo != signal.SIGCHLD:
                self._pass_on(event)
            now = time.monotonic()
            # Both were stopped, and the child has not had its time.
            was_stopped = now - looked > _STOPPED_SECONDS
            looked = now
            if not was_stopped and self._folder.is_late(self._child):
                self._overdue = True
                os.kill(self._child, signal.SIGKILL)

    def _pass_on(self, event: signal.struct_siginfo) -> None:
        insists = self._stop == event.si_signo == signal.SIGINT
        self._stop = event.si_signo
        if insists:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            raise KeyboardInterrupt
        # A terminal has signalled the child already; the kernel's codes are above zero.
        if event.si_code <= 0:
            os.kill(self._child, event.si_signo)

    def may_go_on(self) -> bool:
        """Returns True if the child died of a known cause, and another may start."""
        if not self._folder.of_process(self._child):
            return False  # It has tidied up: an end like any other.
        stopped = self._stop is not None
        how = ProcessEnd(status=self._status, overdue=self._overdue)
        _clear_line()
        with ProfileStore(self._store_path) as store:
            crashes = record_crashes(store, {} if stopped else {self._child: how})
        return not stopped and any(
            one.pid == self._child and one.suspects for one in crashes
        )

    def among_several(self) -> int:
        """The exit code of one process of several, and why it died if it did."""
        if not self._folder.of_process(self._child):
            return self.exit_code
        _clear_line()
        with ProfileStore(self._store_path) as store:
            # Whether it died of what it ran, or another process did, is not known.
            record_crashes(store, {})
        code = os.waitstatus_to_exitcode(self._status)
        if self._overdue or (code < 0 and self._stop is None):
            how = "took too long" if self._overdue else signal.Signals(-code).name
            message = compose(
                f"This process of several was ended: {how}.",
                expected="all processes to go on together",
                got="the end of this one; SIGABRT is how JAX ends a process when "
                "another one, or the coordinator, is gone",
                attempt="see what the others printed; then start all processes again: "
                "what was measured is kept",
            )
            print(f"error: {message}", file=sys.stderr)
        return self.exit_code


def _die_with(pipe: int) -> None:
    """Waits in the child for the parent's end, which closes the pipe."""
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _clear_line() -> None:
    """Removes the live line of a child that died, and shows the cursor again."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K\x1b[?25h")
        sys.stderr.flush()


def _count_good(store_path: Path) -> int:
    with ProfileStore(store_path) as store:
        return sum(record.ok for record in store.records())
