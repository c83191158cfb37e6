"""Rates of a mesh's devices: collectives, matrix products and memory traffic.

`Rates` has them as curves and numbers to look up. The size of a collective is that of a
whole group's tensor, not of one device's shard (`Rates.collective_ms`).

`measure_rates` runs small programs for a few seconds: one for each of `KINDS`, group of
axes and size, and a few others. Records are stored: a second call runs nothing. A
collective alone takes less time than the launch of its program. So a program has a
chain: a loop in which each collective needs the result of the one before, so that XLA
cannot merge, hoist or overlap them. The chain's time divided by its length is the time
of one collective inside a large program.

Results of all-reduce and all-to-all have the input's shape, and chain directly. An
all-gather or a reduce-scatter changes the shape: one number of its result is written
into its input, in place, which takes the same time at every size. A chain of such
writes alone measures that time, to subtract it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import exp, log, prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from cfp.errors import CfpError
from cfp.printable import mesh_text
from cfp.profiling.builder import Built, build_everywhere, build_lowered
from cfp.profiling.coordination import is_shared
from cfp.profiling.inputs import InputKind, generator
from cfp.profiling.jobs import run_jobs
from cfp.profiling.record import (
    GPU_PLATFORMS,
    Parts,
    ProfileKey,
    ProfileRecord,
    environment_parts,
)
from cfp.profiling.runner import ON_CPUS, Place, TimingOptions, execute
from cfp.profiling.store import ProfileStore
from cfp.profiling.tasks import MeasureOptions, Task
from cfp.program.constrain import partition_spec
from cfp.program.trace import PRECISIONS, planning_mesh

Curve = tuple[tuple[int, float], ...]  # (bytes, milliseconds), bytes rising
Axes = Mesh | Iterable[tuple[str, int]]  # a mesh, or its axes' names and sizes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")

# For each of these XLA has a pass that combines several into one.
COMBINED_KINDS = ("all-reduce", "all-gather", "reduce-scatter")

# Collectives without curves take the time of a similar kind: for example, each device
# sends one piece once in a collective-permute.
_PRICED_AS = {
    "collective-permute": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "all-gather",
}

_DEFAULT_SIZES = (1 << 14, 1 << 20, 1 << 28)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of computing on a mesh, and of collectives over its axes.

    Attributes:
      mesh: (axis name, size) of all axes.
      curves: ``{(kind of collective, axes in the mesh's order): (bytes, ms) points}``.
      matmul_flops_per_ms: rate of one device while all compute, for "float32" (in JAX's
        default precision on the devices) and "bfloat16".
      memory_bytes_per_ms: bytes read plus written by one device while all are busy.
      combined_bytes: largest size of a collective that the compiler combines from
        independent ones; 0 to count without combining.
      launch_ms: least time of one kernel, which no method here adds.
    """

    mesh: tuple[tuple[str, int], ...]
    curves: Mapping[tuple[str, tuple[str, ...]], Curve]
    matmul_flops_per_ms: Mapping[str, float]
    memory_bytes_per_ms: float
    combined_bytes: int = 0
    launch_ms: float = 0.0

    @classmethod
    def default(
        cls,
        mesh: Axes,
        latency_ms: float = 0.02,
        link_bytes_per_ms: float = 150e6,
        flops_per_ms: tuple[float, float] = (100e9, 400e9),
        memory_bytes_per_ms: float = 2e9,
    ) -> Rates:
        """Returns plausible rates without any device: one host of GPUs, fast links.

        All links are equal, and collectives use rings. `flops_per_ms` has the rates of
        float32 and bfloat16.
        """
        axes = tuple(mesh.shape.items() if isinstance(mesh, Mesh) else mesh)
        sizes = dict(axes)
        curves = {}
        for kind in KINDS:
            for group in axis_groups(axes):
                ways = prod(sizes[name] for name in group)
                share = sent_share(kind, ways) / link_bytes_per_ms
                curves[kind, group] = tuple(
                    (size, latency_ms + size * share) for size in _DEFAULT_SIZES
                )
        return cls(
            mesh=axes,
            curves=curves,
            matmul_flops_per_ms=dict(zip(_DTYPES, flops_per_ms, strict=True)),
            memory_bytes_per_ms=memory_bytes_per_ms,
        )

    @classmethod
    def of_virtual_devices(cls, mesh: Axes) -> Rates:
        """Returns typical rates of one CPU's virtual devices, without measuring."""
        # Measured with four of them on two cores, November 2026.
        return cls.default(mesh, 0.05, 3e6, (45e6, 30e6), 9e6)

    def collective_ms(self, kind: str, axes: tuple[str, ...], size: float) -> float:
        """Returns the time of one collective, ms, run by all groups at once.

        `size` is the bytes of one group's whole tensor:

        - all-reduce: the operand of one device, a partial sum;
        - all-gather: the result of one device;
        - reduce-scatter: the operand of one device;
        - all-to-all, collective-permute: the operands of all devices together.

        Between measured sizes, the logarithm of the time is interpolated over the
        logarithm of the size. Below the smallest, the time is constant (latency); above
        the largest, it grows in proportion. If a group was not measured as a whole (two
        axes of three), times of single axes are added, of all-gathers and
        reduce-scatters at shrinking sizes. A group of one takes no time.

        Args:
          kind: HLO's name: "all-reduce", "all-gather", ...
          axes: names of the mesh's axes, in any order.

        Raises:
          KeyError: the mesh has no such axis, or the kind is unknown.
        """
        sizes = dict(self.mesh)
        names = {name for name in axes if sizes[name] > 1}
        group = tuple(name for name, _ in self.mesh if name in names)
        kind = _PRICED_AS.get(kind, kind)
        if not group or size <= 0:
            return 0.0
        if (kind, group) in self.curves:
            return interpolate(self.curves[kind, group], size)
        if len(group) == 1:
            raise KeyError(f"no curve of times for {kind!r} over {group}")
        # The first steps of a gather, like the last ones of a scatter, move less.
        total, held = 0.0, size
        for name in reversed(group):
            total += self.collective_ms(kind, (name,), held)
            if kind in ("all-gather", "reduce-scatter"):
                held /= sizes[name]
        return total

    def combined_ms(
        self, kind: str, axes: tuple[str, ...], size: float, count: int
    ) -> float:
        """Computes the time, ms, of each of `count` equal, independent collectives.

        Of `COMBINED_KINDS`, as many as fit in `combined_bytes` share one latency.
        Other arguments are those of `collective_ms`.
        """
        whole = self.collective_ms(kind, axes, size)
        if kind not in COMBINED_KINDS or not 0 < size < self.combined_bytes:
            return whole
        share = max(size / self.combined_bytes, 1.0 / count)
        return whole - (1.0 - share) * self.collective_ms(kind, axes, 1.0)

    def matmul_ms(self, flops: float, dtype: str) -> float:
        """Computes the time of one device's matrix products, ms.

        Args:
          flops: operations of one device; a multiply-add counts as two.
          dtype: operands' type, by MLIR's name ("bf16") or, from 16 bits on, numpy's.
        """
        short = dtype in ("bfloat16", "bf16", "float16", "f16")
        short = short or dtype.startswith(("float8", "f8", "int8", "i8", "ui8"))
        rate = self.matmul_flops_per_ms["bfloat16" if short else "float32"]
        every = PRECISIONS.values()
        faster = (one.speedup for one in every if dtype.startswith(one.element))
        return flops / (rate * next(faster, 1.0))

    def memory_ms(self, size: float) -> float:
        """Computes the time, ms, of reads plus writes of `size` bytes in all."""
        return size / self.memory_bytes_per_ms


