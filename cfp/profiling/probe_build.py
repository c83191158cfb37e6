"""Builds one probe (`cfp.profiling.probes`) for the devices of a mesh."""

from __future__ import annotations

import time
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from cfp.profiling.builder import Built, build_failure, compile_lowered
from cfp.profiling.inputs import generator
from cfp.profiling.key import GPU_PLATFORMS, ProfileKey
from cfp.profiling.probes import Probe
from cfp.profiling.record import ProfileRecord
from cfp.program.graft import partition_spec

# Vendors' libraries multiply large matrices as fast as any; to have the compiler try
# kernels of its own takes seconds.
_ON_GPUS = {"xla_gpu_enable_triton_gemm": "False"}


def build_probe(key: ProfileKey, probe: Probe, mesh: Mesh) -> Built | ProfileRecord:
    """Compiles a probe: a failure if the compiler made something else of it."""
    started = time.perf_counter()
    sharding = NamedSharding(mesh, partition_spec(probe.kind.spec))
    local = jax.shard_map(
        probe.function,
        mesh=mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        # Without this check what was reduced need not be equal everywhere: each
        # device's copy counts as a piece.
        check_vma=False,
    )

    def program(*inputs: jax.Array) -> tuple[jax.Array]:
        return (local(inputs[0]),)

    avals = [jax.ShapeDtypeStruct(k.shape, jnp.dtype(k.dtype)) for k in probe.inputs]
    try:
        lowered = jax.jit(
            program,
            in_shardings=(sharding,) * len(avals),
            out_shardings=(sharding,),
            donate_argnums=(len(avals) - 1,),
            keep_unused=True,
        ).lower(*avals)
        is_gpu = mesh.devices.flat[0].platform in GPU_PLATFORMS
        options = _ON_GPUS if is_gpu else {}
        built = compile_lowered(key, lowered, options, started=started)
        generator(probe.kind, mesh)
    except jax.errors.JaxRuntimeError as error:
        seconds = time.perf_counter() - started
        return build_failure(key, error, build_seconds=seconds)
    parts = dict(probe.parts)
    wanted = {parts["kind"]: probe.count} if parts["what"] == "collective" else {}
    found = Counter[str]()
    for collective in built.collectives:
        found[collective.kind] += collective.count
    if found != wanted:
        # Its time would be that of something else.
        reason = f"expected {wanted} in the program, the compiler made {dict(found)}"
        return built.record("compile_error", reason=reason)
    return built
