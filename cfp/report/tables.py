"""A plan as tables: block by block, then the race, then what it took to find.

Everything stands in the plan itself, so that a saved plan prints like a fresh one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cfp.analysis.naming import op_path
from cfp.plan.parts import PlanRow, PlanSegment
from cfp.plan.plan import Plan
from cfp.plan.text import (
    Repeat,
    best_variants,
    collapse,
    common_prefix,
    headline,
    merged_name,
    other_names,
    remarks,
    roles_text,
    slower_variants,
    span_text,
    storage_text,
)
from cfp.plan.throughput import throughput, throughput_text
from cfp.plan.words import elided, scale_text, summary_line
from cfp.printable import columns, merged_alike, printable
from cfp.profiling.hlo import CollectiveSite
from cfp.profiling.timing import interquartile_range
from cfp.race.programs import RaceRow
from cfp.report.console import Fitted, literal_console
from cfp.settings import ENOUGH_SAMPLES
from cfp.units import format_bytes

_SIZE = re.compile(r" [\d.]+ (B|[KMG]iB)")


# --------------------------------------------------------------------------- tables


def blocks_table(plan: Plan, *, border: box.Box = box.ROUNDED) -> Fitted:
    """The blocks, repeated segments once."""
    table = Table(box=border, title="Blocks", title_justify="left", pad_edge=False)
    table.add_column("segment", no_wrap=True)
    table.add_column("block")
    table.add_column("sharded")
    table.add_column("parameters")
    table.add_column("collectives that follow")
    table.add_column("segment ms", justify="right", no_wrap=True)
    prefix = common_prefix([row.name for row in plan.rows])
    for repeat in collapse(plan):
        cells: list[list[str]] = []
        counts: list[int] = []
        for place, row in enumerate(repeat.rows[0]):
            new_segment = place == 0 or row.segment != repeat.rows[0][place - 1].segment
            twins = [part[place] for part in repeat.rows]
            segment = plan.segments[row.segment]
            what = [
                merged_name([twin.name.removeprefix(prefix) for twin in twins]),
                roles_text(row.strategy),
                storage_text(segment) if new_segment else "",
                _collectives(twins),
                _segment_time(segment, repeat.count) if new_segment else "",
            ]
            if not new_segment and cells[-1] == ["", *what]:
                counts[-1] += 1
                continue
            first = _segment_text(repeat, row.segment) if new_segment else ""
            cells.append([first, *what])
            counts.append(1)
        for (first, name, *rest), count in zip(cells, counts, strict=True):
            times = f" ({count} blocks)" if count > 1 else ""
            table.add_row(first, name + times, *rest)
        table.add_section()
    return Fitted(table)


def _collectives(twins: Sequence[PlanRow]) -> str:
    """Finds the call of most twins, and the exceptions: the first of a stack, say.

    Small differences in size are those of tensors that belong to no block for sure.
    """
    kinds: dict[str, list[PlanRow]] = {}
    for twin in twins:
        kinds.setdefault(_SIZE.sub("", twin.collectives), []).append(twin)
    common, *others = sorted(
        kinds.values(), key=lambda group: (-len(group), -group[-1].segment)
    )
    # Of those that are alike the middle stands for all, as in explanations.
    texts = [common[len(common) // 2].collectives]
    for group in others:
        where = span_text([row.segment for row in group])
        texts.append(f"segment {where}: {group[0].collectives}")
    return "; ".join(texts)


def _segment_text(repeat: Repeat, segment: int) -> str:
    if repeat.count == 1:
        return str(segment)
    members = [segment + i * repeat.period for i in range(repeat.count)]
    return f"{span_text(members)} ({repeat.count} x)"


def _segment_time(segment: PlanSegment, count: int) -> str:
    if segment.time_ms is None:
        return "-"
    times = f"{count} x " if count > 1 else ""
    return f"{times}{segment.time_ms:.3g}"


_UNMEASURED = {"estimated": "Estimates", "one device": "Predicted on one device"}


def race_table(plan: Plan, *, border: box.Box = box.ROUNDED) -> Fitted:
    """The candidates, the fastest first; the winner is marked.

    Columns in which nothing would stand are left out.
    """
    ran = any(row.samples_ms for row in plan.race) or plan.rung == "measured"
    title = "Race" if ran else _UNMEASURED[plan.rung]
    rows = best_variants(plan)
    has_rungs = any(row.rung != "measured" for row in plan.race)
    shared = shared_note(plan)
    cells = {
        "": ["*" if row.name == plan.winner else "" for row in rows],
        "plan": [row.name for row in rows],
        "predicted ms": [_ms(row.predicted_ms) for row in rows],
        "measured ms": [_ms(row.time_ms) for row in rows],
        "+-": [_spread(row) for row in rows],
        "memory": [format_bytes(r.peak_bytes) if r.peak_bytes else "-" for r in rows],
        "from": [row.rung if has_rungs else "" for row in rows],
        "note": ["" if shared else row.note or _same_as(plan, row) for row in rows],
    }
    cells = {head: of for head, of in cells.items() if head == "" or {*of} - {"", "-"}}
    table = Table(box=border, title=title, title_justify="left", pad_edge=False)
    for heading in cells:
        number = heading in ("predicted ms", "measured ms", "+-", "memory")
        justify = "right" if number else "left"
        text = heading in ("plan", "note")
        table.add_column(heading, justify=justify, no_wrap=not text)
    for row, texts in zip(rows, zip(*cells.values(), strict=True), strict=True):
        table.add_row(*texts, style="bold" if row.name == plan.winner else None)
    return Fitted(table)


def shared_note(plan: Plan) -> str:
    """The note that several candidates have in common, all of them, or ""."""
    notes = [row.note for row in best_variants(plan)]
    return notes[0] if len(notes) > 1 and len({*notes}) == 1 else ""


def _same_as(plan: Plan, row: RaceRow) -> str:
    """Candidates that came out as one program were run once, and stand in one row."""
    others = other_names(plan, row)
    return f"the same program as {', '.join(others)}" if others else ""


def _spread(row: RaceRow) -> str:
    """Half of the samples lie as near to their median as this."""
    few = row.time_ms is None or len(row.samples_ms) < ENOUGH_SAMPLES
    return "-" if few else f"{interquartile_range(row.samples_ms) / 2:.2g}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ----------------------------------------------------------------------- the whole


def plan_view(plan: Plan, *, border: box.Box = box.ROUNDED) -> RenderableType:
    """Everything, for a rich console."""
    parts: list[RenderableType] = [Text(headline(plan), style="bold"), Text()]
    if plan.rows:
        parts += [blocks_table(plan, border=border), Text()]
    if plan.race:
        parts.append(race_table(plan, border=border))
        if scaled := scale_text(plan.search, plan.measured_ms):
            parts.append(Text(scaled))
        if note := shared_note(plan):
            parts.append(Text(f"Each: {note}"))
        if hidden := slower_variants(plan):
            parts.append(Text(f"and {hidden} slower variants of these"))
        parts.append(Text())
    rates = throughput(plan)
    lines = [throughput_text(rates)] if rates is not None else []
    lines += [summary_line(plan), *(r[0].upper() + r[1:] for r in remarks(plan))]
    parts += [Text(line) for line in lines if line]
    return Group(*parts)


def plan_text(plan: Plan, width: int | None = None) -> str:
    """Everything as plain ASCII text, for files and pipes.

    Args:
        plan: the plan.
        width: of the text; what `columns` says, if not given.
    """
    console = literal_console(
        file=io.StringIO(), width=width or columns(), color_system=None
    )
    with console.capture() as captured:
        console.print(plan_view(plan, border=box.ASCII))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def print_plan(plan: Plan, console: Console) -> None:
    """Prints a plan: in a terminal with lines and colours, else as plain text."""
    if console.is_terminal:
        console.print(plan_view(plan))
    else:
        console.file.write(plan_text(plan))


# ------------------------------------------------------ collectives of a compiled step

_PATH_PARTS = 2
_MOST_NAMES = 3
_NAME_WIDTH = 60
_STEP = re.compile(r"^jit\([^()]*\)/")
_MERGED = re.compile(r"^\((.*)\)$")


def sites_view(sites: Sequence[CollectiveSite], border: box.Box) -> RenderableType:
    """A table of collectives, most bytes first, and their sum.

    Those of one kind, size and line whose ops differ in numbers alone, as those of
    layers do, stand in one row.
    """
    if not sites:
        return Text("The program has no collectives.")
    table = Table(box=border, title="Collectives", title_justify="left", pad_edge=False)
    table.add_column("collective", no_wrap=True)
    for heading in ("times", "bytes of one", "devices"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("source line")
    table.add_column("op")
    for alike in _alike(sites):
        first = alike[0]
        table.add_row(
            first.kind,
            str(sum(site.count for site in alike)),
            format_bytes(first.bytes),
            str(first.group_size),
            printable(short_path(first.source)) or "-",
            printable(_row_text(alike)) or "-",
        )
    total = sum(site.bytes * site.count for site in sites)
    count = sum(site.count for site in sites)
    return Group(
        Fitted(table),
        Text(
            f"{count} {'collective' if count == 1 else 'collectives'} in one step; "
            f"{format_bytes(total)} on each device together. Bytes of one: the larger "
            "of what a device gives and gets. --json lists each op."
        ),
    )


def _row_text(alike: Sequence[CollectiveSite]) -> str:
    """The ops of a row; how many, where the compiler combined their collectives."""
    text = ops_text([site.scope for site in alike])
    count = max(len(_ops(site.scope)) for site in alike)
    return f"{count} ops combined: {text}" if count > 1 else text


def _alike(sites: Sequence[CollectiveSite]) -> list[list[CollectiveSite]]:
    """Collectives that a table shows in one row; the order stays."""
    found: dict[tuple, list[CollectiveSite]] = {}
    for site in sites:
        ops = ops_text([site.scope])
        key = (
            site.kind,
            site.bytes,
            site.group_size,
            site.source,
            re.sub(r"\d+([-,.]+\d+)*", "#", ops),
        )
        found.setdefault(key, []).append(site)
    rows = [*found.values()]
    return sorted(rows, key=lambda row: -sum(site.bytes * site.count for site in row))


def sites_text(sites: Sequence[CollectiveSite]) -> str:
    """The table as plain ASCII text, as wide as `columns` says."""
    console = literal_console(file=io.StringIO(), width=columns(), color_system=None)
    with console.capture() as captured:
        console.print(sites_view(sites, box.ASCII))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join(lines) + "\n"


def sites_data(sites: Sequence[CollectiveSite]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [asdict(site) for site in sites]


def short_path(source: str) -> str:
    """The end of a path: ``models/mlp.py:12``."""
    return "/".join(PurePath(source).parts[-_PATH_PARTS:]) if source else ""


def ops_text(scopes: Sequence[str]) -> str:
    """The ops of some name stacks in short: ``Block_0-11/Dense_0/dot_general``.

    XLA names an op that it merged of several ``jit(step)/(a:b:c)``.
    """
    ops = [op for scope in scopes for op in _ops(scope)]
    names = merged_alike([_op_text(op) for op in dict.fromkeys(ops) if op])
    names = [elided(name, _NAME_WIDTH) for name in names]
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _ops(scope: str) -> list[str]:
    """The ops that a name stack is of: several, if XLA merged them."""
    inside = _STEP.sub("", scope)
    merged = _MERGED.match(inside)
    return merged[1].split(":") if merged and ":" in merged[1] else [inside]


def _op_text(op: str) -> str:
    """An op's place in the user's model; what differentiation made of it says so."""
    return op_path(op) + (" (backward)" if "transpose(" in op else "")
