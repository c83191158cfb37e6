"""Runs and times built programs on the devices.

`cfp.profiling.builder` builds, this module runs, `cfp.profiling.store` stores, and
`cfp.profiling.jobs` combines them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from cfp.errors import CfpError
from cfp.profiling.builder import (
    BuildEnvironment,
    Built,
    Job,
    build,
    default_threads,
    is_out_of_memory,
    reason_of,
)
from cfp.profiling.coordination import leading
from cfp.profiling.inputs import (
    InputKind,
    generator,
    input_kinds,
    make_inputs,
)
from cfp.profiling.record import ProfileRecord
from cfp.profiling.timing import ON_CPUS, Run, TimingOptions, measure
from cfp.program.graph import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A mesh with functions that build and run jobs there.

    Attributes:
      build: builds a job, called in a thread; returns the record of a failure.
      run: times a job's built program.
    """

    mesh: Mesh
    build: Callable[[Any], Built | ProfileRecord]
    run: Callable[[Any, Built], ProfileRecord]

    @property
    def threads(self) -> int:
        """Number of jobs that are built side by side."""
        return default_threads(self.mesh.devices.flat[0].platform)

    def check(self, crash: ProfileRecord) -> None:
        """Raises CfpError if the devices did not survive a crash."""
        check_devices(self.mesh, crash)


def place_of_parts(
    program: Program,
    mesh: Mesh,
    environment: BuildEnvironment,
    *,
    timing: TimingOptions | None = None,
    built: dict[str, Built] | None = None,
) -> Place:
    """Makes a `Place` whose functions build and time parts of a program on a mesh.

    Args:
      built: ``{key: program}`` built for this mesh before; used ones are removed.
    """
    ready = built or {}

    def build_job(job: Job) -> Built | ProfileRecord:
        outcome = ready.pop(job.key.digest, None)
        outcome = outcome or build(program, mesh, job, environment)
        if isinstance(outcome, Built):
            compile_generators(program, mesh, job)
        return outcome

    def run_job(job: Job, built: Built) -> ProfileRecord:
        return run(built, job, program, mesh, timing=timing)

    return Place(mesh=mesh, build=build_job, run=run_job)


def timing_on(mesh: Mesh, **limits: Any) -> TimingOptions:
    """Returns timing options for a mesh's platform, with some replaced by `limits`."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return replace(ON_CPUS if is_cpu else TimingOptions(), **limits)


def run(
    built: Built,
    job: Job,
    program: Program,
    mesh: Mesh,
    *,
    timing: TimingOptions | None = None,
) -> ProfileRecord:
    """Times a built job with random inputs, which are freed afterwards."""
    kinds = input_kinds(program, job.part, job.in_specs)
    return execute(built, kinds, mesh, feedback=job.feedback, timing=timing)


def execute(
    built: Built,
    kinds: Sequence[InputKind],
    mesh: Mesh,
    *,
    feedback: Sequence[tuple[int, int]] = (),
    timing: TimingOptions | None = None,
) -> ProfileRecord:
    """Times a compiled program, in all processes with devices of the mesh.

    Args:
      kinds: kinds of the inputs to make.
      feedback: (input position, output position): the donated input, and the output
        that is the next execution's input.
    """
    timing = timing or timing_on(mesh)
    if reason := shortage(built, mesh):
        return built.record("out_of_memory", reason=reason)
    how = kinds, mesh, feedback
    if (talk := leading(mesh)) is None:
        return execute_here(built, *how, lambda run: measure(run, timing).samples_ms)
    assert built.shared is not None, "it was built in all processes"
    said = talk.say("run", built.shared.number, *how)
    order = talk.order(said)
    timed = partial(measure, options=timing, announce=order)
    record = execute_here(built, *how, lambda run: timed(run).samples_ms)
    order(0)
    talk.settle(said, "" if record.ok else record.reason)
    return record


def execute_here(
    built: Built,
    kinds: Sequence[InputKind],
    mesh: Mesh,
    feedback: Sequence[tuple[int, int]],
    time_all: Callable[[Run], Sequence[float]],
) -> ProfileRecord:
    """Runs a program in this process alone; `time_all` returns samples in ms."""
    started = time.perf_counter()
    loop = _Loop(built.compiled, feedback, mesh.devices.flat[0].platform == "cpu")
    try:
        loop.inputs = make_inputs(kinds, mesh, [place for place, _ in feedback])
        samples_ms = time_all(loop)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        return built.record(
            "out_of_memory" if is_out_of_memory(error) else "crashed",
            reason=reason_of(error),
            run_seconds=time.perf_counter() - started,
        )
    finally:
        loop.free()
    return built.record(
        "ok",
        samples_ms=samples_ms,
        run_seconds=time.perf_counter() - started,
    )


def compile_generators(program: Program, mesh: Mesh, job: Job) -> None:
    """Compiles the generators of a job's inputs, ahead of their use."""
    # Failures repeat, and are recorded, when the inputs are made.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        for kind in input_kinds(program, job.part, job.in_specs):
            generator(kind, mesh)


def check_devices(mesh: Mesh, crash: ProfileRecord) -> None:
    """Raises CfpError if devices stopped working after a crash."""
    probe = InputKind((8,), "float32", ((),))
    try:
        jax.block_until_ready(make_inputs([probe], mesh))
    except jax.errors.JaxRuntimeError as error:
        raise CfpError(
            f"The devices have stopped working: {reason_of(error)}, after "
            f"{crash.reason}. Start again: measurements are kept, and the crashed "
            "program is not tried again."
        ) from error


def shortage(built: Built, mesh: Mesh) -> str:
    """Returns the reason why a program exceeds a device's memory; "" if it may fit."""
    # Some allocators take seconds to run out of memory; this check is quick.
    for device in mesh.local_devices:
        stats = device.memory_stats() if device.platform != "cpu" else None
        limit = (stats or {}).get("bytes_limit", 0)
        if limit and built.peak_bytes > limit:
            return (
                f"needs {built.peak_bytes / 2**30:.3f} GiB on each device, which has "
                f"{limit / 2**30:.3f} GiB"
            )
    return ""


@dataclass(slots=True)
class _Loop:
    """A program that runs repeatedly, with fed-back outputs as inputs.

    Attributes:
      one_at_a_time: True on virtual devices, where overlapping runs compete for the
        threads in which their collectives wait.
      outputs: outputs of the last run: a tuple, or one array.
    """

    compiled: jax.stages.Compiled
    feedback: Sequence[tuple[int, int]]
    one_at_a_time: bool
    inputs: list[jax.Array] = field(default_factory=list)
    outputs: Any = ()

    def __call__(self, times: int) -> None:
        for _ in range(times):
            # Frees outputs that are not fed back before the next run.
            self.outputs = ()
            self.outputs = self.compiled(*self.inputs)
            for put, got in self.feedback:
                self.inputs[put] = self.outputs[got]
            if self.one_at_a_time:
                jax.block_until_ready(self.outputs)
        jax.block_until_ready(self.outputs)

    def free(self) -> None:
        """Deletes all arrays at once, even if other references exist."""
        for array in jax.tree.leaves((self.inputs, self.outputs)):
            if not array.is_deleted():
                array.delete()
        self.inputs, self.outputs = [], ()
