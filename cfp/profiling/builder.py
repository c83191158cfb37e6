"""Builds a job: compiles a part of a program under its shardings.

A part that cannot be built is a record like any other: the compiler will refuse it
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, Sharding
from jax.tree_util import tree_leaves

from cfp.profiling.coordination import Said, leading
from cfp.profiling.files import make_private_folder
from cfp.profiling.hlo import collectives_in
from cfp.profiling.key import GPU_PLATFORMS, ProfileKey
from cfp.profiling.overwritten import compile_right
from cfp.profiling.record import Collective, CompiledBytes, ProfileRecord, Status
from cfp.profiling.tasks import Task
from cfp.program.constrain import Constraints
from cfp.program.fp8 import options_of
from cfp.program.graph import Program, Spec
from cfp.program.memory import host_kind
from cfp.program.part import Part, lower_part

# What a compiler says when a program does not fit can list every buffer.
_LONGEST_REASON = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Task):
    """One part of a program to measure under one set of shardings.

    Attributes:
      part: the ops, from `cfp.program.part.cut_part`.
      feedback: (input position, output position) pairs: the input is donated, and the
        output takes its place in the next iteration.
      choice: of a whole program, the choice that its record stores.
      kernels: key of its kernels. The first job of each key is built before the others,
        so that the compiler tunes kernels once; None if other programs have tuned them.
    """

    part: Part
    constraints: Constraints
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    feedback: tuple[tuple[int, int], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    choice: str = ""
    kernels: Hashable = None

    def __post_init__(self):
        assert len(self.in_specs) == len(self.part.inputs), self.label
        assert len(self.out_specs) == len(self.part.outputs), self.label
        for positions in zip(*self.feedback, strict=True):
            assert len(set(positions)) == len(positions), f"{self.label}: twice"
        for put, got in self.feedback:
            assert self.in_specs[put] == self.out_specs[got], f"{self.label}: feedback"

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of the inputs whose memory the part overwrites."""
        return tuple(place for place, _ in self.feedback)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEnvironment:
    """Caches of compilers, which speed up the next compile and change no result.

    Compiles in several threads slow each other while they tune fusions on one GPU; a
    directory of tuned fusions prevents that.

    Attributes:
      folder: folder of the caches, beside a profile store; None for no caches.
    """

    folder: Path | None = None

    @classmethod
    def beside(cls, store_path: Path) -> BuildEnvironment:
        """Directories next to a profile store."""
        return cls(folder=store_path.parent)

    @property
    def executables_dir(self) -> Path | None:
        """Executables of whole steps under plans; see `cfp.runtime.executables`."""
        return self.folder and self.folder / "executables"

    def autotune_dir(self, platform: str) -> Path | None:
        """XLA's autotuning results; None where it tunes no kernels, or keeps none."""
        is_gpu = platform in GPU_PLATFORMS
        return self.folder / "autotune" if is_gpu and self.folder else None

    def is_untuned(self, platform: str) -> bool:
        """True if the compiler tunes kernels for a platform, and has not yet."""
        tuned = self.autotune_dir(platform)
        return bool(tuned) and not any(one.is_file() for one in tuned.rglob("*"))

    def options(self, platform: str) -> dict[str, str]:
        """Returns compiler options for a platform that name the caches."""
        if (tuned := self.autotune_dir(platform)) is None:
            return {}
        make_private_folder(tuned)  # XLA refuses one that is missing.
        return {"xla_gpu_per_fusion_autotune_cache_dir": str(tuned)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built(CompiledBytes):
    """A compiled program with the compiler's figures.

    Attributes:
      compiled: takes and returns flat arrays; None for a program of a child process.
      shared: the same program in other processes that have devices of the mesh.
      collectives: collectives of one run.
      build_seconds: tracing, lowering and compiling.
    """

    key: ProfileKey
    compiled: Any
    shared: Said | None = None
    collectives: tuple[Collective, ...] = ()
    build_seconds: float = 0.0

    def record(
        self,
        status: Status,
        *,
        reason: str = "",
        samples_ms: Sequence[float] = (),
        run_seconds: float = 0.0,
    ) -> ProfileRecord:
        """Makes the record of this build: sizes, collectives and seconds."""
        return ProfileRecord(
            key=self.key.digest,
            parts=self.key.parts,
            status=status,
            reason=reason,
            samples_ms=tuple(samples_ms),
            **asdict(self.size),
            build_seconds=self.build_seconds,
            run_seconds=run_seconds,
            collectives=self.collectives,
        )


def build(
    program: Program,
    mesh: Mesh,
    job: Job,
    environment: BuildEnvironment = BuildEnvironment(),
) -> Built | ProfileRecord:
    """Lowers and compiles a job, in all processes that have devices of the mesh.

    Several threads may call it at once: compiling releases Python's lock. A failure is
    a record.
    """
    make = partial(build_here, program, mesh, job, environment)
    return build_everywhere(mesh, job, make, program.fingerprint)


def build_everywhere(
    mesh: Mesh,
    task: Task,
    make: Callable[[], Built | ProfileRecord],
    fingerprint: str = "",
) -> Built | ProfileRecord:
    """Builds a task, in all processes that have devices of the mesh.

    Args:
      make: builds it in this one.
      fingerprint: of the program that it is a part of.
    """
    if (talk := leading(mesh)) is None:
        return make()
    shared, mine = talk.say("build", fingerprint, mesh, task), make()
    failures = [one for one in talk.answers(shared) if one is not None]
    if not isinstance(mine, Built):
        return mine
    for status, reason in failures:
        return mine.record(status, reason=f"in another process: {reason}")
    return replace(mine, shared=shared)


def build_here(
    program: Program, mesh: Mesh, job: Job, environment: BuildEnvironment
) -> Built | ProfileRecord:
    """Does what `build` does, in this process alone."""
    platform = mesh.devices.flat[0].platform
    usual = {**environment.options(platform), **options_of(program.rewritten)}
    lower = partial(
        lower_part,
        program,
        job.part,
        mesh,
        job.constraints,
        job.in_specs,
        job.out_specs,
        job.donated,
    )
    return build_lowered(job.key, lower, {**usual, **dict(job.options)})


def build_lowered(
    key: ProfileKey,
    lower: Callable[[], jax.stages.Lowered],
    options: Mapping[str, str],
) -> Built | ProfileRecord:
    """Lowers and compiles a program, and reads what the compiler says about it."""
    started = time.perf_counter()
    try:
        compiled, text = compile_right(lower(), options)
    except AssertionError:
        raise  # A bug of ours says nothing about the part.
    except Exception as error:  # The compiler's errors have no type in common.
        return ProfileRecord(
            key=key.digest,
            parts=key.parts,
            status="out_of_memory" if is_out_of_memory(error) else "compile_error",
            reason=reason_of(error),
            build_seconds=time.perf_counter() - started,
        )
    seconds = time.perf_counter() - started
    return Built(
        key=key,
        compiled=compiled,
        collectives=collectives_in(text),
        build_seconds=seconds,
        **asdict(compiled_bytes(compiled)),
    )


def compiled_bytes(compiled: jax.stages.Compiled) -> CompiledBytes:
    """The memory that a program needs, as its compiler says; nothing if it does not."""
    if (memory := compiled.memory_analysis()) is None:
        return CompiledBytes()
    sizes: dict[str, int] = {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }
    if not memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes:
        # CPUs' compiler counts what the host has as a device's.
        for name, size in _bytes_in_host(compiled).items():
            sizes[name] -= size
    # Some backends state -1 for what they do not know.
    return CompiledBytes(**{name: max(0, int(size)) for name, size in sizes.items()})


def _bytes_in_host(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Computes what a program takes and returns in host memory, for each device."""
    arguments = tree_leaves(compiled.args_info)
    ins = tree_leaves(compiled.input_shardings)
    if len(ins) != len(arguments):  # What is not read is not passed.
        return {}
    results = tree_leaves(compiled.out_info), tree_leaves(compiled.output_shardings)
    given = [*map(_host_bytes, arguments, ins)]
    donated = [n for n, one in zip(given, arguments, strict=True) if one.donated]
    return {
        "argument_bytes": sum(given),
        "alias_bytes": sum(donated),
        "output_bytes": sum(map(_host_bytes, *results)),
    }


def _host_bytes(info: Any, sharding: Sharding) -> int:
    if not host_kind(sharding):
        return 0
    return prod(sharding.shard_shape(info.shape)) * info.dtype.itemsize


def is_out_of_memory(error: Exception) -> bool:
    """Returns True if a compiler's or runtime's error means too little memory."""
    # JAX gives XLA's status codes as the first word of the message.
    said = str(error) if isinstance(error, jax.errors.JaxRuntimeError) else ""
    is_said = "RESOURCE_EXHAUSTED" in said or "out of memory" in said.lower()
    return isinstance(error, MemoryError) or is_said


def reason_of(error: Exception) -> str:
    """An error as a record keeps it: its type and the beginning of its message."""
    text = f"{type(error).__name__}: {error}".strip()
    if len(text) > _LONGEST_REASON:
        text = text[: _LONGEST_REASON - 3] + "..."
    return text
