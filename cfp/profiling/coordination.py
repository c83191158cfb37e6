"""Coordination between the processes of a program, by messages in a fixed order.

Each message has a number and a name, so that processes at different points of the
program find out, and each is waited for with a deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from cfp.errors import ProcessError
from cfp.program.channel import Channel, open_channel

# How long others may take for what this process has finished: a build may take half an
# hour. A process that died is found out by jax.distributed, by its heartbeats.
TIMEOUT_SECONDS = 2400.0
# Or once something failed here: it fails there, too, or the other is gone.
AFTER_A_FAILURE_SECONDS = 15.0
AFTER_A_RUN = "the outcome of a run"
_LOOK_SECONDS = 1.0
_LOOKS = 5
_SAY_SECONDS = 5.0
# From hearing that another has failed to the end of a process that does not react:
# its devices wait for the other's, which nothing can interrupt.
_GRACE_SECONDS = 5.0
_ROOT = "cfp"
_FAILED = "failed"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Coordination:
    """The messages of all processes in turn; one for each client of `jax.distributed`.

    Attributes:
        timeout_seconds: seconds to wait for another process.
        after_failure: the same, once something failed here.
        epoch: how many times planning began.
        number: how many things were said in this epoch.
        depth: how many plans are being made, one within another.
        interrupted: the epoch in which this process was interrupted last.
    """

    channel: Channel
    timeout_seconds: float = TIMEOUT_SECONDS
    after_failure: float = AFTER_A_FAILURE_SECONDS
    epoch: int = 0
    number: int = 0
    depth: int = 0
    interrupted: int = 0

    def decided(self, what: str, value: Any) -> Any:
        """Process 0's value; see `cfp.profiling.processes.Agreement`."""
        key = self._next()
        if self.channel.process == 0:
            self._put(f"{key}/all", what, value)
            return value
        return self._wait(key, 0, f"{key}/all", what)

    def gathered(self, what: str, value: Any) -> list[Any]:
        """All processes' values, in order."""
        key, me = self._next(), self.channel.process
        if me:
            self._put(f"{key}/{me}", what, value)
            return self._wait(key, 0, f"{key}/all", what, answered=True)
        others = range(1, self.channel.count)
        values = [
            value,
            *(self._wait(key, other, f"{key}/{other}", what) for other in others),
        ]
        self._put(f"{key}/all", what, values)
        return values

    def after_a_run(self, failure: str) -> list[str]:
        """Exchanges the failure of a run among all processes, which follows soon.

        Raises:
            ProcessError: another is gone, which is why it failed here.
        """
        timeout_seconds, self.timeout_seconds = self.timeout_seconds, self.after_failure
        try:
            return self.gathered(AFTER_A_RUN, failure)
        except ProcessError as error:
            first, *_ = str(error).splitlines()
            raise ProcessError(
                "A program failed in this process of several, which cannot go on "
                "without the others.",
                expected="the same outcome in all processes",
                got=f"{failure.splitlines()[0]}. {first}",
                attempt="see what the other processes printed, and whether one of "
                "them has ended; then start all again: what was measured is kept",
            ) from error
        finally:
            self.timeout_seconds = timeout_seconds

    def failures(self) -> dict[int, str]:
        """Reads the failures of other processes in this epoch, by number."""
        found = self.channel.below(f"{self._folder}/{_FAILED}")
        return {int(n): t for n, t in found.items() if int(n) != self.channel.process}

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process fails."""
        text = str(error).strip() or type(error).__name__
        if not isinstance(error, ProcessError):
            text = f"{type(error).__name__}: {text}"
        # The coordinator may be what is gone; the error itself says more than that.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            key = f"{self._folder}/{_FAILED}/{self.channel.process}"
            self.channel.put(key, f"{text} [{socket.gethostname()}, pid {os.getpid()}]")

    @property
    def _folder(self) -> str:
        return f"{_ROOT}/{self.epoch}"

    def _next(self) -> str:
        self.number += 1
        return f"{self._folder}/{self.number}"

    def _put(self, key: str, what: str, value: Any) -> None:
        self.channel.put(key, json.dumps({"what": what, "value": value}))

    def _wait(
        self, key: str, other: int, place: str, what: str, answered: bool = False
    ) -> Any:
        """Reads another process's message, which is to be of the expected place.

        Args:
            key: of what is said now.
            answered: whether this process has said its part.
        """
        began, said = time.monotonic(), False
        while (text := self.channel.get(place, _LOOK_SECONDS)) is None:
            waited = time.monotonic() - began
            if failed := self.failures():
                raise lost(failed)
            if not answered:
                # A process that waits for another thing at this place finds out.
                self._put(f"{key}/{self.channel.process}", what, None)
            for which, meant in self.channel.below(key).items():
                self._compare(which, json.loads(meant)["what"], what)
            if waited > self.timeout_seconds:
                raise self._silent(other, what, waited)
            if waited > _SAY_SECONDS and not said:
                said = True
                _log.warning(
                    "waiting for process %d of %d, for %s. If it has ended, this "
                    "process ends, too, when its heartbeats are missed",
                    other,
                    self.channel.count,
                    what,
                )
        found = json.loads(text)
        self._compare(str(other), found["what"], what)
        return found["value"]

    def _compare(self, which: str, theirs: str, ours: str) -> None:
        if theirs == ours:
            return
        if theirs == AFTER_A_RUN:
            # There a program failed, which it is about to say.
            for _ in range(_LOOKS):
                if failed := self.failures():
                    raise lost(failed)
                time.sleep(_LOOK_SECONDS)
        other = 0 if which == "all" else int(which)
        raise ProcessError(
            "The processes of this program are not at the same point of planning.",
            expected=f"{ours}, as process {self.channel.process} does",
            got=f"{theirs} from process {other}",
            attempt="the same program in all processes, which calls cfp in the "
            "same order; if it is the same, please report this",
        )

    def _silent(self, other: int, what: str, waited: float) -> ProcessError:
        return ProcessError(
            f"Process {other} of {self.channel.count} does not answer.",
            expected=f"{what} from it",
            got=f"nothing for {waited:.0f} s; it is gone, or hangs",
            attempt="see what it printed; then start all processes again: what "
            "was measured is kept",
        )


def lost(failed: dict[int, str]) -> ProcessError:
    """The error of a process when others have failed."""
    numbers = ", ".join(map(str, sorted(failed)))
    first, *more = failed[min(failed)].splitlines()
    return ProcessError(
        f"Process {numbers} of this program has failed, and so this one ends.",
        expected="all processes to go on together",
        got="\n    ".join([first, *more]),
        attempt="see what it printed; then start all processes again: what was "
        "measured is kept",
    )


def coordination() -> Coordination | None:
    """This program's; None where it has one process."""
    channel = open_channel()
    return None if channel is None else _of_channel(channel)


