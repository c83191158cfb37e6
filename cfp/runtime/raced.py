"""A step as its race compiled it, so that the winner is not compiled a second time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh, NamedSharding

from cfp.profiling.builder import Built, Job
from cfp.program.graft import Constraints
from cfp.program.graph import Program
from cfp.program.signature import Signature, signature
from cfp.program.step import FlatStep


@dataclass(frozen=True)
class ReusableExecutable:
    """A compiled program that does all that a step does.

    Attributes:
        compiled: takes and returns the step's flat leaves.
        job: what it was compiled as.
        mesh: the devices.
        content: a digest of the step's program, the values of all constants included.
        types: of the step's leaves.
    """

    compiled: jax.stages.Compiled
    job: Job = field(repr=False)
    mesh: Mesh = field(repr=False)
    content: str
    types: Signature = field(repr=False)

    @classmethod
    def of(
        cls, program: Program, mesh: Mesh, job: Job, built: Built
    ) -> ReusableExecutable:
        """Makes the record of a whole program that was built."""
        types = signature(program, job.part)
        return cls(built.compiled, job, mesh, program.content, types)

    def does(
        self,
        step: FlatStep,
        program: Program,
        ins: Sequence[NamedSharding],
        outs: Sequence[NamedSharding],
        constraints: Constraints,
        options: Mapping[str, str],
    ) -> bool:
        """True if it is a step's program, compiled in just this way.

        Args:
            step: the step.
            program: of the step as it was traced now.
            ins, outs: of its argument and result leaves.
            constraints: what the partitioner is constrained to.
            options: of the compiler.
        """
        job, types = self.job, self.types
        return (
            self.content == program.content
            and job.constraints == constraints
            and dict(job.options) == dict(options)
            and types == signature(program, job.part)
            and types.shardings(self.mesh, job.in_specs, job.out_specs)
            == (tuple(ins), tuple(outs))
            and set(job.donated) == {i for i, given in enumerate(step.donated) if given}
        )
