"""Writes a results page, and its plot, from what `cfp bench --json` wrote.

    python -m cfp_test.bench.page --title '...' --command '...' --out docs/results/x.md
        --plot docs/pictures/x.svg NVLink=nvlink.json 'No peers'=p2p_off.json

Every figure comes out of the JSON, which belongs beside the page.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cfp.errors import CfpError
from cfp_test.bench.command import read_results
from cfp_test.bench.rows import RIVALS, best, rows_of
from cfp_test.bench.tables import (
    HEADINGS,
    cells,
    comparison_lines,
    in_order,
    planned_ms,
    summary_lines,
)

Results = Mapping[str, Mapping[str, Any]]  # by the name of what was different

_SHOWN = (
    "platform",
    "device_kind",
    "devices",
    "jax_version",
    "jaxlib_version",
    "driver_version",
    "nccl",
    "xla_flags",
    "processor",
)
# In the order of RIVALS, with the plan in front.
_BARS = {"planned": "planned", "handwritten": "by hand", "cost_model": "cost model"}


def page(title: str, command: str, results: Results, picture: str | None) -> str:
    """The page, in Markdown.

    Args:
      title: its heading.
      command: what was run.
      results: what it gave, by the name of what was different about each.
      picture: where the plot lies, as seen from the page, or None.
    """
    dates = sorted({one["date"] for one in results.values()})
    parts = [f"# {title}", "", f"Measured on {', '.join(dates)} with", ""]
    parts += [f"    {command}", "", *_ratios(results), ""]
    if picture is not None:
        parts += [f"![Step times, relative to the plan's]({picture})", ""]
    for name, one in results.items():
        parts += [f"## {name}", "", *_environment(one), ""]
        for data in one["configurations"]:
            parts += [f"### {data['name']}", "", *_rows(data), ""]
            parts += [f"- {line}" for line in summary_lines(data)]
            compared = list(comparison_lines(data))
            if compared:
                parts += ["", "```text", *compared, "```"]
            parts.append("")
    return "\n".join(parts).rstrip("\n") + "\n"


def _ratios(results: Results) -> Iterator[str]:
    """One line for each configuration: the plan against the best of each group."""
    yield (
        "| | configuration | planned ms | "
        + " | ".join(name.removeprefix("planned / best ") for name in RIVALS.values())
        + " | planning s |"
    )
    yield "| --- | --- | --- |" + " --- |" * (len(RIVALS) + 1)
    for name, one in results.items():
        for data in one["configurations"]:
            ours = best(rows_of(data), "planned")
            found = [data["ratios"].get(ratio) for ratio in RIVALS.values()]
            cells_ = ["-" if ratio is None else f"{ratio:.3f}" for ratio in found]
            time_ms = "-" if ours is None else f"{ours.median_ms:.2f}"
            yield (
                f"| {name} | {data['name']} | {time_ms} | {' | '.join(cells_)} | "
                f"{data['planning_seconds']:.0f} |"
            )
    yield ""
    yield (
        "Ratios are the plan's median step time over that of the best of each kind: "
        "below one, the plan is faster."
    )


def _environment(one: Mapping[str, Any]) -> Iterator[str]:
    known = one["environment"]
    for key in _SHOWN:
        if known.get(key):
            yield f"- {key}: {known[key]}"
    yield (
        f"- {one['rounds']} turns of each competitor, all in one process, in turn; "
        f"before that, {one['gate']['steps']} steps at a small size equal those of one "
        f"device to {one['gate']['tolerance']:g}"
    )


def _rows(data: Mapping[str, Any]) -> Iterator[str]:
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|" + " --- |" * len(HEADINGS)
    rows = rows_of(data)
    ours = planned_ms(rows)
    for row in in_order(rows):
        found = [cell.replace("|", "/") for cell in cells(row, ours)]
        if row.group == "planned":
            found[0] = f"**{found[0]}**"
        yield f"| {' | '.join(found)} |"


def plot(results: Results, file: Path) -> None:
    """Bars: the best of each kind, relative to the plan, for each configuration."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cfp"  # The same data, the same file.
    from matplotlib import pyplot

    groups = {**_BARS, "preset": "preset", "pytorch": "PyTorch"}
    labels, heights = [], []
    for name, one in results.items():
        for data in one["configurations"]:
            rows = rows_of(data)
            ours = planned_ms(rows)
            found = [best(rows, group) for group in groups]
            labels.append(f"{data['model']}\n{data['options']['dtype']}\n{name}")
            heights.append([row.median_ms / ours if row else 0.0 for row in found])
    width = 0.8 / len(groups)
    figure, axes = pyplot.subplots(
        figsize=(max(5.0, 1.3 * len(labels)), 3.6), layout="constrained"
    )
    for i, title in enumerate(groups.values()):
        places = [x + (i - (len(groups) - 1) / 2) * width for x in range(len(labels))]
        axes.bar(places, [row[i] for row in heights], width, label=title)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel("step time, relative to the plan's")
    axes.legend(fontsize=8, ncols=len(groups), loc="lower center")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--title", required=True)
    parser.add_argument("--command", required=True, help="what was run")
    parser.add_argument("--out", type=Path, required=True, help="the page")
    parser.add_argument("--plot", type=Path, help="the plot, .svg or .png")
    parser.add_argument("results", nargs="+", metavar="NAME=FILE")
    args = parser.parse_args()
    results = {}
    try:
        for item in args.results:
            name, _, path = item.rpartition("=")
            results[name or Path(path).stem] = read_results(Path(path))
    except CfpError as error:
        parser.error(str(error))
    picture = None
    if args.plot is not None:
        plot(results, args.plot)
        picture = os.path.relpath(args.plot, args.out.parent)
    args.out.write_text(page(args.title, args.command, results, picture))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
