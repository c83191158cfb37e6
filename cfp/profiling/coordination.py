"""Coordinates the processes of one program: process 0 leads, the others follow.

All processes must run the same programs equally often, as a collective waits for every
device, possibly for ever. So process 0 plans as if it were alone. It sends each job to
the others before its own part, and reads their answers afterwards. A job has a number;
its messages are deleted once all have answered.
"""

from __future__ import annotations

import base64
import contextlib
import copyreg
import io
import itertools
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
from weakref import WeakSet

import jax
from jax.sharding import Mesh

from cfp.errors import ProcessError
from cfp.program.jaxprs import Channel, open_channel

# Longest wait for another process's message: a build may take half an hour. Dead
# processes are found sooner, by the heartbeats of jax.distributed.
TIMEOUT_SECONDS = 2400.0
# The same after a failure here, which usually happens in all processes at once.
AFTER_A_FAILURE_SECONDS = 15.0
# Names a process's number before the processes are joined.
PROCESS_ID = "CFP_PROCESS_ID"
_END = "the end"
_LOOK_SECONDS = 1.0
# Time between the failure of another process and the end of this one, if it does not
# react: its devices wait for the failed one's, which nothing can interrupt.
_GRACE_SECONDS = 5.0
_FAILED = "failed"
_AGAIN = "Then start all processes again: records are kept."


@dataclass(frozen=True, eq=False)
class Said:
    """A job's number; while the object lives, followers keep the job's program."""

    number: int


