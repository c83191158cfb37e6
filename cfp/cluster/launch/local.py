"""Several processes on this machine, as on several hosts."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Sequence

from cfp.cluster.launch.processes import Ended, copied, start, wait
from cfp.cluster.launch.request import Launch

HERE = "127.0.0.1"


def free_port(host: str = "") -> int:
    """A port that nothing listens on just now."""
    with socket.socket() as found:
        found.bind((host, 0))
        return found.getsockname()[1]


def in_shell(launch: Launch) -> tuple[str, ...]:
    """The program, with the lines of shell that go before it."""
    if not launch.setup:
        return launch.command
    lines = ["set -e", *launch.setup, 'exec "$@"']
    return ("bash", "-c", "\n".join(lines), "bash", *launch.command)


def launch_locally(launch: Launch) -> Ended:
    """Runs all processes here, and ends all if one fails.

    What they write comes out with their numbers before each line.
    """
    coordinator = f"{HERE}:{launch.port or free_port(HERE)}"
    command = in_shell(launch)
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        try:
            for number in range(launch.processes):
                variables = launch.variables(number, coordinator)
                process = start(command, variables, subprocess.PIPE)
                processes.append(process)
                label = f"[{number}] " if launch.processes > 1 else ""
                stack.enter_context(copied(process, label))
        finally:
            ended = wait(processes)
    return ended


def dry_lines(launch: Launch, coordinator: str | None = None) -> Sequence[str]:
    """What would be started, a line of shell for each process."""
    coordinator = coordinator or f"{HERE}:{launch.port or 'PORT'}"
    lines = [f"{line} && \\" for line in launch.setup]
    for number in range(launch.processes):
        given = launch.variables(number, coordinator).items()
        lines.append(" ".join([*(f"{a}={b}" for a, b in given), launch.line]))
    return lines
