"""What is to be started, and how many times."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from cfp.errors import CfpError, compose

# What `cfp.join` reads.
COORDINATOR = "CFP_COORDINATOR"
PROCESSES = "CFP_PROCESSES"
PROCESS_ID = "CFP_PROCESS_ID"
# JAX reads it: devices of the host that are a process's own.
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A program to start as several processes.

    Attributes:
        command: the program and its arguments.
        nodes: how many hosts.
        gpus_per_node: of each; 0 for a program without.
        processes_per_node: one has all GPUs of its host; of several each has its share.
        cpus_per_process: processor cores; None for what the site gives.
        minutes: when it is to be over.
        name: of the job.
        setup: lines of shell before the program, such as "module load cfp".
        options: of the scheduler, as it writes them.
        hosts: names, for Open MPI.
        image: of a container, for Kubernetes.
        port: where process 0 is reached; None for one that follows from the job.

    Raises:
        CfpError: that cannot be started.
    """

    command: tuple[str, ...]
    nodes: int = 1
    gpus_per_node: int = 0
    processes_per_node: int = 1
    cpus_per_process: int | None = None
    minutes: int = 60
    name: str = "cfp"
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    image: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise CfpError(
                compose(
                    "There is nothing to start.",
                    expected="a program after --",
                    got="none",
                    attempt="cfp launch local --nodes 2 -- python train.py",
                )
            )
        if not _NAME.fullmatch(self.name):
            raise CfpError(
                compose(
                    "That is no name of a job.",
                    expected="a lower-case letter, then letters, digits and -",
                    got=repr(self.name),
                    attempt="--name cfp",
                )
            )
        if self.gpus_per_node % self.processes_per_node:
            raise CfpError(
                compose(
                    "The GPUs of a node cannot be shared out.",
                    expected="equally many for each process of a node",
                    got=f"{self.gpus_per_node} GPUs and {self.processes_per_node} "
                    "processes on each node",
                    attempt="--processes-per-node 1, which has them all",
                )
            )
        if self.hosts and len(self.hosts) != self.nodes:
            raise CfpError(
                f"Expected a name for each of {self.nodes} nodes, got "
                f"{len(self.hosts)}: {', '.join(self.hosts)}."
            )
        if any("\n" in line for line in self.options):
            raise CfpError("An option of a scheduler is one line.")

    @property
    def processes(self) -> int:
        """How many there are."""
        return self.nodes * self.processes_per_node

    @property
    def gpus_per_process(self) -> int:
        """How many GPUs each has."""
        return self.gpus_per_node // self.processes_per_node

    @property
    def line(self) -> str:
        """The program as a line of shell."""
        return shlex.join(self.command)

    def variables(self, process: int, coordinator: str) -> dict[str, str]:
        """What tells a process which one it is.

        Args:
            process: its number; those of a node follow each other.
            coordinator: HOST:PORT of process 0.
        """
        found = {
            COORDINATOR: coordinator,
            PROCESSES: str(self.processes),
            PROCESS_ID: str(process),
        }
        if self.gpus_per_node:
            share = self.gpus_per_process
            first = process % self.processes_per_node * share
            found[LOCAL_DEVICES] = ",".join(map(str, range(first, first + share)))
        return found
