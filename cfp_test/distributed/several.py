"""Programs of several processes on this machine: started together, and their ends."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cfp_test.cli.cli_runner import ROOT
from cfp_test.support.forking import quick_python
from cfp_test.support.quick_flags import QUICK_FLAGS
from cfp_test.support.waiting import GUARD_SECONDS, end_group


class Ended(NamedTuple):
    """Exit status of a process, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def messages(self) -> str:
        """Its errors, without the stack of a process that JAX ended."""
        return self.err.partition("*** Check failure stack trace")[0]


def free_port() -> int:
    """A port of this machine that nothing listens at.

    It is below those that the kernel gives to whoever asks for any.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("localhost", port))
            return port
    raise AssertionError("no port is free")


def variables(number: int, count: int, port: int, devices: int) -> dict[str, str]:
    """The environment of one of several processes, with virtual devices."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CFP_")}
    flags = f"{QUICK_FLAGS} --xla_force_host_platform_device_count={devices}"
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(ROOT),
        **_membership(number, count, port),
    }


def variables_on_gpus(
    number: int, count: int, port: int, gpus: Sequence[str]
) -> dict[str, str]:
    """The environment of one of several processes, with some of the host's GPUs.

    A process alone joins nothing.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CFP_")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    found = {**kept, "PYTHONPATH": os.pathsep.join(paths), **own}
    return found if count == 1 else {**found, **_membership(number, count, port)}


def _membership(number: int, count: int, port: int) -> dict[str, str]:
    return {
        "CFP_COORDINATOR": f"localhost:{port}",
        "CFP_PROCESSES": str(count),
        "CFP_PROCESS_ID": str(number),
    }


def start(
    command: Sequence[str],
    folder: Path,
    devices: Sequence[int],
    *,
    only: Sequence[int] | None = None,
    anew: Sequence[int] = (),
    gpus: Sequence[str] | None = None,
    **more: str,
) -> list[subprocess.Popen[str]]:
    """Starts the processes of a program.

    Args:
        command: what each runs with Python.
        folder: where.
        devices: how many devices each has; virtual ones without `gpus`.
        only: the numbers of those that are started; all by default.
        anew: the numbers of those that have a seed of hashes of their own.
        gpus: the host's GPUs, as CUDA names them, that they have in this order.
        more: variables of all.
    """
    port, count = free_port(), len(devices)

    def environment(number: int) -> dict[str, str]:
        if gpus is None:
            return variables(number, count, port, devices[number])
        first = sum(devices[:number])
        own = gpus[first : first + devices[number]]
        return variables_on_gpus(number, count, port, own)

    def python(number: int) -> str:
        starts_anew = gpus is not None or number in anew
        return sys.executable if starts_anew else quick_python()

    return [
        subprocess.Popen(
            [python(number), *command],
            env={**environment(number), **more},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for number in (range(count) if only is None else only)
    ]


def ends(started: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    """Waits for all of them; none outlives a failure."""
    found: dict[int, Ended] = {}

    def wait(number: int, process: subprocess.Popen[str]) -> None:
        out, err = process.communicate(timeout=GUARD_SECONDS)
        found[number] = Ended(process.returncode, out, err)

    waits = [threading.Thread(target=wait, args=pair) for pair in enumerate(started)]
    try:
        for one in waits:
            one.start()
        for one in waits:
            one.join()
    finally:
        for process in started:
            end_group(process)
    return [found[number] for number in range(len(started))]


def run_all(
    command: Sequence[str],
    folder: Path,
    devices: Sequence[int],
    *,
    gpus: Sequence[str] | None = None,
    **more: str,
) -> list[Ended]:
    """Starts the processes of a program, and waits for their ends.

    The second has a seed of hashes of its own: what all decide does not depend on it.
    """
    return ends(start(command, folder, devices, anew=(1,), gpus=gpus, **more))


def described(found: Sequence[Ended]) -> str:
    """Returns the output of processes, for the message of an assertion."""
    parts: list[str] = []
    for number, one in enumerate(found):
        parts += [f"--- process {number}: {one.code}", one.out[-3000:], one.err[-3000:]]
    return "\n".join(parts)