@lru_cache(maxsize=1)
def _of_channel(channel: Channel) -> Coordination:
    # It counts what was said, and there is one client in a process.
    return Coordination(channel)


@contextlib.contextmanager
def coordinated_planning(alone: bool) -> Iterator[None]:
    """Runs planning in all processes together: each hears of another's failure.

    Meanwhile a thread watches for a failure. A process that does not react to one,
    because its devices wait for the failed one's, is ended with a message.
    """
    talk = None if alone else coordination()
    if talk is None:
        yield
        return
    if talk.depth == 0:
        talk.epoch += 1
        talk.number = 0
    talk.depth += 1
    done = threading.Event()
    if talk.depth == 1:
        arguments = (talk, done.wait)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()
    try:
        try:
            yield
        except KeyboardInterrupt:
            talk.interrupted = talk.epoch
            raise
        if talk.depth == 1:
            _tidy_up(talk)
    except BaseException as error:
        talk.fail(error)
        raise
    finally:
        done.set()
        talk.depth -= 1


@contextlib.contextmanager
def interrupting_all(alone: bool) -> Iterator[None]:
    """Has an interrupt between plans end all processes, which wait in the next plan.

    Where it came within a plan all hear of it there: a further epoch would only part
    those that go on from here. After a plan's end some may be past it.
    """
    talk = None if alone else coordination()
    begun = 0 if talk is None else talk.epoch
    try:
        yield
    except KeyboardInterrupt:
        if talk is not None and talk.interrupted <= begun:
            with coordinated_planning(alone):
                raise
        raise


def _tidy_up(talk: Coordination) -> None:
    """Removes what was said in the epoch before, which all have read by now."""
    talk.gathered("the end of planning", None)
    if talk.channel.process == 0:
        talk.channel.forget(f"{_ROOT}/{talk.epoch - 1}")


def _watch(talk: Coordination, is_done: Callable[[float], bool]) -> None:
    while not is_done(_LOOK_SECONDS):
        try:
            failed = talk.failures()
        except jax.errors.JaxRuntimeError:
            return  # The coordinator is gone: jax.distributed ends this process.
        if not failed:
            continue
        if not is_done(_GRACE_SECONDS):
            print(f"error: {lost(failed)}", file=sys.stderr, flush=True)
            os._exit(1)