def axis_groups(axes: Iterable[tuple[str, int]]) -> tuple[tuple[str, ...], ...]:
    """Lists groups to measure: each axis larger than 1, then all these if several."""
    names = tuple(name for name, size in axes if size > 1)
    single = tuple((name,) for name in names)
    return (*single, names) if len(names) > 1 else single


def rising(points: Iterable[tuple[int, float]]) -> Curve:
    """Sorts (bytes, ms) points by bytes; lowers a time to the least of larger sizes."""
    # More bytes never take less time. The slower point had noise, which only adds time.
    ordered = sorted(points, reverse=True)
    times = accumulate((ms for _, ms in ordered), min)
    pairs = zip(ordered, times, strict=True)
    return tuple((size, ms) for (size, _), ms in pairs)[::-1]


def interpolate(curve: Curve, size: float) -> float:
    """Returns a curve's time at a size; see `Rates.collective_ms`."""
    smallest, largest = curve[0], curve[-1]
    if size <= smallest[0]:
        return smallest[1]
    if size >= largest[0]:
        return largest[1] * size / largest[0]
    place = bisect_left(curve, size, key=lambda point: point[0])
    (left, before), (right, after) = curve[place - 1], curve[place]
    part = log(size / left) / log(right / left)
    return before * exp(part * log(after / before))


