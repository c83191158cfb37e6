"""Measures what devices take to move data to each other, and to compute.

A few seconds of small programs, one for each kind of collective, group of axes and
size. The records stand in the store like all others: a second time nothing runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from cfp.errors import DeviceError, compose
from cfp.profiling.builder import Built, build_failure, compile_lowered
from cfp.profiling.inputs import InputKind, generator
from cfp.profiling.key import GPU_PLATFORMS, Parts, ProfileKey, environment_parts
from cfp.profiling.marks import Limits
from cfp.profiling.pipeline import (
    ProgressCallback,
    Task,
    default_threads,
    overlaps,
    run_tasks,
)
from cfp.profiling.processes import Agreement
from cfp.profiling.rates import KINDS, Rates, axis_groups, rising
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import TimingOptions, execute
from cfp.profiling.store import ProfileStore
from cfp.program.graft import partition_spec

__all__ = ["Rates", "measure_rates", "rate_keys"]

_TIMING = TimingOptions(
    warmup_seconds=0.02,
    min_samples=3,
    max_samples=9,
    target_spread=0.03,
    budget_seconds=0.2,
    min_sample_ms=2.0,
    min_repeat=1,
)
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What to measure: enough to be past what caches and launches hide."""

    collective_bytes: tuple[int, ...]
    matmul_width: Mapping[str, int]
    memory_bytes: int


