"""One process of a program leads; the others carry out its jobs in a loop.

All processes must run the same programs equally often: a collective waits for every
device, for ever if need be. So process 0 plans as if it were alone. It sends each job
to the others before its own part, and reads their answers after it. A job has a number;
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

# How long others may take for what this process has finished: a build may take half an
# hour. A process that died is found out by jax.distributed, by its heartbeats.
TIMEOUT_SECONDS = 2400.0
# Or once something failed here: it fails there, too, or the other is gone.
AFTER_A_FAILURE_SECONDS = 15.0
_END = "the end"
_LOOK_SECONDS = 1.0
# From hearing that another has failed to the end of a process that does not react:
# its devices wait for the other's, which nothing can interrupt.
_GRACE_SECONDS = 5.0
_FAILED = "failed"
_AGAIN = "Then start all processes again: records are kept."


@dataclass(frozen=True, eq=False)
class Said:
    """A job of all processes: while it lives, followers keep what they built for it."""

    number: int


@dataclass(slots=True)
class Coordination:
    """The messages of all processes in turn; one for each client of `jax.distributed`.

    Attributes:
        epoch: how many times processes began to work together.
        number: how many jobs there were in this epoch.
        is_on: True while processes work together.
        hosts: names of all processes' hosts, once they have met.
        least_bytes: the least memory of any process's device; 0 if not known.
        failure: of this process in the job that it is at, after which no answer may
            come.
    """

    channel: Channel
    timeout_seconds: float = TIMEOUT_SECONDS
    after_failure: float = AFTER_A_FAILURE_SECONDS
    epoch: int = 0
    number: int = 0
    is_on: bool = False
    hosts: tuple[str, ...] = ()
    least_bytes: int = 0
    failure: str = ""
    _alive: WeakSet[Said] = field(default_factory=WeakSet)
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def leads(self) -> bool:
        """True if this process decides."""
        return self.channel.process == 0

    def say(self, job: str, *arguments: Any) -> Said:
        """Has all followers do a job."""
        with self._lock:
            self.number += 1
            self._alive.add(said := Said(self.number))
            alive = {one.number for one in self._alive}
            self._put(f"{said.number}/job", (job, arguments, alive))
        return said

    def answers(self, said: Said) -> list[Any]:
        """Reads all followers' answers to a job, in order."""
        others = range(1, self.channel.count)
        found = [self._read(f"{said.number}/{n}", n) for n in others]
        self.channel.forget(f"{self._folder}/{said.number}")
        return found

    def settle(self, said: Said, failure: str) -> None:
        """Makes sure that a run failed in all processes, or in none.

        Args:
            failure: of the run in this process; "" if it did not fail.

        Raises:
            ProcessError: it failed in some only, or another process is gone.
        """
        self.failure = failure
        found = [failure, *self.answers(said)]
        failed = [str(n) for n, text in enumerate(found) if text]
        if 0 < len(failed) < len(found):
            raise ProcessError(
                f"A program failed in process {', '.join(failed)}, and ran in the "
                f"others: {''.join(found)}. Free the memory of all devices. {_AGAIN}"
            )
        self.failure = ""

    def follow(
        self, jobs: Mapping[str, Callable[..., Any]], keep: Callable[[set[int]], object]
    ) -> Any:
        """Carries out the leader's jobs until the end, and returns the leader's result.

        Args:
            jobs: functions of a job's number and arguments. They return an answer, or
                the reason of a failure here, so that the leader does not wait for ever.
            keep: releases built programs, but for those of some numbers.
        """
        while True:
            self.number += 1
            job, arguments, alive = self._read(f"{self.number}/job", 0)
            keep(alive)
            if job == _END:
                self.answer(self.number, None)
                return arguments[0]
            self.failure = jobs[job](self.number, *arguments) or ""

    def answer(self, number: int, value: Any) -> None:
        """Answers a job."""
        self._put(f"{number}/{self.channel.process}", value)

    def broadcast(self, value: Any) -> Any:
        """Ends the followers' loops with the leader's value."""
        self.answers(self.say(_END, value))
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in order, in each of them."""
        if self.leads:
            return self.broadcast([value, *self.answers(self.say("gather"))])
        return self.follow({"gather": lambda n: self.answer(n, value) or ""}, id)

    def meet(self, facts: Mapping[str, str], memory_bytes: int) -> None:
        """Compares facts of all processes, and learns their hosts and memory.

        Args:
            memory_bytes: of a device; 0 if it does not say.

        Raises:
            ProcessError: one differs.
        """
        found = self.gather((facts, socket.gethostname(), memory_bytes))
        every, hosts, sizes = zip(*found, strict=True)
        for process, other in enumerate(every):
            check_alike(every[0], other, process)
        self.hosts, self.least_bytes = hosts, min(sizes)

    def order(self, said: Said) -> Callable[[int], None]:
        """Says to the followers of a job how often to execute; 0 is the last."""
        steps = itertools.count()
        return lambda times: self._put(f"{said.number}/order/{next(steps)}", times)

    def orders(self, number: int) -> Iterator[int]:
        """The leader's orders within a job, in a follower."""
        places = (f"{number}/order/{step}" for step in itertools.count())
        return iter(lambda: self._read(next(places), 0), 0)

    def check_others(self) -> None:
        """Checks that no other process has failed in this epoch.

        Raises:
            ProcessError: one has.
        """
        for number, text in self.channel.below(f"{self._folder}/{_FAILED}").items():
            if int(number) != self.channel.process:
                raise ProcessError(
                    f"Process {number} of this program has failed, and so this one "
                    f"ends: {text}. See what it printed. {_AGAIN}"
                )

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
        return f"cfp/{self.epoch}"

    def _put(self, place: str, value: Any) -> None:
        made = io.BytesIO()
        pickler = pickle.Pickler(made)
        # Meshes travel: devices have the same numbers everywhere.
        own = {type(jax.devices()[0]): lambda device: (_device, (device.id,))}
        pickler.dispatch_table = copyreg.dispatch_table | own
        pickler.dump(value)
        text = base64.b64encode(made.getvalue()).decode()
        self.channel.put(f"{self._folder}/{place}", text)

    def _read(self, place: str, other: int) -> Any:
        """Waits for another process's message, for less long after a failure here.

        Raises:
            ProcessError: another process has failed, or this one is gone.
        """
        most = self.after_failure if self.failure else self.timeout_seconds
        end = time.monotonic() + most
        while (
            text := self.channel.get(f"{self._folder}/{place}", _LOOK_SECONDS)
        ) is None:
            self.check_others()
            if time.monotonic() > end:
                why = self.failure and (
                    "A program failed in this process of several, which cannot go on "
                    f"without the others: {self.failure.splitlines()[0]}. "
                )
                raise ProcessError(
                    f"{why}Process {other} of {self.channel.count} does not answer: it "
                    f"gave no word for {most:.0f} s, is gone, or hangs. See what it "
                    f"printed. {_AGAIN}"
                )
        return pickle.loads(base64.b64decode(text))