def sent_share(kind: str, ways: int) -> float:
    """Returns the share of a group's tensor that one device sends, in a ring."""
    passes = {"all-reduce": 2.0, "all-to-all": 1.0 / ways}.get(kind, 1.0)
    return passes * (ways - 1) / ways


Step = Callable[[jax.Array], jax.Array]

_DTYPES = ("float32", "bfloat16")
_PRODUCTS = 5
_WRITES = 256
# With two in one turn of the loop, ops that cannot work in place need no copy.
_TWO_TURNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSizes:
    """Sizes of probes: programs long enough to hide caches and launches.

    Attributes:
      collective_bytes: sizes of groups' tensors; see `Rates.collective_ms`.
      chain_bytes: approximate sum of sizes in a chain, if the limits of length allow.
      longest_chain: largest number of collectives in a chain, even.
    """

    collective_bytes: tuple[int, ...]
    chain_bytes: int
    longest_chain: int
    matmul_width: Mapping[str, int]
    memory_bytes: int
    memory_passes: int

    def chain(self, size: int) -> int:
        """Returns the number of collectives in a chain: even, 2 to `longest_chain`."""
        even = self.chain_bytes // size // 2 * 2
        return max(2, min(self.longest_chain, even))


SMALL = ProbeSizes(
    collective_bytes=(1 << 14, 1 << 18, 1 << 22),
    chain_bytes=1 << 21,
    longest_chain=16,
    # Few CPUs multiply bfloat16 as fast as float32, and some are very slow.
    matmul_width={"float32": 512, "bfloat16": 256},
    memory_bytes=1 << 24,
    memory_passes=2,
)
# On 4 H200 with NVLink the chains take 1 to 10 ms. More sizes change interpolated times
# by 7 %, of one kind by 12 %: decisions.md, "Collectives are timed in chains".
LARGE = ProbeSizes(
    collective_bytes=(1 << 16, 1 << 22, 1 << 25, 1 << 28),
    chain_bytes=1 << 28,
    longest_chain=64,
    matmul_width={"float32": 4096, "bfloat16": 8192},
    memory_bytes=1 << 28,
    memory_passes=16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateProbe:
    """A small program that repeats one operation, such as a collective.

    Attributes:
      parts: (name, value) pairs of the operation, from which its record's key is made.
      kind: type of each input, and of the result.
      function: the whole program, on each device's shard of the first input.
      count: number of repetitions.
      work: of one operation, bytes of a group's tensor, or one device's bytes or FLOPs.
      reads: True if the input is read until the end, so the result needs other memory.
    """

    parts: Parts
    kind: InputKind
    function: Step
    count: int
    work: float
    reads: bool = False

    @property
    def label(self) -> str:
        return " ".join(value for _, value in self.parts)

    @property
    def inputs(self) -> tuple[InputKind, ...]:
        """Types of all inputs; the last one is donated to the result."""
        return (self.kind, self.kind) if self.reads else (self.kind,)

    @property
    def feedback(self) -> tuple[tuple[int, int], ...]:
        """(input, output) positions: the result is the last input of the next run.

        So no timed run allocates a result, which takes a CPU longer than a collective.
        """
        return ((len(self.inputs) - 1, 0),)


def probes(mesh: Mesh, sizes: ProbeSizes) -> Iterator[RateProbe]:
    """Yields all probes of a mesh: collectives, writes, products and memory."""
    for kind in KINDS:
        for group in axis_groups(mesh.shape.items()):
            for size in sizes.collective_bytes:
                yield _collective(kind, group, size, sizes.chain(size), mesh)
    yield _writes(mesh)
    for dtype in _DTYPES:
        yield _matmul(dtype, sizes.matmul_width[dtype], mesh)
    yield _memory(sizes, mesh)


def _collective(
    kind: str, axes: tuple[str, ...], size: int, count: int, mesh: Mesh
) -> RateProbe:
    ways = prod(mesh.shape[name] for name in axes)
    # Each device's shard must divide into one piece for each device of the group.
    elements = max(1, round(size / (4 * ways * ways))) * ways * ways
    function: Step
    if kind == "all-reduce":
        # One in a turn: XLA may compile a sum of equal numbers to a product.
        function = partial(_repeat, partial(lax.psum, axis_name=axes), count, 1)
    elif kind == "all-to-all":
        swap = partial(
            lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
        )
        function = partial(_repeat, swap, count, _TWO_TURNS)
    else:
        move = lax.all_gather if kind == "all-gather" else lax.psum_scatter
        received = partial(move, axis_name=axes, tiled=True)
        function = partial(_repeat, partial(_with_write, received), count, 1)
    # Operands of reductions are whole tensors on each device.
    local = elements // ways if kind in ("all-gather", "all-to-all") else elements
    return RateProbe(
        parts=(
            ("what", "collective"),
            ("kind", kind),
            ("axes", ",".join(axes)),
            ("bytes", str(size)),
            ("chain", str(count)),
        ),
        # Sharded over all axes for any group, so that groups of one size share inputs.
        kind=_floats(local, mesh),
        function=function,
        count=count,
        work=4.0 * elements,
    )


def _writes(mesh: Mesh) -> RateProbe:
    def change(x: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(x, x[-1:] - x[:1], (0,))

    return RateProbe(
        parts=(("what", "write"), ("chain", str(_WRITES))),
        kind=_floats(2, mesh),
        function=partial(_repeat, change, _WRITES, 1),
        count=_WRITES,
        work=1.0,
    )


def _matmul(dtype: str, width: int, mesh: Mesh) -> RateProbe:
    def multiply(x: jax.Array) -> jax.Array:
        # The first product is outside of the loop, which then needs no copy.
        by_x = partial(lax.dot, rhs=x)
        return _repeat(lambda y: by_x(y), _PRODUCTS - 1, _TWO_TURNS, by_x(x))

    return RateProbe(
        parts=(
            ("what", "matmul"),
            ("dtype", dtype),
            ("width", str(width)),
            ("chain", str(_PRODUCTS)),
        ),
        kind=InputKind((width * mesh.size, width), dtype, (mesh.axis_names, ()), True),
        function=multiply,
        count=_PRODUCTS,
        work=2.0 * width**3,
        reads=True,
    )


def _memory(sizes: ProbeSizes, mesh: Mesh) -> RateProbe:
    def change(x: jax.Array) -> jax.Array:
        return jnp.float32(0.01) - x

    size, count = sizes.memory_bytes, sizes.memory_passes
    return RateProbe(
        parts=(("what", "memory"), ("bytes", str(size)), ("chain", str(count))),
        kind=_floats(size // 4, mesh),
        function=partial(_repeat, change, count, 1),
        count=count,
        work=2.0 * size,  # Read and written.
    )


def _floats(local: int, mesh: Mesh) -> InputKind:
    return InputKind((local * mesh.size,), "float32", (mesh.axis_names,), True)


def _repeat(step: Step, count: int, turns: int, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, count, lambda _, value: step(value), x, unroll=turns)


def _with_write(collective: Step, x: jax.Array) -> jax.Array:
    # The last device's number: the first one's needs no collective on that device.
    return lax.dynamic_update_slice(x, collective(x)[-1:], (0,))


# -------------------------------------------------------- measuring rates by the probes

# Vendors' libraries are fast enough; tuning Triton's kernels would take seconds.
_ON_GPUS = {"xla_gpu_enable_triton_gemm": "False"}


def build_probe(key: ProfileKey, probe: RateProbe, mesh: Mesh) -> Built | ProfileRecord:
    """Compiles a probe, in all processes that have devices of the mesh."""
    task = Task(key=key, label=probe.label)
    return build_everywhere(mesh, task, partial(build_probe_here, key, probe, mesh))


def probe_of(mesh: Mesh, label: str) -> RateProbe:
    """Returns the mesh's probe with this label, which must exist."""
    return next(one for one in probes(mesh, _sizes(mesh)) if one.label == label)


def build_probe_here(
    key: ProfileKey, probe: RateProbe, mesh: Mesh
) -> Built | ProfileRecord:
    """Compiles a probe in this process alone.

    Returns the record of a failure if it does not compile, or if the compiled program
    has other collectives than the probe.
    """
    sharding = NamedSharding(mesh, partition_spec(probe.kind.spec))
    local = jax.shard_map(
        probe.function,
        mesh=mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        # Reduced values count as different shards, although they are equal.
        check_vma=False,
    )

    def program(*inputs: jax.Array) -> tuple[jax.Array]:
        return (local(inputs[0]),)

    def lower() -> jax.stages.Lowered:
        generator(probe.kind, mesh)
        kinds = probe.inputs
        avals = [jax.ShapeDtypeStruct(k.shape, jnp.dtype(k.dtype)) for k in kinds]
        return jax.jit(
            program,
            in_shardings=(sharding,) * len(avals),
            out_shardings=(sharding,),
            donate_argnums=(len(avals) - 1,),
            keep_unused=True,
        ).lower(*avals)

    is_gpu = mesh.devices.flat[0].platform in GPU_PLATFORMS
    built = build_lowered(key, lower, _ON_GPUS if is_gpu else {})
    if isinstance(built, ProfileRecord):
        return built
    parts = dict(probe.parts)
    wanted = {parts["kind"]: probe.count} if parts["what"] == "collective" else {}
    found = Counter[str]()
    for collective in built.collectives:
        found[collective.kind] += collective.count
    if found != wanted:
        reason = f"expected the collectives {wanted}, the compiler made {dict(found)}"
        return built.record("compile_error", reason=reason)
    return built


_TIMING = TimingOptions(
    warmup_seconds=0.02,
    min_samples=3,
    max_samples=9,
    target_spread=0.03,
    budget_seconds=0.2,
    # A sample includes one launch and one wait, which must be a small share.
    min_sample_ms=10.0,
    min_repeat=1,
)
_ONCE = replace(
    _TIMING, warmup_seconds=0.0, min_samples=1, max_samples=1, budget_seconds=0.0
)
# Virtual devices are for trials, so that short measurements suffice.
_CPU_TIMING = replace(
    _TIMING,
    warmup_seconds=0.01,
    warmup_window=ON_CPUS.warmup_window,
    budget_seconds=0.06,
    min_sample_ms=2.0,
)


def measure_rates(
    mesh: Mesh, store: ProfileStore, options: MeasureOptions | None = None
) -> Rates:
    """Measures rates of a mesh: collectives over each axis and all, and compute.

    Takes a few seconds, unless the store has all records. A curve or rate is that of
    `Rates.default` if every probe of it failed.

    Raises:
      CfpError: all probes failed.
    """
    options = options or MeasureOptions()
    mesh, by_key = _probes_by_key(mesh)
    is_gpu = mesh.devices.flat[0].platform in GPU_PLATFORMS
    found = run_jobs(
        Place(
            mesh=mesh,
            build=lambda task: build_probe(task.key, by_key[task.key], mesh),
            run=lambda task, built: _run(by_key[task.key], mesh, built),
            # NCCL opens links between GPUs for seconds. The result of this run is
            # ignored: a failure repeats when the probe is timed.
            open_links=(lambda task, built: _run(by_key[task.key], mesh, built, _ONCE))
            if is_gpu and not is_shared(mesh)
            else None,
        ),
        [Task(key=key, label=probe.label) for key, probe in by_key.items()],
        store,
        options.of_rates,
    )
    return _rates(mesh, [(probe, found[k.digest]) for k, probe in by_key.items()])


def known_rates(mesh: Mesh, store: ProfileStore) -> Rates | None:
    """Returns `measure_rates`' rates from stored records; None if one is missing."""
    mesh, by_key = _probes_by_key(mesh)
    found = store.get_many([key.digest for key in by_key])
    if any(key.digest not in found for key in by_key):
        return None
    return _rates(mesh, [(probe, found[key.digest]) for key, probe in by_key.items()])


def _probes_by_key(mesh: Mesh) -> tuple[Mesh, dict[ProfileKey, RateProbe]]:
    """Returns the mesh with automatic axes, as plans have, and its probes by key."""
    mesh = planning_mesh(mesh)
    every = ",".join(name for name, size in mesh.shape.items() if size > 1)
    shape = mesh_text(mesh.shape.items())
    where = environment_parts(list(mesh.devices.flat))
    owners = [str(device.process_index) for device in mesh.devices.flat]
    if len(set(owners)) > 1:  # A link between two processes is slower.
        where = (("process_of_device", ",".join(owners)), *where)

    def key(probe: RateProbe) -> ProfileKey:
        # Operations of single devices, or of all together, have one record for all mesh
        # shapes. Otherwise noise would make shapes differ.
        parts = dict(probe.parts)
        axes = parts.get("axes")
        if axes == every:
            parts["axes"] = "all"
        elif axes is not None:
            parts["mesh"] = shape
        return ProfileKey((*parts.items(), *where))

    return mesh, {key(probe): probe for probe in probes(mesh, _sizes(mesh))}


def _sizes(mesh: Mesh) -> ProbeSizes:
    is_large = mesh.devices.flat[0].platform in (*GPU_PLATFORMS, "tpu")
    return LARGE if is_large else SMALL


def _run(
    probe: RateProbe, mesh: Mesh, built: Built, timing: TimingOptions | None = None
) -> ProfileRecord:
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    timing = timing or (_CPU_TIMING if is_cpu else _TIMING)
    return execute(built, probe.inputs, mesh, feedback=probe.feedback, timing=timing)


# ------------------------------------------------------------------------ the outcome


def _rates(mesh: Mesh, measured: list[tuple[RateProbe, ProfileRecord]]) -> Rates:
    """Computes rates from records; see `measure_rates` for failed probes."""
    if not any(record.ok for _, record in measured):
        first = measured[0][1]
        raise CfpError(
            "All small programs that measure the devices failed: "
            f"{first.status}: {first.reason}. Stop other programs on the devices, "
            "and measure again with --retry-failures or "
            "PlannerSettings(retry_failures=True)."
        )
    fallback = Rates.default(mesh)
    points: dict[tuple[str, tuple[str, ...]], list[tuple[int, float]]] = {}
    flops = dict(fallback.matmul_flops_per_ms)
    memory = fallback.memory_bytes_per_ms
    write_ms = 0.0  # Time to write one number into an array.
    for probe, record in measured:
        if record.ok and probe.parts[0] == ("what", "write"):
            write_ms = record.time_ms / probe.count
    for probe, record in measured:
        if not record.ok:
            continue
        parts = dict(probe.parts)
        time_ms = max(record.time_ms, 1e-6) / probe.count
        if parts.get("kind") in ("all-gather", "reduce-scatter"):
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
