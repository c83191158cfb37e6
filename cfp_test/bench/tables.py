"""Results as a person reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from cfp.units import format_bytes
from cfp.view.console import print_view
from cfp_test.bench.rows import Row, rows_of

HEADINGS = (
    "competitor",
    "mesh",
    "ms",
    "IQR",
    "vs planned",
    "memory",
    "loss gap",
    "note",
)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The fastest first; what was not timed last."""
    return sorted(rows, key=lambda row: row.median_ms)


def cells(row: Row, planned_ms: float) -> tuple[str, ...]:
    """A row's cells, as `HEADINGS` names them."""
    timed = row.status == "ok"
    ratio = row.median_ms / planned_ms
    return (
        row.name if row.group != "handwritten" else f"{row.name} (by hand)",
        row.mesh or "-",
        f"{row.median_ms:.2f}" if timed else row.status,
        "-" if row.iqr_ms is None else f"{row.iqr_ms:.2f}",
        f"{ratio:.3f}" if timed and 0 < ratio < float("inf") else "-",
        format_bytes(row.peak_bytes) if row.peak_bytes else "-",
        "-" if row.loss_gap is None else f"{row.loss_gap:.1g}",
        row.note or row.reason.splitlines()[0][:160] if row.reason or row.note else "",
    )


def planned_ms(rows: Sequence[Row]) -> float:
    """The best plan's median; infinite where there is none."""
    return min(
        (row.median_ms for row in rows if row.group == "planned"), default=float("inf")
    )


def summary_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Derives figures from a configuration's rows."""
    for name, ratio in data["ratios"].items():
        yield f"{name}: {ratio:.3f}"
    seconds = data["planning_seconds"]
    if seconds:
        paid = ", ".join(
            f"{group} never" if count is None else f"{group} after {count} steps"
            for group, count in data["pays_after_steps"].items()
        )
        yield f"planning took {seconds:.1f} s; paid for against {paid or 'nobody'}"
    for row in rows_of(data):
        if row.trace is not None:
            t = row.trace
            yield (
                f"{row.name}: {t['communication_ms']:.2f} ms communication, "
                f"{t['compute_ms']:.2f} ms compute, {t['overlapped_ms']:.2f} ms both, "
                f"{t['exposed_ms']:.2f} ms communication exposed"
            )


def comparison_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """The plan beside the cost model's choices."""

    def ms(value: float | None) -> str:
        return "nothing" if value is None else f"{value:.2f} ms"

    for one in data["cost_model"]:
        count = len(one["differences"])
        yield f"{one['name']}: {count} of {one['blocks']} blocks differ from the plan"
        yield (
            f"  the model believes (communication alone) of its choice "
            f"{ms(one['model_believes_of_its_own_ms'])}, of the plan "
            f"{ms(one['model_believes_of_the_plan_ms'])}"
        )
        yield (
            f"  the profiles predict of the model's choice "
            f"{ms(one['profiles_predict_of_the_model_ms'])}, of the plan "
            f"{ms(one['profiles_predict_of_the_plan_ms'])}"
        )
        for difference in one["differences"]:
            yield (
                f"  {difference['block']}: planned {difference['planned']}; "
                f"cost model {difference['cost_model']}"
            )


def print_configuration(data: Mapping[str, Any]) -> None:
    """A table, and what follows from it."""
    print_view(lambda border: _table(data, border))
    for line in (*summary_lines(data), *comparison_lines(data)):
        print(line)
    print(flush=True)


def _table(data: Mapping[str, Any], border: box.Box) -> Table:
    title = f"{data['name']}, {data['devices']} devices, {data['tflop']:.4g} TFLOP"
    table = Table(box=border, title=title, title_justify="left", pad_edge=False)
    for heading in HEADINGS:
        words = heading in ("competitor", "mesh", "note")
        table.add_column(heading, justify="left" if words else "right", overflow="fold")
    rows = rows_of(data)
    ours = planned_ms(rows)
    for row in in_order(rows):
        table.add_row(*cells(row, ours))
    return table


def print_changes(found: Sequence[tuple[str, str, float, float]]) -> None:
    """Compares results with earlier ones."""
    if not found:
        print("Nothing to compare: no configuration has a competitor in common.")
    for config, name, before, now in found:
        change = 100 * (now / before - 1)
        print(
            f"{config}: {name}: {before:.2f} ms before, {now:.2f} now ({change:+.1f}%)"
        )