@dataclass(slots=True)
class Coordination:
    """Messages between all processes, over the client of `jax.distributed`.

    Attributes:
        epoch: number of `coordinated` contexts so far.
        number: number of jobs in this epoch.
        is_on: True inside of `coordinated`.
        hosts: ``[process]`` host names, after `meet`.
        least_bytes: least memory of a device, after `meet`; 0 if one is unknown.
    """

    channel: Channel
    timeout_seconds: float = TIMEOUT_SECONDS
    after_failure: float = AFTER_A_FAILURE_SECONDS
    epoch: int = 0
    number: int = 0
    is_on: bool = False
    hosts: tuple[str, ...] = ()
    least_bytes: int = 0
    _alive: WeakSet[Said] = field(default_factory=WeakSet)
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def leads(self) -> bool:
        """True in process 0."""
        return self.channel.process == 0

    def say(self, job: str, *arguments: Any) -> Said:
        """Sends a job to followers, which keep its program while the result lives."""
        with self._lock:
            self.number += 1
            self._alive.add(said := Said(self.number))
            alive = {one.number for one in self._alive}
            self._put(f"{said.number}/job", (job, arguments, alive))
        return said

    def answers(self, said: Said, failure: str = "") -> list[Any]:
        """Waits for all followers' answers to a job; lists them in order of processes.

        A `failure`, the reason why the job failed in this process, shortens the wait.
        Raises ProcessError if a process has failed, or does not answer in time.
        """
        others = range(1, self.channel.count)
        found = [self._read(f"{said.number}/{n}", n, failure) for n in others]
        self.channel.forget(f"{self._folder}/{said.number}")
        return found

    def settle(self, said: Said, failure: str) -> None:
        """Checks that a run failed in all processes, or in none.

        Args:
            failure: reason of the failure in this process; "" if the run succeeded.

        Raises:
            ProcessError: the run failed in some processes only; or see `answers`.
        """
        found = [failure, *self.answers(said, failure)]
        failed = [str(n) for n, text in enumerate(found) if text]
        if 0 < len(failed) < len(found):
            raise ProcessError(
                f"A program failed in process {', '.join(failed)}, and ran in the "
                f"others. Reason: {'; '.join(filter(None, found))}. End other programs "
                f"on these processes' devices. {_AGAIN}"
            )

    def follow(
        self, jobs: Mapping[str, Callable[..., Any]], keep: Callable[[set[int]], object]
    ) -> Any:
        """Carries out the leader's jobs until the end, and returns the leader's result.

        Args:
            jobs: ``{job: function of a job's number and arguments}``. Functions call
                `answer`, and return the reason of a failure here, which shortens the
                wait for the next job, or an empty value.
            keep: releases built programs, except those of the given job numbers.
        """
        failure = ""
        while True:
            self.number += 1
            job, arguments, alive = self._read(f"{self.number}/job", 0, failure)
            keep(alive)
            if job == _END:
                self.answer(self.number, None)
                return arguments[0]
            failure = jobs[job](self.number, *arguments) or ""

    def answer(self, number: int, value: Any) -> None:
        """Sends this process's answer to a job."""
        self._put(f"{number}/{self.channel.process}", value)

    def broadcast(self, value: Any) -> Any:
        """Ends the followers' loops; `follow` there and this method return `value`."""
        self.answers(self.say(_END, value))
        return value

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in order, in every process."""
        if self.leads:
            return self.broadcast([value, *self.answers(self.say("gather"))])
        return self.follow({"gather": lambda n: self.answer(n, value) or ""}, id)

    def meet(self, facts: Mapping[str, str], memory_bytes: int) -> None:
        """Checks that all processes have equal facts; sets `hosts` and `least_bytes`.

        Args:
            memory_bytes: memory of this process's device; 0 if unknown.

        Raises:
            ProcessError: a fact differs, or a process failed or does not answer.
        """
        found = self.gather((facts, socket.gethostname(), memory_bytes))
        every, hosts, sizes = zip(*found, strict=True)
        for process, other in enumerate(every):
            check_alike(every[0], other, process)
        self.hosts, self.least_bytes = hosts, min(sizes)

    def order(self, said: Said) -> Callable[[int], None]:
        """Returns a function that sends followers a number of executions; 0 ends."""
        steps = itertools.count()
        return lambda times: self._put(f"{said.number}/order/{next(steps)}", times)

    def orders(self, number: int) -> Iterator[int]:
        """Yields the leader's numbers of executions for a job, until 0."""
        places = (f"{number}/order/{step}" for step in itertools.count())
        return iter(lambda: self._read(next(places), 0), 0)

    def check_others(self) -> None:
        """Raises ProcessError if another process has failed in this epoch."""
        for number, text in self.channel.below(f"{self._folder}/{_FAILED}").items():
            if int(number) != self.channel.process:
                raise ProcessError(
                    f"Process {number} of this program has failed, and so this one "
                    f"ends: {text}. Read the output of process {number}. {_AGAIN}"
                )

    def fail(self, error: BaseException) -> None:
        """Tells the other processes the error with which this one fails."""
        text = str(error).strip() or type(error).__name__
        if not isinstance(error, ProcessError):
            text = f"{type(error).__name__}: {text}"
        # The coordinator may be gone; the error itself is more useful than that.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            key = f"{self._folder}/{_FAILED}/{self.channel.process}"
            self.channel.put(key, f"{text} [{socket.gethostname()}, pid {os.getpid()}]")

    @property
    def _folder(self) -> str:
        return f"cfp/{self.epoch}"

    def _put(self, place: str, value: Any) -> None:
        made = io.BytesIO()
        pickler = pickle.Pickler(made)
        # Devices in meshes are sent as their ids, which are equal in all processes.
        own = {type(jax.devices()[0]): lambda device: (_device, (device.id,))}
        pickler.dispatch_table = copyreg.dispatch_table | own
        pickler.dump(value)
        text = base64.b64encode(made.getvalue()).decode()
        self.channel.put(f"{self._folder}/{place}", text)

    def _read(self, place: str, other: int, failure: str = "") -> Any:
        """Returns another process's message; a failure here shortens the wait."""
        most = self.after_failure if failure else self.timeout_seconds
        end = time.monotonic() + most
        while (
            text := self.channel.get(f"{self._folder}/{place}", _LOOK_SECONDS)
        ) is None:
            self.check_others()
            if time.monotonic() > end:
                why = failure and (
                    "A program failed in this process of several, which cannot go on "
                    f"without the others: {failure.splitlines()[0]}. "
                )
                raise ProcessError(
                    f"{why}Process {other} of {self.channel.count} does not answer "
                    f"(waited {most:.0f} s): it has ended, hangs or is busy. Read the "
                    f"output of process {other}. {_AGAIN}"
                )
        return pickle.loads(base64.b64decode(text))


