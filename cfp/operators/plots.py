"""Bars of what implementations take: a panel of times and one of memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cfp.operators.benchmark import Row
from cfp.report.plots import figure


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draws times and memory of everything that was measured.

    Args:
        rows: what was measured.
        file: an image; its ending says which kind.

    Raises:
        CfpError: matplotlib is not installed, or does not know the kind of image.
    """
    measured = [row for row in rows if row.passes]
    labels = [
        f"{row.operator}, {row.implementation}\n({row.shape}) {row.dtype}"
        for row in measured
    ]
    passes = [row.passes.get("both", row.passes.get("forward")) for row in measured]
    places = range(len(measured))
    height = max(2.0, 0.42 * len(measured) + 1.0)
    with figure(file, columns=2, figsize=(12, height)) as (times, memory):
        times.barh(places, [one.median_ms for one in passes if one])
        times.set_yticks(places, labels, fontsize=7)
        times.set_xlabel("ms, forward and backward where both were run")
        memory.barh(places, [(one.temp_bytes or 0) / 1e6 for one in passes if one])
        memory.set_yticks(places, [""] * len(measured))
        memory.set_xlabel("MB besides inputs and outputs")
        for axes in (times, memory):
            axes.invert_yaxis()
            axes.set_xscale("symlog", linthresh=0.01)
