"""A plan as tables: block by block, then the race, then what it took to find.

Everything stands in the plan itself, so that a saved plan prints like a fresh one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cfp.plan import Plan
from cfp.plan_parts import PlanRow, RaceRow
from cfp.units import format_bytes

PLAIN_WIDTH = 160

_NUMBER = re.compile(r"\d+")
_SIZE = re.compile(r" [\d.]+ (B|[KMG]iB)")
STORAGE_WORDS = {
    "used": "as used",
    "optimizer": "optimizer sharded",
    "sharded": "sharded",
}


@dataclass(frozen=True, slots=True)
class Repeat:
    """Segments that a table shows once.

    Attributes:
        first: index of the first segment.
        period: how many segments make up one repeat.
        count: how often they stand there, back to back.
        rows: the blocks of each repeat, repeat by repeat.
    """

    first: int
    period: int
    count: int
    rows: tuple[tuple[PlanRow, ...], ...]


def collapse(rows: Sequence[PlanRow]) -> list[Repeat]:
    """Finds segments that are alike and stand back to back.

    Alike are segments of one kind whose blocks are sharded and stored alike.
    """
    segments = [tuple(found) for _, found in groupby(rows, key=lambda row: row.segment)]
    marks = [tuple(_mark(row) for row in segment) for segment in segments]
    repeats = []
    at = 0
    while at < len(segments):
        period, count = _longest_repeat(marks, at)
        parts = tuple(
            tuple(row for s in segments[i : i + period] for row in s)
            for i in range(at, at + period * count, period)
        )
        repeats.append(Repeat(segments[at][0].segment, period, count, parts))
        at += period * count
    return repeats


def _mark(row: PlanRow) -> tuple:
    return row.kind, row.op, row.sharded, row.storage


def _longest_repeat(marks: Sequence[tuple], at: int) -> tuple[int, int]:
    """(period, count) of the repeat that covers most from here on; (1, 1) if none."""
    best = (1, 1)
    for period in range(1, (len(marks) - at) // 2 + 1):
        count = 1
        unit = marks[at : at + period]
        while marks[at + period * count : at + period * (count + 1)] == unit:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def merged_name(names: Sequence[str]) -> str:
    """One name for the same block of several segments: ``layer_0-3/mlp/up``."""
    shapes = {_NUMBER.sub("#", name) for name in names}
    if len(shapes) > 1:
        return f"{names[0]} ... {names[-1]}"
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    spans = iter([_span(list(column)) for column in columns])
    return _NUMBER.sub(lambda _: next(spans), names[0])


def _span(numbers: list[int]) -> str:
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return str(distinct[0])
    step = distinct[1] - distinct[0]
    if distinct == list(range(distinct[0], distinct[-1] + 1, step)):
        if step == 1:
            return f"{distinct[0]}-{distinct[-1]}"
        if len(distinct) > 3:
            return f"{distinct[0]},{distinct[1]}..{distinct[-1]}"
    return ",".join(map(str, distinct))


# --------------------------------------------------------------------------- tables


def blocks_table(plan: Plan, *, border: box.Box = box.ROUNDED) -> Table:
    """The blocks, repeated segments once."""
    table = Table(box=border, title="Blocks", title_justify="left", pad_edge=False)
    table.add_column("segment", no_wrap=True)
    table.add_column("block", overflow="fold")
    table.add_column("sharded")
    table.add_column("parameters")
    table.add_column("collectives that follow")
    table.add_column("segment ms", justify="right", no_wrap=True)
    prefix = _common_prefix([row.name for row in plan.rows])
    for repeat in collapse(plan.rows):
        for place, row in enumerate(repeat.rows[0]):
            new_segment = place == 0 or row.segment != repeat.rows[0][place - 1].segment
            twins = [part[place] for part in repeat.rows]
            table.add_row(
                _segment_text(repeat, row.segment) if new_segment else "",
                merged_name([twin.name.removeprefix(prefix) for twin in twins]),
                row.sharded,
                STORAGE_WORDS.get(row.storage, row.storage) if new_segment else "",
                _collectives(twins),
                _segment_time(row, repeat.count) if new_segment else "",
            )
        table.add_section()
    return table


def _collectives(twins: Sequence[PlanRow]) -> str:
    """What most twins call for, and what the others do: the first of a stack, say.

    Small differences in size are those of tensors that belong to no block for sure.
    """
    kinds: dict[str, list[PlanRow]] = {}
    for twin in twins:
        kinds.setdefault(_SIZE.sub("", twin.collectives), []).append(twin)
    common, *others = sorted(
        kinds.values(), key=lambda group: (-len(group), -group[-1].segment)
    )
    texts = [common[0].collectives]
    for group in others:
        where = _span([row.segment for row in group])
        texts.append(f"segment {where}: {group[0].collectives}")
    return "; ".join(texts)


def _segment_text(repeat: Repeat, segment: int) -> str:
    if repeat.count == 1:
        return str(segment)
    members = [segment + i * repeat.period for i in range(repeat.count)]
    return f"{_span(members)} ({repeat.count} x)"


def _segment_time(row: PlanRow, count: int) -> str:
    if row.segment_ms is None:
        return "-"
    times = f"{count} x " if count > 1 else ""
    return f"{times}{row.segment_ms:.3g}"


def _common_prefix(names: Sequence[str]) -> str:
    """The module that all blocks stand in, with its slash, or nothing."""
    first = {name.partition("/")[0] for name in names}
    if len(first) == 1 and all("/" in name for name in names):
        return f"{first.pop()}/"
    return ""


def race_table(plan: Plan, *, border: box.Box = box.ROUNDED) -> Table:
    """The finalists, the fastest first; the winner is marked."""
    table = Table(box=border, title="Race", title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    for heading in ("predicted ms", "measured ms", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note")
    for row in best_variants(plan):
        won = row.name == plan.winner
        table.add_row(
            "*" if won else "",
            row.name,
            _ms(row.predicted_ms),
            _ms(row.time_ms),
            format_bytes(row.peak_bytes) if row.peak_bytes else "-",
            row.note or _same_as(row, plan.race),
            style="bold" if won else None,
        )
    return table


def scale_text(plan: Plan) -> str:
    """Of which part of the step the times of the race are, if not of all of it."""
    if "segments_raced" not in plan.search:
        return ""
    raced, total = plan.search["segments_raced"], plan.search["segments"]
    whole = "-" if plan.measured_ms is None else f"{plan.measured_ms:.1f} ms"
    return (
        f"Timed with {raced:.0f} of {total:.0f} segments, since the others repeat "
        f"these, and scaled to all.\nThe winner, timed whole: {whole}."
    )


def best_variants(plan: Plan) -> list[RaceRow]:
    """Of each finalist its fastest variant, the fastest finalist first.

    A variant's name is the finalist's, a comma, and in what it differs.
    """
    ranked = sorted(
        plan.race,
        key=lambda row: (row.name != plan.winner, row.time_ms or float("inf")),
    )
    found: dict[str, RaceRow] = {}
    for row in ranked:
        found.setdefault(row.name.partition(", ")[0], row)
    return sorted(found.values(), key=lambda row: row.time_ms or float("inf"))


def _same_as(row: RaceRow, race: Sequence[RaceRow]) -> str:
    """Finalists that came out as one program were run once, and share its samples."""
    others = [
        other.name
        for other in race
        if other.name.partition(", ")[0] != row.name.partition(", ")[0]
        and row.samples_ms
        and other.samples_ms == row.samples_ms
    ]
    return f"the same program as {', '.join(others)}" if others else ""


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# --------------------------------------------------------------------------- lines


def headline(plan: Plan) -> str:
    """The plan in one sentence."""
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh_axes)
    kind = plan.environment.get("device_kind", "")
    parts = [
        f"Plan {plan.winner!r} for a mesh {mesh}" + (f" of {kind}" if kind else "")
    ]
    if plan.measured_ms is not None:
        parts.append(f"{plan.measured_ms:.3f} ms per step, measured")
    if plan.predicted_ms is not None:
        parts.append(f"{plan.predicted_ms:.3f} ms predicted")
    if plan.peak_bytes is not None:
        parts.append(f"{format_bytes(plan.peak_bytes)} on each device")
    return "; ".join(parts)


def summary_line(plan: Plan) -> str:
    """What was measured and how long each pass took; "" if nothing was."""
    search = plan.search
    parts = []
    if "strategies_measured" in search:
        counts = (
            f"{search['strategies_measured']:.0f} strategies measured, "
            f"{search.get('strategies_cached', 0):.0f} from the cache"
        )
        if search.get("strategies_failed"):
            counts += f", {search['strategies_failed']:.0f} failed"
        parts.append(counts)
    if "gap" in search:
        parts.append(gap_text(search["gap"]))
    seconds = [
        f"{name.removesuffix('_seconds')} {value:.1f} s"
        for name, value in search.items()
        if name.endswith("_seconds")
    ]
    if seconds:
        cached = ", from the cache" if search.get("race_cached") else ""
        parts.append(", ".join(seconds) + cached)
    return "; ".join(parts)


def gap_text(gap: float) -> str:
    """By how much something that was not measured could be faster."""
    return f"gap {100 * gap:.1f}%"


# ----------------------------------------------------------------------- the whole


def plan_view(plan: Plan, *, border: box.Box = box.ROUNDED) -> RenderableType:
    """Everything, for a rich console."""
    parts: list[RenderableType] = [Text(headline(plan), style="bold"), Text()]
    if plan.rows:
        parts += [blocks_table(plan, border=border), Text()]
    if plan.race:
        parts.append(race_table(plan, border=border))
        if scaled := scale_text(plan):
            parts.append(Text(scaled))
        hidden = len(plan.race) - len(best_variants(plan))
        if hidden:
            parts.append(Text(f"and {hidden} slower variants of these"))
        parts.append(Text())
    line = summary_line(plan)
    if line:
        parts.append(Text(line))
    return Group(*parts)


def plan_text(plan: Plan, width: int = PLAIN_WIDTH) -> str:
    """Everything as plain ASCII text, for files and pipes."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
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
