"""Step time against memory: a table and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cfp.analysis.analyze import Analysis
from cfp.report.console import Fitted
from cfp.report.plots import figure
from cfp.report.words import candidate_words, kind_title, option_names
from cfp.search.problem import Assignment, Problem
from cfp.search.tradeoff import TradeOff
from cfp.units import format_bytes

# For each kind of segment: how many of its segments take which option.
Taken = list[Counter[int]]


def trade_off_view(
    analysis: Analysis,
    problem: Problem,
    found: TradeOff,
    budget_bytes: int | None,
    border: box.Box,
) -> RenderableType:
    """The frontier as a table; below it what its names mean."""
    names = option_names(analysis, problem.options)
    title = "Step time against memory"
    table = Table(box=border, title=title, title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("memory", "step ms", "rematerialized"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what changes (kind of segment: choices)")
    within = best_within(found, budget_bytes)
    before: Taken | None = None
    for point in found.points:
        taken = _taken(problem, point)
        table.add_row(
            "*" if point == within else "",
            format_bytes(point.memory_bytes),
            f"{point.cost_ms:.3f}",
            str(rematerialized(problem, point) or "-"),
            _changes(names, before, taken),
            style="bold" if point == within else None,
        )
        before = taken
    lines = list(_notes(found, within, budget_bytes))
    legend = [
        *(
            f"  kind {kind}: {kind_title(analysis, kind)}"
            for kind in range(len(problem.options))
        ),
        *_meanings(analysis, problem, found, names),
    ]
    return Group(Fitted(table), *map(Text, lines), Text(), *map(Text, legend))


def best_within(found: TradeOff, budget_bytes: int | None) -> Assignment | None:
    """The fastest point that fits in a budget, if there is a budget and one does."""
    if budget_bytes is None:
        return None
    fitting = [p for p in found.points if p.memory_bytes <= budget_bytes]
    return fitting[-1] if fitting else None


def rematerialized(problem: Problem, point: Assignment) -> int:
    """Counts the segments that rematerialize their forward pass."""
    return sum(
        problem.options[kind][pick].candidate.remat
        for kind, pick in zip(problem.kinds, point.picks, strict=True)
    )


def _taken(problem: Problem, point: Assignment) -> Taken:
    found: Taken = [Counter() for _ in problem.options]
    for kind, pick in zip(problem.kinds, point.picks, strict=True):
        found[kind][pick] += 1
    return found


def _changes(names: list[list[str]], before: Taken | None, taken: Taken) -> str:
    """Lists the strategy of each kind, where it differs from the line above."""
    parts = [
        f"{kind}: {_mixture(names[kind], counts)}"
        for kind, counts in enumerate(taken)
        if before is None or before[kind] != counts
    ]
    # Equal segments may have changed places, which means nothing.
    return "; ".join(parts) or "the same, in another order"


def _mixture(names: list[str], counts: Counter[int]) -> str:
    if len(counts) == 1:
        return names[next(iter(counts))]
    return " + ".join(f"{n} x {names[option]}" for option, n in counts.most_common())


def _notes(
    found: TradeOff, within: Assignment | None, budget_bytes: int | None
) -> Iterator[str]:
    if not found.complete:
        yield "There may be more points between these (--points)."
    if budget_bytes is None:
        return
    budget = format_bytes(budget_bytes)
    if within is None:
        yield f"Nothing fits in the budget of {budget}."
    else:
        yield f"* the fastest within the budget of {budget}"


def _meanings(
    analysis: Analysis, problem: Problem, found: TradeOff, names: list[list[str]]
) -> Iterator[str]:
    """Lists the choices whose names are no preset's."""
    used = {
        pair
        for point in found.points
        for pair in zip(problem.kinds, point.picks, strict=True)
    }
    for kind, option in sorted(used):
        name = names[kind][option]
        if name.startswith("#"):
            candidate = problem.options[kind][option].candidate
            words = candidate_words(analysis, kind, candidate)
            yield f"  {name} of kind {kind}: {words}"


def trade_off_data(
    analysis: Analysis, problem: Problem, found: TradeOff, budget_bytes: int | None
) -> dict[str, Any]:
    """The same as plain data: times in ms, memory in bytes on each device."""
    names = option_names(analysis, problem.options)
    within = best_within(found, budget_bytes)
    return {
        "budget_bytes": budget_bytes,
        "complete": found.complete,
        "points": [
            {
                "memory_bytes": point.memory_bytes,
                "step_ms": point.cost_ms,
                "rematerialized": rematerialized(problem, point),
                "within_budget": point == within,
                "segments": [
                    {
                        "kind": kind,
                        "choice": names[kind][pick],
                        "in_words": candidate_words(
                            analysis, kind, problem.options[kind][pick].candidate
                        ),
                    }
                    for kind, pick in zip(problem.kinds, point.picks, strict=True)
                ],
            }
            for point in found.points
        ],
    }


def plot_trade_off(
    problem: Problem, found: TradeOff, file: Path, budget_bytes: int | None
) -> None:
    """Draws the frontier: steps, since memory in between buys nothing.

    Args:
        problem: what was searched.
        found: its frontier.
        file: an image; its ending says which kind.
        budget_bytes: drawn as a line, if given.

    Raises:
        CfpError: matplotlib is not installed.
    """
    with figure(file) as axis:
        most = found.points[-1].memory_bytes
        unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
        memory = [p.memory_bytes / size for p in found.points]
        times = [p.cost_ms for p in found.points]
        axis.step(memory, times, where="post", color="C0", linewidth=1)
        counts = [rematerialized(problem, p) for p in found.points]
        for again, label in (
            (False, "nothing rematerialized"),
            (True, "rematerializes"),
        ):
            mine = [i for i, n in enumerate(counts) if bool(n) == again]
            if mine:
                axis.plot(
                    [memory[i] for i in mine],
                    [times[i] for i in mine],
                    "o" if not again else "s",
                    color="C1" if again else "C0",
                    label=label,
                )
        if budget_bytes is not None:
            axis.axvline(
                budget_bytes / size, color="black", linewidth=0.8, label="budget"
            )
        axis.set_xlabel(f"{unit} of memory on each device, predicted")
        axis.set_ylabel("ms per step, predicted")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
