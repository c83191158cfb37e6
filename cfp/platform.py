"""Devices of a command: joins the processes, selects JAX's platform, makes the mesh.

Joining has deadlines and clear errors: `jax.distributed.initialize` alone ends a
process without naming the missing one. JAX reads its environment variables at the first
use of a device. A command therefore calls `select` first, and `make_mesh` after it.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import jax
from jax.sharding import Mesh

from cfp.errors import CfpError, ProcessError
from cfp.printable import mesh_text
from cfp.profiling.coordination import PROCESS_ID, coordination

COORDINATOR = "CFP_COORDINATOR"
PROCESSES = "CFP_PROCESSES"
# Makes commands join; JAX finds the addresses.
JOIN = "CFP_JOIN"
# Time limits for all processes to join, and between heartbeats.
JOIN_SECONDS, LOST_SECONDS = 50, 20
_LOOK_SECONDS = 0.2
# Added to JAX's own deadline, at which it ends the process with a poorer message.
_LATER_SECONDS = 60


PLATFORMS = ("cpu", "cuda", "tpu")
DEFAULT_CPU_DEVICES = 4
MOST_CPU_DEVICES = 4096

Axes = tuple[tuple[str, int], ...]

_AXIS_NAMES = ("x", "y", "z")
_COUNT_FLAG = "--xla_force_host_platform_device_count"
# On a busy machine threads of virtual devices start late: XLA's limit is 40 s. Guess.
_WAIT_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
_AXIS = re.compile(r"([A-Za-z_]\w*)=0*([1-9]\d*)")

_NO_DEVICE = (
    "Give --for 4xh200 to plan for GPUs that are not here, or --platform cpu for "
    "virtual devices; for GPUs install cfp[cuda], and see that nvidia-smi lists them."
)


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
        """Reads arguments, else variables that are not ""; returns None without any.

        Raises:
            ProcessError: only some values are given, or one is invalid.
        """
        count = _number(PROCESSES, processes, environment)
        mine = _number(PROCESS_ID, process_id, environment)
        where = coordinator or environment.get(COORDINATOR) or None
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

    Calls ``jax.distributed.initialize`` with deadlines, by default below a minute, and
    raises clear errors. Missing arguments come from the environment
    (``CFP_COORDINATOR``, ``CFP_PROCESSES``, ``CFP_PROCESS_ID``). Without these, JAX
    finds the values under Slurm, Open MPI and Kubernetes, and on Cloud TPUs.

    Args:
        coordinator: HOST:PORT of process 0.
        processes: number of processes.
        process_id: number of this process, from 0; process 0 opens the port.
        join_seconds: time limit for all processes to join.
        lost_seconds: time without a process's heartbeat after which all processes end.

    Raises:
        ProcessError: the processes cannot join, for example because one is missing.
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
            f"The processes cannot join: {reason}. Call cfp.join(coordinator, "
            "processes, process_id) once, before any use of devices; or set "
            f"{COORDINATOR}, {PROCESSES} and {PROCESS_ID}. JAX finds these by itself "
            "only on Cloud TPUs, and under Slurm and similar launchers."
        ) from failures[0]
    if (talk := coordination()) is not None:
        # Fail before JAX misses the heartbeats, with a better message.
        talk.after_failure = min(talk.after_failure, 0.6 * lost_seconds)


def _look(member: Membership, end: float, join_seconds: int) -> None:
    """In process 0 checks that its port is free; elsewhere waits until 0 answers."""
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
    if given is not None or not (text := environment.get(name)):
        return given
    if not text.isdecimal():
        raise ProcessError(f"{name} is {text!r}. Expected a number, such as 2.")
    return int(text)


def is_join_asked() -> bool:
    """True if a variable of `join` is set (not ""), or `CFP_JOIN` (not "", not "0")."""
    names = (COORDINATOR, PROCESSES, PROCESS_ID)
    return any(map(os.environ.get, names)) or os.environ.get(JOIN, "") not in ("", "0")


def join_if_asked() -> None:
    """Calls :func:`join` if the environment asks for it and JAX has not joined yet."""
    if is_join_asked() and not jax.distributed.is_initialized():
        join(
            join_seconds=_number("CFP_JOIN_SECONDS", None, os.environ) or JOIN_SECONDS,
            lost_seconds=_number("CFP_LOST_SECONDS", None, os.environ) or LOST_SECONDS,
        )


def parse_mesh(devices: int | None, mesh: str | None) -> Axes | None:
    """Reads axes from ``--devices 4`` (x=4) or ``--mesh x=2,y=2``; None without either.

    Raises:
        CfpError: `mesh` is no text of a mesh, or has another number of devices.
    """
    if mesh is None:
        axes = None if devices is None else (("x", devices),)
    else:
        parts = [_AXIS.fullmatch(part.strip()) for part in mesh.split(",")]
        names = [part[1] for part in parts if part]
        if not all(parts) or len(set(names)) < len(parts):
            raise CfpError(
                f"The mesh {mesh!r} cannot be read. Give each axis once, as in --mesh "
                "x=4 or --mesh x=2,y=2."
            )
        axes = tuple((part[1], int(part[2])) for part in parts if part)
        if devices is not None and devices != prod(size for _, size in axes):
            raise CfpError(
                f"--devices {devices} and the mesh {mesh} contradict each other. Give "
                "only one of them."
            )
    return axes


def mesh_shapes(count: int) -> list[Axes]:
    """Lists mesh shapes of `count` devices, of up to three axes; fewest axes first.

    Sizes do not decrease from axis to axis: other orders of the same sizes are left
    out, since they only change which devices are neighbours.
    """
    sizes = [
        (first, second, count // first // second)
        for first in range(1, count + 1)
        for second in range(first, count // first + 1)
        if count % (first * second) == 0 and first * second**2 <= count
    ]
    shapes = [tuple(size for size in shape if size > 1) or (1,) for shape in sizes]
    shapes.sort(key=len)
    return [tuple(zip(_AXIS_NAMES, shape, strict=False)) for shape in shapes]


def select(platform: str | None, axes: Axes | None) -> None:
    """Makes JAX use a platform; "cpu" has as many virtual devices as the mesh.

    Calls `join_if_asked`. Processes share the virtual devices out.

    Args:
        platform: "cpu", "cuda", "tpu", or None: JAX selects platform and devices.
        axes: the mesh; None for all devices (four virtual ones).

    Raises:
        CfpError: the platform is unknown, or virtual devices are too many or too few.
        ProcessError: the processes of the command cannot join.
    """
    count = prod(size for _, size in axes) if axes else DEFAULT_CPU_DEVICES
    if platform is not None:
        _select(platform, count)
    join_if_asked()
    if platform == "cpu":  # JAX reads the flags at its first use of a device.
        os.environ["XLA_FLAGS"] = flags_for_devices(_share(count))


def _select(platform: str, count: int) -> None:
    if platform not in PLATFORMS:
        raise CfpError(
            f"There is no platform {platform!r}. Give --platform "
            f"{'cuda' if platform == 'gpu' else ' or --platform '.join(PLATFORMS)}."
        )
    if platform == "cpu" and count > MOST_CPU_DEVICES:
        raise CfpError(
            f"There cannot be {count} virtual devices, each with threads of its "
            f"own. Give a mesh of up to {MOST_CPU_DEVICES} devices."
        )
    os.environ["JAX_PLATFORMS"] = platform
    # JAX has already read the variable, at its import.
    jax.config.update("jax_platforms", platform)


def flags_for_devices(count: int) -> str:
    """Returns ``XLA_FLAGS`` with `count` virtual devices, and a long wait for them."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [x for x in flags if not x.startswith(_COUNT_FLAG) and x != _WAIT_FLAG]
    return " ".join([_WAIT_FLAG, *kept, f"{_COUNT_FLAG}={count}"])


