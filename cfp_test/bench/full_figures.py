"""Figures of a whole model's trainings: which, how fast, and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cfp.analysis.contractions import is_contraction
from cfp.presets.presets import PRESETS
from cfp.program.graph import Program
from cfp.race.programs import RaceRow
from cfp.settings import ConstraintLevel


def best_presets(race: Sequence[RaceRow], winner: str, count: int) -> list[str]:
    """The fastest presets with default compiler options, but for the winner.

    If none of them ran, the best by prediction of those that were left out.
    """

    def is_preset(row: RaceRow) -> bool:
        name = row.name.removesuffix(", rematerialized")
        for level in ConstraintLevel:
            name = name.removesuffix(f", {level} constrained").removesuffix(
                ", rematerialized"
            )
        # On a mesh of several axes presets are named by axis: "x=data,y=tensor".
        return name in PRESETS or ("=" in name and ", " not in name)

    rivals = [row for row in race if row.name != winner and is_preset(row)]
    ran = [(r.time_ms, r.name) for r in rivals if r.time_ms is not None and not r.note]
    left = [
        (r.predicted_ms, r.name)
        for r in rivals
        if r.predicted_ms is not None and r.note.startswith("predicted")
    ]
    return [name for _, name in sorted(ran or left)[:count]]


def loops_counted_once(program: Program) -> int:
    """Loops around contractions that run once, or it is not known how often."""
    return sum(
        any(
            is_contraction(program.ops[i]) and program.ops[i].repeat <= op.repeat
            for i in op.body
        )
        for op in program.ops
        if op.kind == "while"
    )


def figures(
    trained: Mapping[str, Any], flops: int, flops_per_ms: float, devices: int
) -> dict[str, float | None]:
    """Derives figures from the samples of a training.

    Args:
        trained: ``samples_ms`` of single steps, ``in_a_row_ms`` of one of many, and
            ``tokens`` of a step or None.
        flops: of one step, on all devices together.
        flops_per_ms: what one device can do.
        devices: how many there are.
    """
    samples = trained["samples_ms"]
    row_ms, tokens = trained["in_a_row_ms"], trained["tokens"]
    ideal_ms = flops / (devices * flops_per_ms)
    # The first step loads code and opens communicators.
    step_ms = statistics.median(samples[1:] or samples)
    return {
        "step_ms": step_ms,
        "tokens_per_second": tokens / row_ms * 1000 if tokens else None,
        "mfu": ideal_ms / row_ms,
        "mfu_of_single_steps": ideal_ms / step_ms,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Trainings as lines of text."""
    lines = [
        f"{'plan':34} {'step ms':>9} {'in a row':>9} {'tokens/s':>10} {'MFU':>6} "
        f"{'compiled':>9} {'device':>9}  loss"
    ]
    for row in rows:
        if "in_a_row_ms" not in row:
            lines.append(f"{row['plan']:34} {row['note']}")
            continue
        tokens = row["tokens_per_second"]
        sizes = [
            f"{size / 2**30:5.1f} GiB" if size is not None else "-"
            for size in (row["compiled_bytes"], row["device_peak_bytes"])
        ]
        losses = row["losses"]
        ends = f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "none"
        lines.append(
            f"{row['plan']:34} {row['step_ms']:9.2f} {row['in_a_row_ms']:9.2f} "
            f"{f'{tokens:,.0f}' if tokens else '-':>10} {row['mfu']:6.1%} "
            f"{sizes[0]:>9} {sizes[1]:>9}  {ends}{row['note'] and '; '}{row['note']}"
        )
    return "\n".join(lines)