_SMALL = _Sizes(
    collective_bytes=(1 << 14, 1 << 17, 1 << 20, 1 << 24),
    # Few CPUs multiply bfloat16 as fast as float32, and some are very slow.
    matmul_width={"float32": 512, "bfloat16": 256},
    memory_bytes=1 << 24,
)
_LARGE = _Sizes(
    collective_bytes=(1 << 16, 1 << 19, 1 << 22, 1 << 25, 1 << 28),
    matmul_width={"float32": 4096, "bfloat16": 8192},
    memory_bytes=1 << 28,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """A small program that does one thing.

    Attributes:
      parts: what it is, as the beginning of a key.
      takes: its input.
      makes: its result.
      function: what each device does to its piece of the input.
      work: bytes or operations, to be divided by the time.
    """

    parts: Parts
    takes: InputKind
    makes: InputKind
    function: Callable[[jax.Array], jax.Array]
    work: float

    @property
    def label(self) -> str:
        return " ".join(value for _, value in self.parts)


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
      progress: told of every event.
      limits: what counts as hung.

    Raises:
      DeviceError: if the devices do not even run these small programs.
    """
    mesh, probes = _probes_by_key(mesh)
    platform = mesh.devices.flat[0].platform
    summary = run_tasks(
        [
            Task(
                key=key,
                label=probe.label,
                build=partial(_build, key, probe, mesh),
                run=partial(_run, probe, mesh),
            )
            for key, probe in probes.items()
        ],
        store,
        threads=default_threads(platform),
        overlap=overlaps(platform),
        retry_failures=retry_failures,
        progress=progress,
        agreement=Agreement.of(mesh),
        limits=limits,
    )
    return _rates(
        mesh, [(probe, summary.records[key.digest]) for key, probe in probes.items()]
    )


def rate_keys(mesh: Mesh) -> dict[str, ProfileKey]:
    """What `measure_rates` keeps its records under, by label. Runs nothing."""
    return {probe.label: key for key, probe in _probes_by_key(mesh)[1].items()}


def _probes_by_key(mesh: Mesh) -> tuple[Mesh, dict[ProfileKey, _Probe]]:
    """The probes, and the mesh that they run on."""
    mesh = Mesh(
        mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim
    )
    platform = mesh.devices.flat[0].platform
    sizes = _LARGE if platform in (*GPU_PLATFORMS, "tpu") else _SMALL
    where = (
        ("mesh", ",".join(f"{name}={size}" for name, size in mesh.shape.items())),
        *_processes(mesh),
        *environment_parts(list(mesh.devices.flat)),
    )
    return mesh, {
        ProfileKey((*probe.parts, *where)): probe for probe in _probes(mesh, sizes)
    }


def _processes(mesh: Mesh) -> Parts:
    """Which process each device belongs to: what lies between two is slower."""
    owners = [str(device.process_index) for device in mesh.devices.flat]
    if len(set(owners)) == 1:
        return ()
    return (("process_of_device", ",".join(owners)),)


# ---------------------------------------------------------------------------- probes


def _probes(mesh: Mesh, sizes: _Sizes) -> list[_Probe]:
    every = tuple(mesh.axis_names)
    found = [
        _collective(kind, group, size, mesh)
        for kind in KINDS
        for group in axis_groups(mesh.shape.items())
        for size in sizes.collective_bytes
    ]
    found += [
        _matmul(dtype, sizes.matmul_width[dtype], every, mesh.size) for dtype in _DTYPES
    ]
    return [*found, _memory(sizes.memory_bytes, every, mesh.size)]


def _collective(kind: str, axes: tuple[str, ...], size: int, mesh: Mesh) -> _Probe:
    ways = prod(mesh.shape[name] for name in axes)
    # A device's piece is cut again, into one for each of the others.
    columns = max(1, round(size / (4 * ways * ways)))
    piece = InputKind((ways * ways, columns), "float32", (axes, ()))
    # Every device holds a whole tensor of its own.
    whole = InputKind((ways * ways * ways, columns), "float32", (axes, ()))
    takes, makes, function = {
        "all-reduce": (whole, whole, partial(lax.psum, axis_name=axes)),
        "all-gather": (
            piece,
            whole,
            partial(lax.all_gather, axis_name=axes, tiled=True),
        ),
        "reduce-scatter": (
            whole,
            piece,
            partial(lax.psum_scatter, axis_name=axes, tiled=True),
        ),
        "all-to-all": (
            piece,
            piece,
            partial(
                lax.all_to_all,
                axis_name=axes,
                split_axis=0,
                concat_axis=0,
                tiled=True,
            ),
        ),
    }[kind]
    return _Probe(
        parts=(
            ("what", "collective"),
            ("kind", kind),
            ("axes", ",".join(axes)),
            ("bytes", str(size)),
        ),
        takes=takes,
        makes=makes,
        function=function,
        work=4.0 * ways * ways * columns,
    )


def _matmul(dtype: str, width: int, axes: tuple[str, ...], devices: int) -> _Probe:
    def multiply(x: jax.Array) -> jax.Array:
        return lax.dot(x, x)

    kind = InputKind((width * devices, width), dtype, (axes, ()))
    return _Probe(
        parts=(("what", "matmul"), ("dtype", dtype), ("width", str(width))),
        takes=kind,
        makes=kind,
        function=multiply,
        work=2.0 * width**3,
    )


def _memory(size: int, axes: tuple[str, ...], devices: int) -> _Probe:
    def scale(x: jax.Array) -> jax.Array:
        return x * jnp.float32(0.5) + jnp.float32(0.01)

    kind = InputKind((size // 4 * devices,), "float32", (axes,))
    return _Probe(
        parts=(("what", "memory"), ("bytes", str(size))),
        takes=kind,
        makes=kind,
        function=scale,
        work=2.0 * size,  # Read and written.
    )


# The result is written over the second input, which is returned to the next run:
# nothing is allocated while the clock runs. Fresh memory costs a CPU more than a
# collective does.
_FEEDBACK = ((1, 0),)


def _build(key: ProfileKey, probe: _Probe, mesh: Mesh) -> Built | ProfileRecord:
    started = time.perf_counter()
    takes, makes = (
        NamedSharding(mesh, partition_spec(kind.spec))
        for kind in (probe.takes, probe.makes)
    )
    local = jax.shard_map(
        probe.function,
        mesh=mesh,
        in_specs=takes.spec,
        out_specs=makes.spec,
        # Nobody is told that what was reduced is equal everywhere: each device's
        # copy counts as a piece.
        check_vma=False,
    )

    def program(x: jax.Array, room: jax.Array) -> tuple[jax.Array]:
        return (local(x),)

    try:
        lowered = jax.jit(
            program,
            in_shardings=(takes, makes),
            out_shardings=(makes,),
            donate_argnums=(1,),
            keep_unused=True,
        ).lower(*_avals(probe))
        built = compile_lowered(key, lowered, {}, started=started)
        for kind in (probe.takes, probe.makes):
            generator(kind, mesh)
        return built
    except jax.errors.JaxRuntimeError as error:
        seconds = time.perf_counter() - started
        return build_failure(key, error, build_seconds=seconds)


def _avals(probe: _Probe) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(kind.shape, jnp.dtype(kind.dtype))
        for kind in (probe.takes, probe.makes)
    ]


def _run(probe: _Probe, mesh: Mesh, built: Built) -> ProfileRecord:
    kinds = (probe.takes, probe.makes)
    return execute(built, kinds, mesh, feedback=_FEEDBACK, timing=_TIMING)


# ------------------------------------------------------------------------ the outcome


def _rates(mesh: Mesh, measured: list[tuple[_Probe, ProfileRecord]]) -> Rates:
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
    for probe, record in measured:
        if not record.ok:
            continue
        parts = dict(probe.parts)
        time_ms = max(record.time_ms, 1e-6)
        if parts["what"] == "collective":
            curve = (parts["kind"], tuple(parts["axes"].split(",")))
            points.setdefault(curve, []).append((round(probe.work), time_ms))
        elif parts["what"] == "matmul":
            flops[parts["dtype"]] = probe.work / time_ms
        else:
            memory = probe.work / time_ms
    curves = {**fallback.curves, **{k: rising(v) for k, v in points.items()}}
    return Rates(
        mesh=fallback.mesh,
        curves=curves,
        matmul_flops_per_ms=flops,
        memory_bytes_per_ms=memory,
    )
