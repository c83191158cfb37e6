"""Curves of one mesh carried over to another of the same links."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from cfp.profiling.rates import Curve, Rates, axis_groups, rising, sent_share


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


def without_launches(
    curve: Curve, latency_ms: float, below_bytes: int = 1 << 25
) -> Curve:
    """A curve without the launch and the wait of a program for each collective.

    What is sent grows with its size, so that the rest is the launch and the wait: in
    chains of two H200 without peer-to-peer access nothing is left at 32 to 128 MiB, and
    one a program on four H200 left 0.4 to 1.5 ms of 1.5 to 3.4. Without them both send
    as fast: 23 GB/s of gathers and scatters, 25 to 27 of sums.

    Args:
        curve: measured with one collective in a program.
        latency_ms: that of a chain of collectives in one program.
        below_bytes: smaller sizes say nothing but what the launch takes.
    """
    large = [point for point in curve if point[0] >= below_bytes]
    size, ms = large[0]
    last_size, last_ms = large[-1]
    slope = (last_ms - ms) / (last_size - size) if last_size > size else ms / size
    launch_ms = max(0.0, ms - slope * size - latency_ms)
    first_ms = ms - launch_ms
    return rising(
        (
            s,
            t - launch_ms
            if s >= below_bytes
            else min(t, latency_ms + first_ms * s / size),
        )
        for s, t in curve
    )


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
