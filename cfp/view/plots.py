"""Figures in files, and rates as a table; matplotlib is loaded when it draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from cfp.errors import CfpError
from cfp.profiling.rates import Rates, sent_share
from cfp.units import format_bytes
from cfp.view.console import new_table


def check_can_draw(file: Path) -> None:
    """Says before there is anything to draw that it could not be.

    Args:
        file: an image; its ending says which kind.

    Raises:
        CfpError: matplotlib is not installed, or does not know the kind of image.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise CfpError(
            "A plot needs matplotlib. Install it: pip install 'cfp[report]'."
        ) from error
    endings = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lower().removeprefix(".") not in endings:
        known = ", ".join(f".{ending}" for ending in sorted(endings))
        raise CfpError(
            f"Cannot draw {file}: its ending says no kind of image. Name a file that "
            f"ends in one of {known}."
        )


@contextmanager
def figure(
    file: Path, columns: int = 1, figsize: tuple[float, float] = (7, 4.2)
) -> Iterator[Any]:
    """The axes of a figure; it is saved when all is drawn.

    Args:
        columns: how many plots stand side by side.

    Raises:
        CfpError: matplotlib is not installed, or does not know the kind of image.
    """
    check_can_draw(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, columns, figsize=figsize)
    try:
        yield axes
        drawn.tight_layout()
        drawn.savefig(file)
    finally:
        pyplot.close(drawn)


# ---------------------------------------------------------------- rates of collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One measured collective.

    Attributes:
        axes: the mesh's axes that it runs over.
        size_bytes: the whole tensor of a group; see `Rates.collective_ms`.
        sent_gb_per_s: what each device sent, by a ring's account, in 1e9 bytes a
            second.
    """

    kind: str
    axes: tuple[str, ...]
    size_bytes: int
    time_ms: float
    sent_gb_per_s: float


def curve_points(rates: Rates) -> list[CurvePoint]:
    """All measured collectives, by axes, kind and size."""
    sizes = dict(rates.mesh)
    found = []
    for (kind, axes), curve in sorted(rates.curves.items(), key=lambda c: c[0][::-1]):
        share = sent_share(kind, prod(sizes[name] for name in axes))
        found += [
            CurvePoint(
                kind=kind,
                axes=axes,
                size_bytes=size,
                time_ms=time_ms,
                sent_gb_per_s=size * share / time_ms / 1e6,
            )
            for size, time_ms in curve
        ]
    return found


def curves_data(rates: Rates, link_gb_per_s: float | None) -> dict[str, Any]:
    """The curves and rates, as JSON."""
    return {
        "mesh": dict(rates.mesh),
        "link_gb_per_s": link_gb_per_s,
        "matmul_tflop_per_s": {
            dtype: flops / 1e9 for dtype, flops in rates.matmul_flops_per_ms.items()
        },
        "memory_gb_per_s": rates.memory_bytes_per_ms / 1e6,
        "collectives": [asdict(point) for point in curve_points(rates)],
    }


def curves_table(rates: Rates, link_gb_per_s: float | None, border: box.Box) -> Table:
    """The curves, a line for each size."""
    numbers = ["tensor", "ms", "GB/s sent"] + ["of link"] * bool(link_gb_per_s)
    headings = dict.fromkeys(("collective", "axes"), "text")
    headings |= dict.fromkeys(numbers, "number")
    table = new_table(border, None, headings)
    for point in curve_points(rates):
        row = [
            point.kind,
            ",".join(point.axes),
            format_bytes(point.size_bytes),
            f"{point.time_ms:.4f}",
            f"{point.sent_gb_per_s:.1f}",
        ]
        if link_gb_per_s:
            row.append(f"{point.sent_gb_per_s / link_gb_per_s:.0%}")
        table.add_row(*row)
    return table


def plot_curves(
    curves: Sequence[tuple[str, Rates]], file: Path, link_gb_per_s: float | None
) -> None:
    """Draws curves: time and bandwidth over size.

    Args:
        curves: names and rates; each name has a line style of its own.
        link_gb_per_s: what one device's links can send, drawn as a line.

    Raises:
        CfpError: matplotlib is not installed.
    """
    with figure(file, 2, figsize=(11, 4.2)) as (times, speeds):
        for style, (name, rates) in zip(("-", "--", ":", "-."), curves, strict=False):
            points = curve_points(rates)
            lines = list(dict.fromkeys((p.kind, p.axes) for p in points))
            for number, (kind, axes) in enumerate(lines):
                mine = [p for p in points if (p.kind, p.axes) == (kind, axes)]
                sizes = [p.size_bytes / 2**20 for p in mine]
                label = ", ".join(filter(None, (f"{kind} over {','.join(axes)}", name)))
                how = {"color": f"C{number % 10}", "linestyle": style, "marker": "."}
                times.plot(sizes, [p.time_ms for p in mine], label=label, **how)
                speeds.plot(sizes, [p.sent_gb_per_s for p in mine], **how)
        for axis, title in ((times, "ms"), (speeds, "GB/s sent by each device")):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("MiB of the whole tensor")
            axis.set_ylabel(title)
            axis.grid(alpha=0.3)
        if link_gb_per_s:
            speeds.axhline(link_gb_per_s, color="black", linewidth=0.8)
            speeds.annotate("link", (1, link_gb_per_s), va="bottom")
        times.legend(fontsize=7)