def _device(number: int) -> Any:
    return next(device for device in jax.devices() if device.id == number)


def check_alike(
    leaders: Mapping[str, str], facts: Mapping[str, str], process: int
) -> None:
    """Compares facts, {name: text}, of the leader and another process.

    Raises:
        ProcessError: a fact differs.
    """
    for name in dict.fromkeys((*leaders, *facts)):
        one, other = leaders.get(name, "nothing"), facts.get(name, "nothing")
        if one != other:
            raise ProcessError(
                f"The processes of this program differ in the {name}: {one} in process "
                f"0; {other} in process {process}. Start all alike: the same step, "
                "shapes, mesh, options, versions, and kind of devices."
            )


def coordination() -> Coordination | None:
    """Returns this process's `Coordination`; None if the program has one process."""
    channel = open_channel()
    return None if channel is None else _of_channel(channel)


# One object for each process, since it counts messages.
_of_channel = lru_cache(maxsize=1)(Coordination)


def is_follower() -> bool:
    """True except in process 0; by `CFP_PROCESS_ID` before joining. Opens no device."""
    if (talk := coordination()) is not None:
        return talk.channel.process != 0
    return os.environ.get(PROCESS_ID, "") not in ("", "0")


def _processes(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


def is_shared(mesh: Mesh) -> bool:
    """True if other processes of this program have devices of a mesh."""
    return not _processes(mesh) <= {jax.process_index()}


def talk_of(mesh: Mesh) -> Coordination | None:
    """Returns the `Coordination` for a mesh; None if all its devices are here.

    Raises:
        ProcessError: a shared mesh leaves out a process, or jax.distributed is off.
    """
    if not is_shared(mesh):
        return None
    talk, theirs = coordination(), sorted(_processes(mesh))
    if talk is None or len(theirs) < jax.process_count():
        raise ProcessError(
            "The mesh leaves out processes of this program, or they cannot be reached: "
            f"its devices are of processes {theirs} of {jax.process_count()}. Make "
            f"a mesh of all {jax.device_count()} devices, and call cfp.join() or "
            "jax.distributed.initialize() in every process before any other use of JAX."
        )
    return talk


def leading(mesh: Mesh) -> Coordination | None:
    """Returns the leader's `Coordination`; None if all devices of a mesh are here.

    Raises:
        ProcessError: the processes are not `coordinated` now, or this one follows.
    """
    talk = talk_of(mesh)
    if talk is not None and not (talk.is_on and talk.leads):
        raise ProcessError(
            "The mesh has devices of several processes. Plan for it with cfp.plan, or "
            "cfp plan, in all of them."
        )
    return talk


@contextlib.contextmanager
def coordinated(meshes: Iterable[Mesh]) -> Iterator[Coordination | None]:
    """Context in which the processes of the first shared mesh work together.

    Yields None if all devices are this process's. A thread watches for failures of
    other processes. If this process does not react to one, since its devices wait for
    the failed one's, the thread ends it with a message.
    """
    talks = map(talk_of, meshes)
    if (talk := next((one for one in talks if one is not None), None)) is None:
        yield None
        return
    done = threading.Event()
    talk.epoch, talk.number, talk.is_on = talk.epoch + 1, 0, True
    threading.Thread(target=_watch, args=(talk, done.wait), daemon=True).start()
    try:
        yield talk
    except BaseException as error:
        talk.fail(error)
        raise
    finally:
        done.set()
        talk.is_on = False


def _watch(talk: Coordination, is_done: Callable[[float], bool]) -> None:
    while not is_done(_LOOK_SECONDS):
        try:
            talk.check_others()
        except jax.errors.JaxRuntimeError:
            return  # The coordinator is gone: jax.distributed ends this process.
        except ProcessError as error:
            if not is_done(_GRACE_SECONDS):
                print(f"error: {error}", file=sys.stderr, flush=True)
                os._exit(1)
