"""A step as its race compiled it, so that the winner is not compiled a second time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from cfp.profiling.builder import Built, Job
from cfp.program.graft import Constraints, aval, partition_spec
from cfp.program.graph import Program
from cfp.program.step import FlatStep
from cfp.runtime.kept import Call


@dataclass(frozen=True)
class Raced:
    """A compiled program that does all that a step does.

    Attributes:
        compiled: takes and returns flat arrays, in an order of its own.
        job: what it was compiled as.
        mesh: the devices.
        content: a digest of the step's program, the values of all constants included.
        takes: positions of the argument leaves that it reads.
        gives: for each result leaf its place in what the program returns.
    """

    compiled: jax.stages.Compiled
    job: Job = field(repr=False)
    mesh: Mesh = field(repr=False)
    content: str
    takes: tuple[int, ...]
    gives: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, mesh: Mesh, job: Job, built: Built) -> Raced | None:
        """What was built for a whole program; None if it gives less than a step does.

        A step may hand an argument back as it is, or give one result twice.
        """
        places = {v: i for i, v in enumerate(job.part.outputs)}
        outputs = program.outputs
        if len(set(outputs)) < len(outputs) or not places.keys() >= set(outputs):
            return None
        positions = {v: i for i, v in enumerate(program.args)}
        return cls(
            compiled=built.compiled,
            job=job,
            mesh=mesh,
            content=program.content,
            takes=tuple(positions[v] for v in job.part.inputs),
            gives=tuple(places[v] for v in outputs),
        )

    def does(
        self,
        step: FlatStep,
        program: Program,
        ins: Sequence[NamedSharding],
        outs: Sequence[NamedSharding],
        constraints: Constraints,
        options: Mapping[str, str],
    ) -> bool:
        """Whether it is a step's program, compiled in just this way.

        Not where a step's types say more than the program's: keys of random numbers,
        and numbers that take the type of whatever they meet.

        Args:
            step: the step.
            program: of the step as it was traced now.
            ins, outs: of its argument and result leaves.
            constraints: what the partitioner is constrained to.
            options: of the compiler.
        """
        job, results = self.job, step.traced.jaxpr.out_avals
        if any(result.weak_type for result in results):
            return False
        given = [partition_spec(spec) for spec in job.in_specs]
        made = [partition_spec(job.out_specs[i]) for i in self.gives]
        overwritten = {self.takes[i] for i in job.donated}
        return (
            self.content == program.content
            and job.constraints == constraints
            and dict(job.options) == dict(options)
            and _types(aval(program, v) for v in program.args) == _types(step.avals)
            and _types(aval(program, v) for v in program.outputs) == _types(results)
            and [NamedSharding(self.mesh, spec) for spec in (*given, *made)]
            == [*(ins[i] for i in self.takes), *outs]
            and overwritten == {i for i, given in enumerate(step.donated) if given}
        )

    @property
    def call(self) -> Call:
        """The program as a function of all argument leaves."""
        return Call(self.compiled, self.takes, self.gives)


def _types(leaves: Iterable[Any]) -> list[tuple[tuple[int, ...], Any]]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]
