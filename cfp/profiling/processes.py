"""The processes that have a mesh's devices: whether they are started alike."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from cfp.errors import ProcessError
from cfp.profiling.coordination import Coordination, coordination

# What to do about processes that differ, by what differs.
_REMEDIES = {
    "version": "Install the same versions for all processes.",
    "device": "Start the processes on devices of one kind.",
    "mesh": "Make the same mesh of the same devices in all processes.",
    "program": "Call cfp with the same step and arguments of the same shapes in all "
    "processes; only values may differ.",
}
_REMEDY = "Start all processes alike: the same program, options and environment."


def is_shared(mesh: Mesh) -> bool:
    """True if other processes of this program have devices of a mesh."""
    return are_several({device.process_index for device in mesh.devices.flat})


def are_several(processes: set[int]) -> bool:
    """True if some processes, by number, are more than this one."""
    return jax.process_count() > 1 and processes != {jax.process_index()}


def leading(mesh: Mesh) -> Coordination | None:
    """The messages to the others of a mesh; None where all devices are this process's.

    Raises:
        ProcessError: nothing is planned by all of them now.
    """
    if not is_shared(mesh):
        return None
    talk = talk_of_all()
    if talk.depth == 0 or not talk.leads:
        raise ProcessError(
            "The mesh has devices of several processes. Plan for it with cfp.plan, or "
            "cfp plan, in all of them."
        )
    return talk


def talk_of_all() -> Coordination:
    """The messages of all processes.

    Raises:
        ProcessError: there are none.
    """
    found = coordination()
    if found is None:
        raise ProcessError(
            "The mesh has devices of processes that this one is not connected to. "
            "Call cfp.join() or jax.distributed.initialize() in every process, "
            "before any other use of JAX."
        )
    return found


def meet(talk: Coordination, facts: Mapping[str, str], memory_bytes: int) -> None:
    """Makes sure that facts are the same in all processes, and that hosts are known.

    Args:
        memory_bytes: of a device; 0 if it does not say.

    Raises:
        ProcessError: one differs, in all processes.
    """
    mine = socket.gethostname(), memory_bytes, dict(facts)
    hosts, sizes, every = zip(*talk.gathered("what is planned", mine), strict=True)
    if (difference := differing(every)) is not None:
        raise difference
    talk.hosts, talk.least_bytes = hosts, min(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of processes that all do the same, and decide nothing.

    Attributes:
      alone: there is one process.
    """

    alone: bool

    @classmethod
    def of(cls, mesh: Mesh) -> Agreement:
        """The agreement of the processes that a mesh's devices belong to."""
        return cls(alone=not is_shared(mesh))

    def everywhere(self, flags: Sequence[bool], what: str) -> list[bool]:
        """For each flag whether it is true in all processes."""
        if self.alone or not flags:
            return list(flags)
        rows: list[Any] = talk_of_all().gathered(what, [bool(flag) for flag in flags])
        return [all(column) for column in zip(*rows, strict=True)]

    def end_of_run(self, failure: str) -> None:
        """Makes sure that what failed here failed in all processes.

        Raises:
          ProcessError: it failed in some only, or another process is gone.
        """
        if not self.alone:
            talk_of_all().settle(failure)


def differing(all_facts: Sequence[Mapping[str, str]]) -> ProcessError | None:
    """The error of processes that were not started alike; None if they were.

    Args:
      all_facts: facts by name, of each process in order.
    """
    for name in dict.fromkeys(name for facts in all_facts for name in facts):
        values = [facts.get(name, "nothing") for facts in all_facts]
        if len(set(values)) == 1:
            continue
        where: dict[str, list[str]] = {}
        for process, value in enumerate(values):
            where.setdefault(value, []).append(str(process))
        got = [f"{value} in process {', '.join(who)}" for value, who in where.items()]
        remedies = [text for key, text in _REMEDIES.items() if key in name]
        return ProcessError(
            f"The processes of this program differ in the {name}: {'; '.join(got)}. "
            f"{next(iter(remedies), _REMEDY)}"
        )
    return None
