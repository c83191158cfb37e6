"""Builds jobs: compiles a part of a program under its shardings.

A part that does not compile gets a record of the failure. Later runs do not compile it,
unless they retry failures. `CompilePool` has the threads for compiles side by side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, Sharding
from jax.tree_util import tree_leaves

from cfp.profiling.coordination import Said, leading
from cfp.profiling.files import make_private_folder
from cfp.profiling.hlo import collectives_in, compile_right
from cfp.profiling.record import (
    GPU_PLATFORMS,
    Collective,
    CompiledBytes,
    ProfileKey,
    ProfileRecord,
    Status,
)
from cfp.profiling.tasks import Task
from cfp.program.constrain import Constraints
from cfp.program.graph import Program, Spec
from cfp.program.jaxprs import unchecked
from cfp.program.memory import host_kind
from cfp.program.part import Part, lower_part

# Characters. A compiler's message about memory may list every buffer.
_LONGEST_REASON = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Task):
    """A part of a program, or all of it, to measure under one set of shardings.

    Attributes:
      part: the ops, from `cfp.program.part.cut_part`.
      in_specs, out_specs: shardings of the part's inputs and outputs.
      feedback: (input position, output position) pairs: the input is donated, and the
        output is the next execution's input.
      options: (name, value) of XLA options.
      choice: JSON of a whole program's choice, for its record; "" for segments.
    """

    part: Part
    constraints: Constraints
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    feedback: tuple[tuple[int, int], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    choice: str = ""

    def __post_init__(self):
        assert len(self.in_specs) == len(self.part.inputs), self.label
        assert len(self.out_specs) == len(self.part.outputs), self.label
        for positions in zip(*self.feedback, strict=True):
            assert len(set(positions)) == len(positions), f"{self.label}: twice"
        for put, got in self.feedback:
            assert self.in_specs[put] == self.out_specs[got], f"{self.label}: feedback"

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of the donated inputs."""
        return tuple(place for place, _ in self.feedback)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEnvironment:
    """Folder of compilers' caches, which speed up later compiles.

    Threads that tune fusions on one GPU slow each other down; a cache of tuned fusions
    prevents that.

    Attributes:
      folder: folder of a profile store, for the caches; None for no caches.
    """

    folder: Path | None = None

    @classmethod
    def beside(cls, store_path: Path) -> BuildEnvironment:
        """Makes the environment with caches in a profile store's folder."""
        return cls(folder=store_path.parent)

    @property
    def executables_dir(self) -> Path | None:
        """Folder of compiled steps under plans; None for no caches."""
        return self.folder and self.folder / "executables"

    def options(self, platform: str) -> dict[str, str]:
        """Makes the tuning cache, returns its option; {} without a folder or GPUs."""
        if self.folder is None or platform not in GPU_PLATFORMS:
            return {}
        tuned = self.folder / "autotune"
        make_private_folder(tuned)  # XLA refuses one that is missing.
        return {"xla_gpu_per_fusion_autotune_cache_dir": str(tuned)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built(CompiledBytes):
    """A compiled program, with its memory and collectives.

    Attributes:
      compiled: function of flat arrays; None if only a record of it is known.
      shared: number of the build in other processes; None if no other builds it.
      collectives: collectives of one run.
      build_seconds: time of tracing, lowering and compiling.
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
        """Makes the record of a run or failure, with this memory and collectives."""
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

    Returns the record of the failure if it does not compile. Threads may call this at
    once: compiling releases Python's lock.
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
      make: builds the task in this process.
      fingerprint: fingerprint of the task's program, by which other processes find it.

    Returns:
      The compiled program, or the record of a failure in any process.
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
    """Lowers and compiles a job in this process alone; see `build`."""
    platform = mesh.devices.flat[0].platform
    usual = {**environment.options(platform), **program.rewritten.options}
    specs = job.in_specs, job.out_specs
    how = job.part, mesh, job.constraints, *specs, job.donated
    lower = partial(lower_part, program, *how)
    return build_lowered(job.key, lower, {**usual, **dict(job.options)})


def build_lowered(
    key: ProfileKey, lower: Callable[[], jax.stages.Lowered], options: Mapping[str, str]
) -> Built | ProfileRecord:
    """Lowers and compiles; returns a record of any error except AssertionError."""
    started = time.perf_counter()
    try:
        compiled, text = compile_right(lower(), options)
    except AssertionError:
        raise  # A bug of cfp, not a property of the part.
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
    """Returns a program's bytes in each device's memory; 0 for sizes unknown to XLA."""
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
        # XLA's CPU compiler counts host memory as device memory.
        for name, size in _bytes_in_host(compiled).items():
            sizes[name] -= size
    # Some backends return -1 for unknown sizes.
    return CompiledBytes(**{name: max(0, int(size)) for name, size in sizes.items()})


def _bytes_in_host(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes in host memory, per device, by field of `CompiledBytes`; {} if unknown."""
    arguments = tree_leaves(compiled.args_info)
    ins = tree_leaves(compiled.input_shardings)
    if len(ins) != len(arguments):  # Unused arguments were dropped.
        return {}
    results = tree_leaves(compiled.out_info), tree_leaves(compiled.output_shardings)
    given = [*map(_piece_host_bytes, arguments, ins)]
    donated = [n for n, one in zip(given, arguments, strict=True) if one.donated]
    return {
        "argument_bytes": sum(given),
        "alias_bytes": sum(donated),
        "output_bytes": sum(map(_piece_host_bytes, *results)),
    }


def _piece_host_bytes(info: Any, sharding: Sharding) -> int:
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
    """Returns an error's type and message as a record's reason, cut if long."""
    text = f"{type(error).__name__}: {error}".strip()
    if len(text) > _LONGEST_REASON:
        text = text[: _LONGEST_REASON - 3] + "..."
    return text


_MOST_THREADS = 24
# Host memory for one compile of a large program: a guess, as no host was short of it.
_BYTES_EACH = 2 * 2**30
# Memory limits of a container, by control groups of version 2 or 1; "max" is no limit.
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_X64_SETTING = "jax_enable_x64"

_T = TypeVar("_T")


def default_threads(platform: str) -> int:
    """Returns the number of compiles at once, by this process's cores and memory."""
    # In a container or a job, only the process's share of the host's cores.
    own = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if own else os.cpu_count() or 1
    if platform == "cpu" and cores <= 4:
        return 1  # The devices are these cores.
    share = cores // 4 if platform == "cpu" else cores * 3 // 8
    return max(1, min(_MOST_THREADS, share, _host_bytes() // _BYTES_EACH))


class CompilePool:
    """Threads that compile until the pool is closed.

    They have the x64 setting of the thread that made the pool, since `with
    jax.enable_x64(...)` affects one thread only. A compile cannot be stopped: closing
    cancels compiles that have not begun, and does not wait for the others.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="cfp-build")
        self._x64 = bool(getattr(jax.config, _X64_SETTING))
        self._is_closed = False

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        # Compiles that have not begun are cancelled.
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def start(self, label: str, work: Callable[[], _T]) -> Future[_T]:
        """Calls `work` in a thread; errors get a note with the label.

        The future is cancelled if the pool closes before the call begins.
        """

        def run() -> _T:
            if self._is_closed:
                raise CancelledError
            with jax.enable_x64(self._x64), unchecked():
                try:
                    return work()
                except Exception as error:
                    error.add_note(f"While {label} was compiled.")
                    raise

        return self._threads.submit(run)


def _host_bytes() -> int:
    """Returns the host's bytes of memory, or the container's limit if it is less."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [file.read_text().strip() for file in _CONTAINER_LIMITS if file.is_file()]
    return min([host, *(int(limit) for limit in limits if limit.isdecimal())])
