"""Curves of one mesh carried over to another of the same links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from math import prod
from statistics import fmean

from cfp.profiling.rates import Curve, Rates, axis_groups, rising, sent_share

_SAMPLE_MS = 2.0
_LARGE_BYTES = 1 << 25


def carried_over(
    rates: Rates, axes: tuple[tuple[str, int], ...], latency_ms: float | None = None
) -> Rates:
    """The rates of a mesh of another size whose devices have the same links.

    Every device of a switch sends as fast as ever; with more of them a larger part of
    a tensor has to be sent.

    Args:
        rates: of a mesh with one axis of two devices or more.
        axes: names and sizes of the other mesh, inside one host.
        latency_ms: of a collective, or None for that of the smallest measured size.
    """
    (name, ways), *others = [item for item in rates.mesh if item[1] > 1]
    if others:
        raise ValueError(f"curves of a mesh of one axis, not of {rates.mesh}")
    sizes = dict(axes)
    curves = {}
    for (kind, group), curve in rates.curves.items():
        if group == (name,):
            for over in axis_groups(axes):
                wanted = prod(sizes[axis] for axis in over)
                more = sent_share(kind, wanted) / sent_share(kind, ways)
                floor = curve[0][1]
                start = floor if latency_ms is None else latency_ms
                curves[kind, over] = tuple(
                    (size, start + (ms - floor) * more) for size, ms in curve
                )
    return Rates(
        mesh=axes,
        curves=curves,
        matmul_flops_per_ms=rates.matmul_flops_per_ms,
        memory_bytes_per_ms=rates.memory_bytes_per_ms,
    )


def in_a_row(recorded_ms: float) -> int:
    """Returns how many programs one sample of an old curve has, by what one took.

    Until chains were timed, a sample was of so many programs in a row, each with one
    collective, that it lasted 2 ms; a tenth more, to reach them at the next look.
    """
    is_enough = recorded_ms >= _SAMPLE_MS
    return 1 if is_enough else math.ceil(1.1 * _SAMPLE_MS / recorded_ms)


def launch_ms_of(curves: Iterable[Curve]) -> float:
    """The launch and the wait that each sample of old curves has once.

    Without them what is sent takes a time that is proportional to its size, as in
    chains. Of two sizes that two numbers of programs in a row were timed of, that says
    how long a launch and a wait are.

    Args:
        curves: of collectives whose times in chains are proportional to their sizes.
    """
    found = []
    for curve in curves:
        (size, ms), *_, (last_size, last_ms) = _large(curve)
        ratio = last_size / size
        shares = ratio / in_a_row(ms) - 1 / in_a_row(last_ms)
        found.append((ratio * ms - last_ms) / shares)
    return fmean(found)


def without_launches(curve: Curve, launch_ms: float, latency_ms: float) -> Curve:
    """An old curve without its share of a sample's launch and wait.

    Args:
        curve: measured with one collective in a program.
        launch_ms: of a sample; see `launch_ms_of`.
        latency_ms: that of a chain of collectives in one program. What is small says
            nothing but how fast programs are launched, and takes the part of the
            smallest large one that its size is.
    """
    large = [(size, ms - launch_ms / in_a_row(ms)) for size, ms in _large(curve)]
    first_size, first_ms = large[0]
    sent_ms = max(0.0, first_ms - latency_ms)
    small = [
        (size, min(ms, latency_ms + sent_ms * size / first_size))
        for size, ms in curve
        if size < first_size
    ]
    return rising([*small, *large])


def _large(curve: Curve) -> list[tuple[int, float]]:
    return [point for point in curve if point[0] >= _LARGE_BYTES]


def rates_from_page(page: Mapping) -> Rates:
    """Rates as ``cfp profile --curves --json`` writes them.

    Args:
        page: the parsed JSON.
    """
    points: dict[tuple[str, tuple[str, ...]], list[tuple[int, float]]] = {}
    for one in page["collectives"]:
        key = one["kind"], tuple(one["axes"])
        points.setdefault(key, []).append((one["size_bytes"], one["time_ms"]))
    return Rates(
        mesh=tuple(page["mesh"].items()),
        curves={key: rising(found) for key, found in points.items()},
        matmul_flops_per_ms={
            dtype: rate * 1e9 for dtype, rate in page["matmul_tflop_per_s"].items()
        },
        memory_bytes_per_ms=page["memory_gb_per_s"] * 1e6,
    )
