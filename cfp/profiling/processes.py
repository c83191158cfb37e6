"""Keeps the processes of one program in step while they plan.

All must run the same programs equally often: a collective waits for every device,
and for ever if one does not come. So whatever decides what is run next is settled
between the processes, and never follows from what only one of them knows. Process 0
decides; where all are asked, it collects the answers. Each waits for the others with a
deadline, hears of it when one fails, and notices when one is at another point.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from cfp.errors import ProcessError
from cfp.profiling.coordination import AFTER_A_RUN, Coordination, coordination

# What to do about processes that differ, by what differs.
_REMEDIES = {
    "version": "install the same versions for all processes",
    "device": "start the processes on devices of one kind",
    "mesh": "make the same mesh of the same devices in all processes",
    "program": "call cfp with the same step and arguments of the same shapes in all "
    "processes; only values may differ",
}
_REMEDY = "start all processes alike: the same program, options and environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of the processes of a program on decisions and times.

    Attributes:
      alone: there is one process, which settles everything by itself. Otherwise
        each call waits until process 0, or all processes, have made it.
    """

    alone: bool

    @classmethod
    def of(cls, mesh: Mesh) -> Agreement:
        """The agreement of the processes that a mesh's devices belong to.

        A mesh of several processes must be one of all that `jax.distributed` knows.
        """
        return cls.about({device.process_index for device in mesh.devices.flat})

    @classmethod
    def about(cls, processes: set[int]) -> Agreement:
        """The agreement of some processes, by number."""
        if jax.process_count() == 1:
            return cls(alone=True)
        return cls(alone=processes == {jax.process_index()})

    @property
    def decides(self) -> bool:
        """True if this process decides, and keeps the records."""
        return self.alone or jax.process_index() == 0

    def decided(self, what: str, value: Any) -> Any:
        """Process 0's value, in all processes.

        Args:
          what: names the value; the same in all processes.
          value: what JSON can hold; of other processes than 0 it is not looked at.

        Raises:
          ProcessError: process 0 has failed, is gone, or is at another point.
        """
        return value if self.alone else _talk().decided(what, value)

    def gathered(self, what: str, value: Any) -> list[Any]:
        """The values of all processes, in their order; see `decided`."""
        return [value] if self.alone else _talk().gathered(what, value)

    def seconds(self, duration: float) -> float:
        """Process 0's duration."""
        return self.decided("a duration", duration)

    def is_over(self, end: float) -> bool:
        """Returns True if a moment of `time.monotonic` is over for process 0."""
        over = time.monotonic() > end
        return over if end == float("inf") else self.decided("the time", over)

    def everywhere(self, flags: Sequence[bool], what: str = "answers") -> list[bool]:
        """For each flag whether it is true in all processes."""
        if self.alone or not flags:
            return list(flags)
        rows = self.gathered(what, [bool(flag) for flag in flags])
        return [all(column) for column in zip(*rows, strict=True)]

    def end_of_run(self, failure: str) -> None:
        """Makes sure that something failed in all processes that ran it, or in none.

        Where one fails alone the others wait for its devices, maybe for ever.

        Args:
          failure: what it failed with here; "" if it did not.

        Raises:
          ProcessError: it failed in some only, or another process is gone.
        """
        if self.alone:
            return
        found = _talk().after_a_run(failure) if failure else None
        failures = found or self.gathered(AFTER_A_RUN, failure)
        failed = [text for text in failures if text]
        if failed and len(failed) < len(failures):
            which = _numbered([i for i, text in enumerate(failures) if text])
            raise ProcessError(
                f"A program failed in {which}, and ran in the others.",
                expected="the same outcome in all processes",
                got=failed[0],
                attempt="free the memory of all devices; then start all processes "
                "again: what was measured is kept",
            )

    def least(self, count: int) -> int:
        """The least count of any process."""
        return min(self.gathered("a least count", count))

    def same(self, facts: Mapping[str, str]) -> None:
        """Makes sure that facts are the same in all processes.

        Raises:
          ProcessError: one differs, in all processes.
        """
        if self.alone:
            return
        all_facts = self.gathered("what is planned", dict(facts))
        if (difference := differing(all_facts)) is not None:
            raise difference


def differing(all_facts: Sequence[Mapping[str, str]]) -> ProcessError | None:
    """The error of processes that were not started alike; None if they were.

    Args:
      all_facts: facts by name, of each process in order.
    """
    for name in dict.fromkeys(name for facts in all_facts for name in facts):
        values = [facts.get(name, "nothing") for facts in all_facts]
        if len(set(values)) == 1:
            continue
        groups: dict[str, list[int]] = {}
        for process, value in enumerate(values):
            groups.setdefault(value, []).append(process)
        got = "; ".join(
            f"{value} in {_numbered(numbers)}" for value, numbers in groups.items()
        )
        remedies = [text for key, text in _REMEDIES.items() if key in name]
        return ProcessError(
            f"The processes of this program differ in the {name}.",
            expected="the same in all processes",
            got=got,
            attempt=next(iter(remedies), _REMEDY),
        )
    return None


def _numbered(processes: Sequence[int]) -> str:
    names = ", ".join(map(str, processes))
    return f"process {names}" if len(processes) == 1 else f"processes {names}"


def _talk() -> Coordination:
    found = coordination()
    if found is None:
        raise ProcessError(
            "The mesh has devices of processes that cannot be talked to.",
            expected="processes that jax.distributed.initialize has brought together",
            got="a mesh of several processes without its client",
            attempt="cfp.join() or jax.distributed.initialize() in every process, "
            "before any other use of JAX",
        )
    return found
