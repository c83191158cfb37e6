"""Tables and bars of measurements, by shape and implementation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cfp.operators.benchmark import ABSENT, FAILED, MEASURED, Pass, Row
from cfp.operators.operator import Operator
from cfp.report.console import Fitted
from cfp.report.plots import figure

_PASSES = {"forward": "forward", "both": "forward and backward"}


def print_environment(found: Mapping[str, Any], console: Console) -> None:
    """The table of what operators run on."""
    console.print("===== Environment =====")
    table = _table("", "Value")
    memory = found["memory_bytes"]
    table.add_row("device", found["device"])
    table.add_row("memory", f"{memory / 2**20:.0f} MB" if memory else "-")
    table.add_row("Python", found["python"])
    table.add_row("backend", found["platform_version"].splitlines()[0] or "-")
    table.add_row("commit", found["commit"] or "-")
    for name, version in found["packages"].items():
        table.add_row(name, version or "not installed")
    console.print(Fitted(table))


def print_list(operators: Sequence[Operator], console: Console) -> None:
    """The operators and their implementations, with what is missing and why."""
    table = _table("operator", "implementation", "library", "here", "what it computes")
    for operator in operators:
        for i, one in enumerate(operator.implementations):
            table.add_row(
                "" if i else operator.name,
                one.name,
                one.library,
                one.probe() or "yes",
                "" if i else operator.summary,
            )
    console.print(Fitted(table))


def print_results(
    operators: Sequence[Operator],
    rows: Sequence[Row],
    console: Console,
    *,
    verbose: bool = False,
) -> None:
    """All tables of what was measured, and what was not with its reason."""
    for operator in operators:
        own = [row for row in rows if row.operator == operator.name]
        for name in _PASSES:
            measured = [row for row in own if name in row.passes]
            if measured:
                _print_pass(operator, measured, name, console)
    _print_rest(rows, console, verbose=verbose)


def _print_pass(
    operator: Operator, rows: Sequence[Row], name: str, console: Console
) -> None:
    cells: tuple[tuple[str, Callable[[Pass], str]], ...] = (
        ("ms", lambda one: f"{one.median_ms:.3f}"),
        ("MB besides inputs and outputs", _megabytes),
        ("% of the roofline", _percent),
        ("s to compile", lambda one: f"{one.compile_seconds:.2f}"),
    )
    names = list(dict.fromkeys(row.implementation for row in rows))
    console.print(f"[{operator.name}: {_PASSES[name]}]")
    table = _table("shape", "type", "", *names)
    for shape, dtype in dict.fromkeys((row.shape, row.dtype) for row in rows):
        here = {
            row.implementation: row.passes[name]
            for row in rows
            if (row.shape, row.dtype) == (shape, dtype)
        }
        for i, (unit, text) in enumerate(cells):
            table.add_row(
                "" if i else f"({shape.replace(',', ', ')})",
                "" if i else dtype,
                unit,
                *(text(here[one]) if one in here else "-" for one in names),
            )
        table.add_section()
    console.print(Fitted(table))


def _print_rest(rows: Sequence[Row], console: Console, *, verbose: bool) -> None:
    rest = [row for row in rows if row.state != MEASURED]
    if not rest:
        return
    console.print("[not measured]")
    table = _table("operator", "implementation", "shapes", "why")
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rest:
        why = row.reason if row.state == ABSENT else f"{row.state}: {row.reason}"
        key = (row.operator, row.implementation, why)
        groups.setdefault(key, []).append(f"{row.shape} {row.dtype}")
    for (operator, one, why), where in groups.items():
        every = "all" if why.split(":")[0] not in STATES_OF_ONE else "; ".join(where)
        table.add_row(operator, one, every, why)
    console.print(Fitted(table))
    if verbose:
        for row in rest:
            if row.detail:
                console.print(f"{row.operator} by {row.implementation} at {row.shape}:")
                console.print(row.detail)
    elif any(row.state == FAILED for row in rest):
        console.print("--verbose prints the whole messages of what failed.")


STATES_OF_ONE = ("incorrect", "failed", "refused", "no memory", "not reached")


def _megabytes(one: Pass) -> str:
    return "-" if one.temp_bytes is None else f"{one.temp_bytes / 1e6:.1f}"


def _percent(one: Pass) -> str:
    return "-" if one.roofline_percent is None else f"{one.roofline_percent:.0f}"


def _table(*headings: str) -> Table:
    table = Table(box=box.ASCII, pad_edge=False)
    for name in headings:
        table.add_column(name, overflow="fold")
    return table


def parse_share(text: str) -> float:
    """5% or 0.05 as 0.05.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*(%?)\s*", text)
    if match is None:
        raise ValueError(text)
    return float(match[1]) / (100 if match[2] else 1)


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
