"""Joins the processes of a program, with deadlines and clear errors.

`jax.distributed.initialize` alone ends a process without naming the missing one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from cfp.errors import ProcessError
from cfp.profiling.coordination import coordination

COORDINATOR = "CFP_COORDINATOR"
PROCESSES = "CFP_PROCESSES"
PROCESS_ID = "CFP_PROCESS_ID"
# Makes commands join; JAX finds the addresses.
JOIN = "CFP_JOIN"
# Time limits for all processes to join, and between heartbeats.
JOIN_SECONDS, LOST_SECONDS = 50, 20
_LOOK_SECONDS = 0.2
# Added to JAX's own deadline, at which it ends the process with a poorer message.
_LATER_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Place of a process in a program of `processes` processes.

    Attributes:
        coordinator: HOST:PORT of process 0.
    """

    coordinator: str
    processes: int
    process_id: int

    @classmethod
    def of(
        cls,
        coordinator: str | None,
        processes: int | None,
        process_id: int | None,
        environment: Mapping[str, str],
    ) -> Membership | None:
        """Reads the values from arguments, or else the environment; None if all miss.

        Raises:
            ProcessError: a value is missing or invalid.
        """
        count = _number(PROCESSES, processes, environment)
        mine = _number(PROCESS_ID, process_id, environment)
        where = coordinator or environment.get(COORDINATOR)
        if where is None and count is None and mine is None:
            return None
        host, colon, port = (where or "").rpartition(":")
        complete = bool(host and colon and port.isdecimal()) and int(port) < 2**16
        if not complete or count is None or mine is None or not 0 <= mine < count:
            given = {"coordinator": where, "processes": count, "process id": mine}
            said = (f"{n} {'missing' if v is None else v}" for n, v in given.items())
            raise ProcessError(
                "This process cannot join the program: "
                f"{', '.join(said)}. Give --coordinator host0:1234 --processes 2 "
                "--process-id 0 on the first and --process-id 1 on the second; or the "
                f"variables {COORDINATOR}, {PROCESSES} and {PROCESS_ID}."
            )
        assert where is not None
        return cls(coordinator=where, processes=count, process_id=mine)


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    join_seconds: int = JOIN_SECONDS,
    lost_seconds: int = LOST_SECONDS,
) -> None:
    """Joins the processes of a program; call it before any use of devices.

    Calls ``jax.distributed.initialize`` with deadlines of less than a minute, and
    raises clear errors. Missing arguments come from the environment
    (``CFP_COORDINATOR``, ``CFP_PROCESSES``, ``CFP_PROCESS_ID``). Without these, JAX
    finds the values under Slurm, Open MPI and Kubernetes.

    Args:
        coordinator: HOST:PORT of process 0.
        processes: number of processes.
        process_id: number of this process, from 0; process 0 opens the port.
        join_seconds: time limit for all processes to join.
        lost_seconds: time without a process's heartbeat after which all processes end.

    Raises:
        ProcessError: the coordinator does not answer, or a process is missing.
    """
    member = Membership.of(coordinator, processes, process_id, os.environ)
    end = time.monotonic() + join_seconds
    where: dict[str, object] = {}
    if member is not None:
        _look(member, end, join_seconds)
        where = {
            "coordinator_address": member.coordinator,
            "num_processes": member.processes,
            "process_id": member.process_id,
            "cluster_detection_method": "deactivate",
        }

    failures: list[BaseException] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                **where,  # pyright: ignore[reportArgumentType]
                initialization_timeout=join_seconds + _LATER_SECONDS,
                heartbeat_timeout_seconds=lost_seconds,
                shutdown_timeout_seconds=lost_seconds,
            )
        except BaseException as error:
            failures.append(error)

    # A daemon thread: the call cannot be interrupted, and is left behind if it hangs.
    thread = threading.Thread(target=initialize, name="cfp-join", daemon=True)
    thread.start()
    thread.join(max(end - time.monotonic(), 1.0))
    if thread.is_alive():
        of = f"{member.processes} processes" if member else "processes"
        raise ProcessError(
            f"Not all {of} of this program have come together within {join_seconds} s "
            f"at {member.coordinator if member else 'the address'}. Start all at about "
            "the same time, each with its own process id; read the output of missing "
            "processes."
        )
    if failures:
        reason = (str(failures[0]).strip().splitlines() or [repr(failures[0])])[0]
        raise ProcessError(
            f"The processes cannot join: {reason}. Give "
            "cfp.join(coordinator, processes, process_id), or the variables "
            f"{COORDINATOR}, {PROCESSES} and {PROCESS_ID}; JAX finds the others by "
            "itself only under Slurm and similar launchers."
        ) from failures[0]
    if (talk := coordination()) is not None:
        # Fail before JAX misses the heartbeats, with a better message.
        talk.after_failure = min(talk.after_failure, 0.6 * lost_seconds)


def _look(member: Membership, end: float, join_seconds: int) -> None:
    """Waits until the coordinator's port answers; process 0 checks that it is free."""
    host, _, port = member.coordinator.rpartition(":")
    host = host.strip("[]")
    if member.process_id == 0:
        try:
            with socket.create_server(("", int(port))):
                return
        except OSError as error:
            raise ProcessError(
                f"Process 0 cannot open port {port}: {error}. Give another port, the "
                "same in all processes."
            ) from error
    reason = ""
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, int(port)), timeout=5.0):
                return
        except OSError as error:
            reason = str(error)
        time.sleep(_LOOK_SECONDS)
    raise ProcessError(
        f"There is no coordinator at {member.coordinator} within {join_seconds} s: "
        f"{reason}. Start process 0 of {member.processes}; give an address at which "
        "this host reaches it; check that no firewall blocks the port."
    )


def _number(name: str, given: int | None, environment: Mapping[str, str]) -> int | None:
    if given is not None or name not in environment:
        return given
    text = environment[name]
    if not text.isdecimal():
        raise ProcessError(f"{name} is {text!r}. Expected a number, such as 2.")
    return int(text)


def is_asked() -> bool:
    """True if the environment has a variable of `join`, or `CFP_JOIN` (not "0")."""
    names = (COORDINATOR, PROCESSES, PROCESS_ID)
    return any(map(os.environ.get, names)) or os.environ.get(JOIN, "") not in ("", "0")


def join_if_asked() -> None:
    """Calls :func:`join` if the environment asks for it and JAX has not joined yet."""
    if is_asked() and not jax.distributed.is_initialized():
        join(
            join_seconds=_number("CFP_JOIN_SECONDS", None, os.environ) or JOIN_SECONDS,
            lost_seconds=_number("CFP_LOST_SECONDS", None, os.environ) or LOST_SECONDS,
        )


def is_follower() -> bool:
    """True in processes other than 0, which decides and prints; uses no device."""
    if (talk := coordination()) is not None:
        return talk.channel.process != 0
    return os.environ.get(PROCESS_ID, "0") != "0"
