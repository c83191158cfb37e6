"""Measures what it takes to turn one sharding of a tensor into another.

One program for each tensor, sharding before and sharding after: it says nothing of the
model that hands the tensor on, and so answers for all models on such devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from cfp.profiling.builder import Built, build_failure, compile_lowered
from cfp.profiling.inputs import InputKind, generator
from cfp.profiling.key import Parts, ProfileKey
from cfp.profiling.marks import Limits
from cfp.profiling.pipeline import run_tasks
from cfp.profiling.processes import Agreement
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import TimingOptions, execute
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import ProgressCallback, Task
from cfp.profiling.threads import default_threads, overlaps
from cfp.program.graft import Spec, partition_spec
from cfp.program.trace import planning_mesh

_TIMING = TimingOptions(
    warmup_seconds=0.05,
    min_samples=3,
    max_samples=9,
    target_spread=0.02,
    budget_seconds=0.3,
    min_sample_ms=10.0,
)


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor that comes in one sharding and is wanted in another.

    Attributes:
      shape: of the whole tensor.
      dtype: its name, as numpy and JAX write it.
      have, want: its shardings before and after; both must divide it evenly.
    """

    shape: tuple[int, ...]
    dtype: str
    have: Spec
    want: Spec

    def key(self, mesh: Mesh, environment: Parts) -> ProfileKey:
        """What its record is kept under."""
        return ProfileKey(
            (
                ("what", "reshard"),
                ("dtype", self.dtype),
                ("shape", ",".join(map(str, self.shape))),
                ("have", str(partition_spec(self.have))),
                ("want", str(partition_spec(self.want))),
                ("mesh", ",".join(f"{name}={n}" for name, n in mesh.shape.items())),
                *environment,
            )
        )

    @property
    def label(self) -> str:
        """What a list of things to measure calls it."""
        shape = ",".join(map(str, self.shape))
        have, want = (partition_spec(spec) for spec in (self.have, self.want))
        return f"resharding {self.dtype}[{shape}] from {have} to {want}"

    @property
    def inputs(self) -> tuple[InputKind, InputKind]:
        """The tensor, and room for the result."""
        return (
            InputKind(self.shape, self.dtype, self.have, True),
            InputKind(self.shape, self.dtype, self.want, True),
        )


def known_moves(
    moves: Iterable[Move], mesh: Mesh, store: ProfileStore, environment: Parts
) -> dict[Move, float]:
    """Milliseconds of those moves that were measured before."""
    keys = {move: move.key(mesh, environment).digest for move in moves}
    return _times(keys, store.common(keys.values()))


def measure_moves(
    moves: Iterable[Move],
    mesh: Mesh,
    store: ProfileStore,
    environment: Parts,
    *,
    retry_failures: bool | datetime = False,
    progress: ProgressCallback | None = None,
    limits: Limits | None = None,
) -> dict[Move, float]:
    """Milliseconds of moves; those that cannot be measured are left out.

    Args:
      moves: what to measure.
      mesh: the devices.
      store: answers what it can, and keeps every new record.
      environment: what a measurement depends on besides.
      retry_failures: measure again what failed before, or before a moment.
      progress: told of every event.
      limits: what counts as hung.
    """
    mesh = planning_mesh(mesh)
    platform = mesh.devices.flat[0].platform
    keys = {move: move.key(mesh, environment) for move in moves}
    summary = run_tasks(
        [
            Task(
                key=key,
                label=move.label,
                build=partial(_build, key, move, mesh),
                run=partial(_run, move, mesh),
            )
            for move, key in keys.items()
        ],
        store,
        threads=default_threads(platform),
        overlap=overlaps(platform),
        retry_failures=retry_failures,
        progress=progress,
        agreement=Agreement.of(mesh),
        limits=limits,
    )
    digests = {move: key.digest for move, key in keys.items()}
    return _times(digests, summary.records)


def _times(
    keys: Mapping[Move, str], records: Mapping[str, ProfileRecord]
) -> dict[Move, float]:
    found = {move: records.get(key) for move, key in keys.items()}
    return {move: r.time_ms for move, r in found.items() if r is not None and r.ok}


def _build(key: ProfileKey, move: Move, mesh: Mesh) -> Built | ProfileRecord:
    started = time.perf_counter()
    have, want = (
        NamedSharding(mesh, partition_spec(spec)) for spec in (move.have, move.want)
    )

    def program(x: jax.Array, room: jax.Array) -> tuple[jax.Array]:
        return (lax.with_sharding_constraint(x, want),)

    aval = jax.ShapeDtypeStruct(move.shape, jnp.dtype(move.dtype))
    try:
        lowered = jax.jit(
            program,
            in_shardings=(have, want),
            out_shardings=(want,),
            donate_argnums=(1,),
            keep_unused=True,
        ).lower(aval, aval)
        built = compile_lowered(key, lowered, {}, started=started)
        for kind in move.inputs:
            generator(kind, mesh)
        return built
    except jax.errors.JaxRuntimeError as error:
        seconds = time.perf_counter() - started
        return build_failure(key, error, build_seconds=seconds)


def _run(move: Move, mesh: Mesh, built: Built) -> ProfileRecord:
    # The result is written over the second input: nothing is allocated meanwhile.
    return execute(built, move.inputs, mesh, feedback=((1, 0),), timing=_TIMING)