def _share(count: int) -> int:
    """Returns how many of a mesh's `count` virtual devices this process has."""
    if (talk := coordination()) is None:
        return count
    if count < talk.channel.count:
        raise CfpError(
            f"{count} devices are too few for {talk.channel.count} processes. Give a "
            "larger mesh, or start fewer processes."
        )
    each, more = divmod(count, talk.channel.count)
    return each + (talk.channel.process < more)


def make_command_mesh(axes: Axes | None) -> Mesh:
    """Makes a command's mesh; with all devices if axes is None.

    Raises:
        CfpError: too few devices are there, or none works; or axes is None, and the
            only device is a CPU.
    """
    mesh = make_mesh(axes)
    if axes is None and mesh.size == 1 and mesh.devices.flat[0].platform == "cpu":
        raise CfpError(
            "This machine has one device, a CPU. Give --devices 4 --platform cpu "
            "for virtual devices, --for 4xh200 to plan for GPUs that are not here, "
            "or --devices 1."
        )
    return mesh


def make_mesh(axes: Axes | None, *, remedy: str = "") -> Mesh:
    """Makes a mesh of the first devices; of all, with one axis x, if axes is None.

    Args:
        remedy: sentence for the error of missing devices, in place of the usual one.

    Raises:
        CfpError: too few devices are there, or none works.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX raises AssertionError if JAX_PLATFORMS names a platform without a plugin.
        reason = (str(error).strip().splitlines() or ["no plugin for the platform"])[0]
        raise CfpError(
            f"JAX finds no device: {reason}. {remedy or _NO_DEVICE}"
        ) from error
    axes = axes or (("x", len(devices)),)
    wanted = prod(size for _, size in axes)
    kind = devices[0].platform
    if len(devices) < wanted:
        fewer = f"--devices {len(devices)}, or " if len(devices) > 1 else ""
        remedy = remedy or f"Give {fewer}--platform cpu for virtual devices."
        counts = sorted(Counter(one.process_index for one in devices).items())
        each = ", ".join(f"{count} in process {i}" for i, count in counts)
        where = f": {each}" if len(counts) > 1 else ""
        raise CfpError(
            f"There are too few devices: the mesh {mesh_text(axes)} needs {wanted}, "
            f"and here are {len(devices)} of platform {kind}"
            f"{where}. {remedy}"
        )
    names, sizes = zip(*axes, strict=True)
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, kinds, devices=devices[:wanted])


def all_meshes(most_axes: int) -> dict[str, Mesh]:
    """Makes {``x=2,y=4``: mesh} of all devices: `mesh_shapes` of 1 to `most_axes` axes.

    Raises:
        CfpError: no device works.
    """
    shapes = mesh_shapes(make_mesh(None).size)
    return {
        mesh_text(axes): make_mesh(axes) for axes in shapes if len(axes) <= most_axes
    }
