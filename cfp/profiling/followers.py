"""The jobs of a process that follows: it builds and runs what the leader says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from cfp.errors import CfpError
from cfp.profiling.builder import (
    BuildEnvironment,
    Built,
    CompilePool,
    Job,
    build_here,
    default_threads,
)
from cfp.profiling.collectives import build_probe_here, probe_of
from cfp.profiling.coordination import Coordination
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import compile_generators, execute_here, shortage
from cfp.profiling.tasks import Task
from cfp.profiling.timing import Run
from cfp.program.graph import Program

# Makes a program of the name of a variant, and of what of its state is in the host.
Trace = Callable[[str, Sequence[tuple[int, int]]], Program]


def follow(talk: Coordination, make: Trace, environment: BuildEnvironment) -> Any:
    """Does the leader's jobs until the end, and returns the leader's outcome."""
    with CompilePool(default_threads(jax.local_devices()[0].platform)) as pool:
        one = Follower(talk, make, environment, pool)
        jobs = {"trace": one.trace, "build": one.build, "run": one.run}
        return talk.follow(jobs, one.keep)


@dataclass(slots=True)
class Follower:
    """A process that follows, with its traced and built programs."""

    talk: Coordination
    make: Trace
    environment: BuildEnvironment
    pool: CompilePool
    programs: dict[str, Program] = field(default_factory=dict)
    built: dict[int, Future[Built | ProfileRecord]] = field(default_factory=dict)

    def trace(self, number: int, name: str, in_host: Sequence[tuple[int, int]]) -> None:
        """Traces a variant; answers with the fingerprint of its program."""
        try:
            program = self.make(name, in_host)
        except CfpError as error:
            self.talk.answer(number, f"none: {error}")
            return
        self.programs[program.fingerprint] = program
        self.talk.answer(number, program.fingerprint)

    def build(self, number: int, fingerprint: str, mesh: Mesh, task: Task) -> None:
        """Builds a task in a thread; answers with a failure's reason, or None."""

        def built() -> Built | ProfileRecord:
            try:
                made = self._made(fingerprint, mesh, task)
                if isinstance(made, Built) and (reason := shortage(made, mesh)):
                    made = made.record("out_of_memory", reason=reason)
            except BaseException as error:
                self.talk.fail(error)
                raise
            is_built = isinstance(made, Built)
            self.talk.answer(number, None if is_built else (made.status, made.reason))
            return made

        self.built[number] = self.pool.start(task.label, built)

    def _made(self, fingerprint: str, mesh: Mesh, task: Task) -> Built | ProfileRecord:
        if not isinstance(task, Job):
            return build_probe_here(task.key, probe_of(mesh, task.label), mesh)
        program = self.programs[fingerprint]
        made = build_here(program, mesh, task, self.environment)
        if isinstance(made, Built):
            compile_generators(program, mesh, task)
        return made

    def keep(self, alive: set[int]) -> None:
        """Releases built programs that the leader has released."""
        for number in self.built.keys() - alive:
            del self.built[number]

    def run(self, number: int, what: int, *how: Any) -> str:
        """Runs the program of a job; answers with a failure's reason, or ""."""
        built, orders = self.built[what].result(), self.talk.orders(number)
        assert isinstance(built, Built), "the leader runs what all have built"
        kinds, mesh, feedback = how

        def run_all(run: Run) -> tuple[float]:
            for times in orders:
                run(times)
            return (0.0,)  # The leader has the time.

        record = execute_here(built, kinds, mesh, feedback, run_all)
        self.talk.answer(number, record.reason)
        return record.reason
