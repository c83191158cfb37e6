"""One process of a program leads; the others carry out its jobs in a loop.

All must run the same programs equally often: a collective waits for every device, and
for ever if one does not come. So process 0 plans as if it were alone. It says each job
to the others before it does its own part, and reads their answers after it. Each
message has a number, and is waited for with a deadline.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
END = "the end"
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 5.0
# From hearing that another has failed to the end of a process that does not react:
# its devices wait for the other's, which nothing can interrupt.
_GRACE_SECONDS = 5.0
_ROOT = "cfp"
_FAILED = "failed"
_AGAIN = "then start all processes again: what was measured is kept"

_log = logging.getLogger(__name__)


class LeaderFailed(Exception):
    """A run that failed in the leader, which says so itself."""


@dataclass(slots=True)
class Coordination:
    """The messages of all processes in turn; one for each client of `jax.distributed`.

    Attributes:
        epoch: how many times planning began.
        number: how many things were said in this epoch.
        depth: how many plans are being made, one within another.
        hosts: names of all processes' hosts, once they have met.
        least_bytes: the least memory of any process's device; 0 if not known.
    """

    channel: Channel
    timeout_seconds: float = TIMEOUT_SECONDS
    after_failure: float = AFTER_A_FAILURE_SECONDS
    epoch: int = 0
    number: int = 0
    depth: int = 0
    hosts: tuple[str, ...] = ()
    least_bytes: int = 0
    _dropped: list[str] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def leads(self) -> bool:
        """True if this process decides."""
        return self.channel.process == 0

    def gathered(
        self,
        what: str,
        value: Any,
        seconds: float | None = None,
        number: int | None = None,
    ) -> list[Any]:
        """All processes' values, in order; each calls it at the same point.

        Args:
            number: of the job that the values are of, if it is one.

        Raises:
            ProcessError: another has failed, is gone, or is at another point.
        """
        number, me = number or self._next(), self.channel.process
        self._put(f"{number}/{me}", (what, value))
        values = []
        for other in range(self.channel.count):
            theirs, found = self._read(f"{number}/{other}", other, what, seconds)
            if theirs != what:
                raise ProcessError(
                    "The processes of this program are not at the same point: "
                    f"{what} in process {me}, {theirs} in process {other}. Run the "
                    "same program in all processes; if it is, please report this."
                )
            values.append(found)
        return values

    def settle(self, failure: str, number: int | None = None) -> None:
        """Makes sure that a run failed in all processes, or in none.

        Where one fails alone the others wait for its devices, maybe for ever.

        Args:
            failure: what it failed with here; "" if it did not.
            number: of the job, if it is one.

        Raises:
            ProcessError: it failed in some only, or another process is gone.
        """
        soon = self.after_failure if failure else None
        try:
            found = self.gathered("the outcome of a run", failure, soon, number)
        except ProcessError as error:
            if not failure:
                raise
            raise ProcessError(
                "A program failed in this process of several: "
                f"{failure.splitlines()[0]}. {str(error).splitlines()[0]} See what the "
                f"other processes printed; {_AGAIN}."
            ) from error
        failed = [n for n, text in enumerate(found) if text]
        if 0 < len(failed) < len(found):
            raise ProcessError(
                f"A program failed in process {_numbers(failed)}, and ran in the "
                f"others: {found[failed[0]]}. Free the memory of all devices; {_AGAIN}."
            )

    # ------------------------------------------------------------------- the leader

    def say(self, job: str, *arguments: Any) -> int:
        """Has all followers do a job; returns its number."""
        with self._lock:
            number, dropped = self._next(), [*self._dropped]
            del self._dropped[: len(dropped)]
            self._put(f"{number}/job", (job, arguments, dropped))
        return number

    def name(self, number: int) -> str:
        """The name of what is built for a job."""
        return f"{self.epoch}.{number}"

    def drop(self, name: str) -> None:
        """Has followers forget what they built, with the next job."""
        self._dropped.append(name)

    def answers(self, number: int, seconds: float | None = None) -> list[Any]:
        """Reads all followers' answers to a job, in order."""
        others = range(1, self.channel.count)
        what = "the outcome of a job"
        found = [self._read(f"{number}/{n}", n, what, seconds) for n in others]
        self.channel.forget(f"{self._folder}/{number}")
        return found

    # ----------------------------------------------------------------- the followers

    def follow(
        self, jobs: Mapping[str, Callable[..., None]], forget: Callable[[str], object]
    ) -> Any:
        """Does what the leader says until the end, and returns what that has.

        Args:
            jobs: take a job's number and arguments, and answer it.
            forget: forgets what was built, by name.
        """
        while True:
            number = self._next()
            job, arguments, dropped = self._read(f"{number}/job", 0, "the next job")
            for one in dropped:
                forget(one)
            if job == END:
                return arguments[0]
            jobs[job](number, *arguments)

    def answer(self, number: int, value: Any) -> None:
        """Answers a job."""
        self._put(f"{number}/{self.channel.process}", value)

    def pace(self, number: int) -> Callable[[float], float]:
        """The leader's durations in a run: how often all execute follows from them."""
        steps = itertools.count()

        def agreed(duration: float) -> float:
            place = f"{number}/pace/{next(steps)}"
            if self.leads:
                self._put(place, duration)
                return duration
            return self._read(place, 0, "a duration", unless=f"{number}/0")

        return agreed

    # --------------------------------------------------------------------- messages

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

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _put(self, place: str, value: Any) -> None:
        text = base64.b64encode(pickle.dumps(value)).decode()
        self.channel.put(f"{self._folder}/{place}", text)

    def _read(
        self,
        place: str,
        other: int,
        what: str,
        seconds: float | None = None,
        unless: str = "",
    ) -> Any:
        """Waits for another process's message.

        Args:
            unless: a message that ends the wait.

        Raises:
            ProcessError: another process has failed, or this one is gone.
            LeaderFailed: the other message came.
        """
        began, said = time.monotonic(), not self.leads
        most = self.timeout_seconds if seconds is None else seconds
        folder = self._folder
        while (text := self.channel.get(f"{folder}/{place}", _LOOK_SECONDS)) is None:
            waited = time.monotonic() - began
            if failed := self.failures():
                raise lost(failed)
            if unless and self.channel.get(f"{folder}/{unless}", 0.001) is not None:
                raise LeaderFailed
            if waited > most:
                raise ProcessError(
                    f"Process {other} of {self.channel.count} has not answered for "
                    f"{waited:.0f} s with {what}: it is gone, or hangs. See what it "
                    f"printed; {_AGAIN}."
                )
            if waited > _SAY_SECONDS and not said:
                said = True
                _log.warning(
                    "waiting for process %d of %d, for %s. If it has ended, this "
                    "process ends, too, when its heartbeats are missed",
                    other,
                    self.channel.count,
                    what,
                )
        return pickle.loads(base64.b64decode(text))


def _numbers(processes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(processes)))


def lost(failed: Mapping[int, str]) -> ProcessError:
    """The error of a process when others have failed."""
    return ProcessError(
        f"Process {_numbers(failed)} of this program has failed, and so this "
        f"one ends: {failed[min(failed)]}\nSee what it printed; {_AGAIN}."
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
        yield
        if talk.depth == 1:
            talk.gathered(END, None)
            if talk.leads:  # All have read what was said in the epoch before.
                talk.channel.forget(f"{_ROOT}/{talk.epoch - 1}")
    except BaseException as error:
        talk.fail(error)
        raise
    finally:
        done.set()
        talk.depth -= 1


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