def _device(number: int) -> Any:
    return next(device for device in jax.devices() if device.id == number)


def check_alike(
    leaders: Mapping[str, str], facts: Mapping[str, str], process: int
) -> None:
    """Compares facts of the leader with those of another process.

    Raises:
        ProcessError: they differ in one.
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
    """This program's; None where it has one process."""
    channel = open_channel()
    return None if channel is None else _of_channel(channel)


# It counts what was said, and there is one client in a process.
_of_channel = lru_cache(maxsize=1)(Coordination)


def _processes(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


def is_shared(mesh: Mesh) -> bool:
    """True if other processes of this program have devices of a mesh."""
    return not _processes(mesh) <= {jax.process_index()}


def talk_of(mesh: Mesh) -> Coordination | None:
    """The messages to the others of a mesh; None if all devices are this process's.

    Raises:
        ProcessError: some processes have no device, or cannot be talked to.
    """
    if not is_shared(mesh):
        return None
    talk, theirs = coordination(), sorted(_processes(mesh))
    if talk is None or len(theirs) < jax.process_count():
        raise ProcessError(
            "The mesh leaves out processes of this program, or they cannot be talked "
            f"to: its devices are of processes {theirs} of {jax.process_count()}. Make "
            f"a mesh of all {jax.device_count()} devices, and call cfp.join() or "
            "jax.distributed.initialize() in every process before any other use of JAX."
        )
    return talk


def leading(mesh: Mesh) -> Coordination | None:
    """The messages to followers; None if all devices of a mesh are this process's.

    Raises:
        ProcessError: nothing is planned by all of them now.
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
    """Has processes with devices of one of some meshes work together.

    Meanwhile a thread watches for a failure. A process that does not react to one,
    because its devices wait for the failed one's, is ended with a message.
    """
    talks = map(talk_of, meshes)
    if (talk := next((one for one in talks if one is not None), None)) is None:
        yield None
        return
    done = threading.Event()
    talk.epoch, talk.number, talk.is_on, talk.failure = talk.epoch + 1, 0, True, ""
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
