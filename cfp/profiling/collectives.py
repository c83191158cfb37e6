"""Measures the rates of a mesh's devices: collectives, products and memory traffic.

A few seconds of small programs (`cfp.profiling.probes`), one for each kind of
collective, group of axes and size, built and run here. Their records are stored like
all others: a second time nothing runs.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from datetime import datetime

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from cfp.errors import DeviceError, compose
from cfp.profiling.builder import Built, build_failure, compile_lowered
from cfp.profiling.compile_pool import default_threads, overlaps
from cfp.profiling.in_flight import Limits
from cfp.profiling.inputs import generator
from cfp.profiling.key import GPU_PLATFORMS, Parts, ProfileKey, environment_parts
from cfp.profiling.probes import LARGE, SMALL, Probe, probes
from cfp.profiling.processes import Agreement
from cfp.profiling.rates import Rates, rising
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import TimingOptions, execute
from cfp.profiling.scheduler import run_tasks
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import ProgressCallback, Task
from cfp.program.graft import partition_spec
from cfp.program.trace import planning_mesh

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


__all__ = ["Rates", "known_rates", "measure_rates", "rate_keys"]


_TIMING = TimingOptions(
    warmup_seconds=0.02,
    min_samples=3,
    max_samples=9,
    target_spread=0.03,
    budget_seconds=0.2,
    # Where launches run ahead, a sample holds one launch and one wait, which then
    # weigh little.
    min_sample_ms=10.0,
    min_repeat=1,
)
# Virtual devices are there to try things out: what they take is soon said.
_CPU_TIMING = replace(
    _TIMING, warmup_seconds=0.01, budget_seconds=0.06, min_sample_ms=2.0
)


def measure_rates(
    mesh: Mesh,
    store: ProfileStore,
    *,
    retry_failures: bool | datetime = False,
    progress: ProgressCallback | None = None,
    limits: Limits | None = None,
) -> Rates:
    """Times collectives on each axis of a mesh, and on all together, and compute.

    Takes a few seconds, and none if the store knows the devices already.

    Args:
      mesh: the devices.
      store: answers what it can, and keeps every new record.
      retry_failures: measure again what failed before, or before a moment.
      progress: called with every event.
      limits: what counts as hung.

    Raises:
      DeviceError: if the devices do not even run these small programs.
    """
    mesh, by_key = _probes_by_key(mesh)
    platform = mesh.devices.flat[0].platform
    summary = run_tasks(
        [Task(key=key, label=probe.label) for key, probe in by_key.items()],
        store,
        build=lambda task: build_probe(task.key, by_key[task.key], mesh),
        run=lambda task, built: _run(by_key[task.key], mesh, built),
        threads=default_threads(platform),
        overlap=overlaps(platform),
        retry_failures=retry_failures,
        progress=progress,
        agreement=Agreement.of(mesh),
        limits=limits,
    )
    return _rates(
        mesh, [(probe, summary.records[key.digest]) for key, probe in by_key.items()]
    )


def rate_keys(mesh: Mesh) -> dict[str, ProfileKey]:
    """Returns the keys of the records of `measure_rates`, by label. Runs nothing."""
    return {probe.label: key for key, probe in _probes_by_key(mesh)[1].items()}


def known_rates(mesh: Mesh, store: ProfileStore) -> Rates | None:
    """The rates of devices that were timed before; None if not all of it is known."""
    mesh, by_key = _probes_by_key(mesh)
    found = store.common([key.digest for key in by_key])
    if any(key.digest not in found for key in by_key):
        return None
    return _rates(mesh, [(probe, found[key.digest]) for key, probe in by_key.items()])


def _probes_by_key(mesh: Mesh) -> tuple[Mesh, dict[ProfileKey, Probe]]:
    """The probes, and the mesh that they run on."""
    mesh = planning_mesh(mesh)
    platform = mesh.devices.flat[0].platform
    sizes = LARGE if platform in (*GPU_PLATFORMS, "tpu") else SMALL
    where = (
        ("mesh", ",".join(f"{name}={size}" for name, size in mesh.shape.items())),
        *_processes(mesh),
        *environment_parts(list(mesh.devices.flat)),
    )
    return mesh, {
        ProfileKey((*probe.parts, *where)): probe for probe in probes(mesh, sizes)
    }


def _processes(mesh: Mesh) -> Parts:
    """Returns the process of each device: a link between two processes is slower."""
    owners = [str(device.process_index) for device in mesh.devices.flat]
    if len(set(owners)) == 1:
        return ()
    return (("process_of_device", ",".join(owners)),)


def _run(probe: Probe, mesh: Mesh, built: Built) -> ProfileRecord:
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    timing = _CPU_TIMING if is_cpu else _TIMING
    return execute(built, probe.inputs, mesh, feedback=probe.feedback, timing=timing)


# ------------------------------------------------------------------------ the outcome


def _rates(mesh: Mesh, measured: list[tuple[Probe, ProfileRecord]]) -> Rates:
    """Rates from what was measured, with defaults where a single thing failed."""
    if not any(record.ok for _, record in measured):
        first = measured[0][1]
        raise DeviceError(
            compose(
                "The devices ran none of the small programs that time them.",
                expected="devices that can be used, with free memory",
                got=f"{first.status}: {first.reason}",
                attempt="stop other programs that use them; then "
                "measure_rates(..., retry_failures=True)",
            )
        )
    fallback = Rates.default(mesh)
    points: dict[tuple[str, tuple[str, ...]], list[tuple[int, float]]] = {}
    flops = dict(fallback.matmul_flops_per_ms)
    memory = fallback.memory_bytes_per_ms
    write_ms = _write_ms(measured)
    for probe, record in measured:
        if not record.ok:
            continue
        parts = dict(probe.parts)
        time_ms = max(record.time_ms, 1e-6) / probe.count
        if probe.writes:
            # Noise must not make a collective free.
            time_ms = max(time_ms - write_ms, time_ms / 2)
        if parts["what"] == "collective":
            curve = (parts["kind"], tuple(parts["axes"].split(",")))
            points.setdefault(curve, []).append((round(probe.work), time_ms))
        elif parts["what"] == "matmul":
            flops[parts["dtype"]] = probe.work / time_ms
        elif parts["what"] == "memory":
            memory = probe.work / time_ms
    curves = {**fallback.curves, **{k: rising(v) for k, v in points.items()}}
    return Rates(
        mesh=fallback.mesh,
        curves=curves,
        matmul_flops_per_ms=flops,
        memory_bytes_per_ms=memory,
    )


def _write_ms(measured: list[tuple[Probe, ProfileRecord]]) -> float:
    """Derives the time to write one number into an array."""
    for probe, record in measured:
        if dict(probe.parts)["what"] == "write" and record.ok:
            return record.time_ms / probe.count
    return 0.0
