"""Jobs of following processes: they build and run the programs that process 0 names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
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
from cfp.profiling.runner import Run, compile_generators, execute_here, shortage
from cfp.profiling.tasks import Task
from cfp.program.graph import Program

# Traces a program, from a variant's name and the part of its state in host memory.
Trace = Callable[[str, Sequence[tuple[int, int]]], Program]


def follow(talk: Coordination, make: Trace, environment: BuildEnvironment) -> Any:
    """Carries out the leader's jobs until the end, and returns the leader's result."""
    programs = dict[str, Program]()
    built = dict[int, Future[Built | ProfileRecord]]()

    def trace(number: int, name: str, in_host: Sequence[tuple[int, int]]) -> None:
        """Traces a variant; answers with its program's fingerprint, or "none: ..."."""
        try:
            program = make(name, in_host)
        except CfpError as error:
            talk.answer(number, f"none: {error}")
            return
        programs[program.fingerprint] = program
        talk.answer(number, program.fingerprint)

    def build(number: int, fingerprint: str, mesh: Mesh, task: Task) -> None:
        """Builds in a thread, then answers None or a failure's (status, reason)."""

        def build_here_and_answer() -> Built | ProfileRecord:
            try:
                if isinstance(task, Job):
                    program = programs[fingerprint]
                    made = build_here(program, mesh, task, environment)
                    if isinstance(made, Built):
                        compile_generators(program, mesh, task)
                else:
                    probe = probe_of(mesh, task.label)
                    made = build_probe_here(task.key, probe, mesh)
                if isinstance(made, Built) and (reason := shortage(made, mesh)):
                    made = made.record("out_of_memory", reason=reason)
            except BaseException as error:
                talk.fail(error)
                raise
            is_built = isinstance(made, Built)
            talk.answer(number, None if is_built else (made.status, made.reason))
            return made

        built[number] = pool.start(task.label, build_here_and_answer)

    def run(number: int, what: int, *how: Any) -> str:
        """Runs what job `what` built; answers and returns a failure's reason, or ""."""
        program = built[what].result()
        assert isinstance(program, Built), "the leader runs what all have built"

        def run_all(execute: Run) -> tuple[float]:
            for times in talk.orders(number):
                execute(times)
            return (0.0,)  # Only the leader's times count.

        kinds, mesh, feedback = how
        record = execute_here(program, kinds, mesh, feedback, run_all)
        talk.answer(number, record.reason)
        return record.reason

    def keep(alive: set[int]) -> None:
        """Releases built programs that the leader has released."""
        for number in built.keys() - alive:
            del built[number]

    with CompilePool(default_threads(jax.local_devices()[0].platform)) as pool:
        return talk.follow({"trace": trace, "build": build, "run": run}, keep)
