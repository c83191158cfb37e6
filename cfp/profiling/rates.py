"""Rates of devices, as curves and numbers to look up.

Sizes are always those of a whole group's tensor, whatever a single device holds of
it before and after; `Rates.collective_ms` says what that means for each kind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log, prod

from jax.sharding import Mesh

Curve = tuple[tuple[int, float], ...]  # (bytes, milliseconds), bytes rising
Axes = Mesh | Iterable[tuple[str, int]]  # a mesh, or its axes' names and sizes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")

# XLA has a pass for each that combines several into one.
COMBINED_KINDS = ("all-reduce", "all-gather", "reduce-scatter")

# Every device of a group sends one piece, once, as a shift or a swap of shards.
_PRICED_AS = {
    "collective-permute": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "all-gather",
}

# FP8 products of cuBLASLt by 16-bit ones, with the passes that quantize beside them
# (docs/fp8.md).
FP8_SPEEDUP = 1.7
_DEFAULT_SIZES = (1 << 14, 1 << 20, 1 << 28)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of computing on a mesh, and of collectives over its axes.

    Attributes:
      curves: measured points, by kind of collective and axes (in the mesh's order).
      matmul_flops_per_ms: of one device while all compute, for "float32" (as JAX
        computes it by default on the devices) and "bfloat16".
      memory_bytes_per_ms: read plus written, of one device while all are busy.
      combined_bytes: up to so many bytes the compiler makes one collective of several
        that do not depend on each other; 0 if it is not counted on.
      launch_ms: the least time of a matrix multiplication.
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
        """Plausible rates without any device: one host of GPUs with fast links.

        All links are alike, and collectives go by rings of neighbours. `flops_per_ms`
        are of float32 and of bfloat16.
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
            matmul_flops_per_ms=dict(
                zip(("float32", "bfloat16"), flops_per_ms, strict=True)
            ),
            memory_bytes_per_ms=memory_bytes_per_ms,
        )

    @classmethod
    def of_virtual_devices(cls, mesh: Axes) -> Rates:
        """About what the virtual devices of one CPU do; measures nothing."""
        # As four of them on two cores do, November 2026.
        return cls.default(mesh, 0.05, 3e6, (45e6, 30e6), 9e6)

    def collective_ms(self, kind: str, axes: tuple[str, ...], size: float) -> float:
        """The time of one collective, run by all groups of devices at once.

        `size` is, in bytes, the whole tensor of one group:

        - all-reduce: what each device holds a partial sum of (and gets the sum of);
        - all-gather: the result, which each device holds in the end;
        - reduce-scatter: the operand, which each device holds in the beginning;
        - all-to-all, collective-permute: all devices' pieces together. One device
          holds a piece of `size` divided by the group's size, before and after.

        Between measured sizes the logarithm of the time is interpolated over the
        logarithm of the size. Below the smallest the time is the smallest's, since
        latency is all there is; above the largest it grows in proportion. A group
        that was not measured as a whole (two axes of three) is taken for its axes
        one after another.

        Args:
          kind: as in HLO: "all-reduce", "all-gather", ...
          axes: names of the mesh's axes, in any order.

        Raises:
          KeyError: if the mesh has no such axis, or the kind is unknown.
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
            raise KeyError(f"no curve for {kind!r} over {group}")
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
        """Computes the time of one of several independent collectives.

        The compiler combines them; each has its share of the latencies.

        Args:
          kind, axes, size: as for `collective_ms`.
          count: number of collectives of about this size.
        """
        whole = self.collective_ms(kind, axes, size)
        if kind not in COMBINED_KINDS or size >= self.combined_bytes:
            return whole
        share = max(size / self.combined_bytes, 1.0 / count)
        return whole - (1.0 - share) * self.collective_ms(kind, axes, 1.0)

    def matmul_ms(self, flops: float, dtype: str) -> float:
        """The time of one device's matrix multiplications.

        Args:
          flops: of one device; a multiplication and an addition are two.
          dtype: of the operands, as numpy or MLIR write it: "bfloat16" or "bf16".
        """
        short = dtype in ("bfloat16", "bf16", "float16", "f16")
        short = short or dtype.startswith(("float8", "f8", "int8", "i8", "ui8"))
        rate = self.matmul_flops_per_ms["bfloat16" if short else "float32"]
        return flops / (rate * FP8_SPEEDUP if dtype.startswith("f8") else rate)

    def memory_ms(self, size: float) -> float:
        """The time of reading and writing `size` bytes, together, on one device."""
        return size / self.memory_bytes_per_ms


def axis_groups(axes: Iterable[tuple[str, int]]) -> tuple[tuple[str, ...], ...]:
    """Each axis of two or more by itself, then all of them together."""
    names = tuple(name for name, size in axes if size > 1)
    single = tuple((name,) for name in names)
    return (*single, names) if len(names) > 1 else single


def rising(points: Iterable[tuple[int, float]]) -> Curve:
    """Points in order of size, none slower than a larger one.

    More bytes never take less time; where that was measured, the smaller one met
    with noise, which only ever slows things down.
    """
    ordered = sorted(points, reverse=True)
    times = accumulate((ms for _, ms in ordered), min)
    pairs = zip(ordered, times, strict=True)
    return tuple((size, ms) for (size, _), ms in pairs)[::-1]


def interpolate(curve: Curve, size: float) -> float:
    """The time that a curve gives to a size; see `Rates.collective_ms`."""
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
    """The part of a group's tensor that one device sends, in a ring."""
    passes = {"all-reduce": 2.0, "all-to-all": 1.0 / ways}.get(kind, 1.0)
    return passes * (ways - 1) / ways
