"""Makes a page and a plot of what `cfp profile --curves --json` measured.

python cfp_test/scripts/curves_page.py NAME=FILE.json [NAME=FILE.json ...]
    --page docs/results/NAME.md --plot docs/pictures/NAME.png --link 450
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfp.profiling.rates import Rates
from cfp.report.plots import curve_points, plot_curves


def rates_of(data: Mapping[str, Any]) -> Rates:
    """The rates that `cfp profile --curves --json` wrote."""
    curves: dict = {}
    for point in data["collectives"]:
        key = point["kind"], tuple(point["axes"])
        curves.setdefault(key, []).append((point["size_bytes"], point["time_ms"]))
    return Rates(
        mesh=tuple(data["mesh"].items()),
        curves={key: tuple(points) for key, points in curves.items()},
        matmul_flops_per_ms={
            dtype: rate * 1e9 for dtype, rate in data["matmul_tflop_per_s"].items()
        },
        memory_bytes_per_ms=data["memory_gb_per_s"] * 1e6,
    )


def section(name: str, rates: Rates, link: float | None) -> list[str]:
    """Writes the measurements over one kind of link as Markdown.

    Args:
        name: of the links.
        rates: what was measured.
        link: GB/s that one device can send, or None.
    """
    matmul = ", ".join(
        f"{dtype} {flops / 1e9:.0f}"
        for dtype, flops in rates.matmul_flops_per_ms.items()
    )
    lines = [
        f"## {name}",
        "",
        f"One device multiplies matrices at {matmul} TFLOP/s and moves "
        f"{rates.memory_bytes_per_ms / 1e6:.0f} GB/s in its memory.",
        "",
        "| collective | axes | MiB | ms | GB/s sent | of the link |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for p in curve_points(rates):
        share = f"{p.sent_gb_per_s / link:.0%}" if link else "-"
        lines.append(
            f"| {p.kind} | {','.join(p.axes)} | {p.size_bytes / 2**20:.2f} | "
            f"{p.time_ms:.4f} | {p.sent_gb_per_s:.1f} | {share} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    parser.add_argument("--note", default="", help="a paragraph for the page's top")
    parser.add_argument("--link", type=float, help="GB/s that one device can send")
    options = parser.parse_args()
    named = [
        (name, rates_of(json.loads(Path(file).read_text())))
        for name, _, file in (text.rpartition("=") for text in options.files)
    ]
    plot_curves(named, options.plot, options.link)
    lines = [
        "# What collectives take",
        "",
        "Measured with `cfp profile curves`, as one of a chain: without the launch "
        "of a program. Bytes are those of the whole tensor of a "
        "group; what a device sends is by a ring's account"
        + (f"; the link sends {options.link:g} GB/s." if options.link else "."),
        "",
        *([options.note, ""] if options.note else []),
        f"![time and bandwidth over size](../pictures/{options.plot.name})",
        "",
    ]
    for name, rates in named:
        lines += section(name, rates, options.link)
    options.page.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
