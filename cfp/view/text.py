"""Plans as text: in a few lines, and as tables.

Everything stands in the plan itself, so that a saved plan prints like a fresh one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType

from cfp.plan.parts import Detail, roles_text
from cfp.plan.plan import Plan
from cfp.printable import counted, distinct_ends, span_text
from cfp.view import words
from cfp.view.console import plain_text, print_view, sheet, wrapped
from cfp.view.remarks import remarks
from cfp.view.rows import (
    SegmentView,
    blocks_rows,
    chosen_text,
    race_rows,
    segments_of,
    update_texts,
    variants_rows,
)
from cfp.view.throughput import throughput
from cfp.view.words import few

_MOST_SEGMENTS = 4  # as many as a short text has room for


def short_text(plan: Plan) -> str:
    """Returns the most important facts about a plan in a few lines."""
    figures = "; ".join(words.figure_texts(plan))
    lines = [words.title(plan), figures or "neither predicted nor measured"]
    lines += [f"{rates}"] if (rates := throughput(plan)) is not None else []
    lines.append(f"chosen: {chosen_text(plan)}")
    segments = segments_of(plan)
    lines += map(_segment_text, segments[:_MOST_SEGMENTS])
    if (more := len(segments) - _MOST_SEGMENTS) > 0:
        lines.append(f"and {counted(more, 'other segment', 'other segments')}")
    sharded = sum(map(any, plan.arg_specs))
    verb = "is" if sharded == 1 else "are"
    lines.append(f"arguments: {sharded} of {len(plan.arg_specs)} {verb} sharded")
    lines += [*_variant_texts(plan), *remarks(plan)]
    lines.append('more: plan.save("plan.json"), then: cfp show plan.json')
    folded = (wrapped(f"  {line}", break_long_words=False) for line in lines)
    return "\n".join(folded).removeprefix("  ")


def _segment_text(segment: SegmentView) -> str:
    """Describes briefly how the blocks of some segments are sharded."""
    modules: list[str] = []
    by_roles: dict[str, list[str]] = {}
    alike = Counter(
        (block.path, roles_text(block.row.strategy, Detail.ROLES))
        for block in segment.blocks
        if not block.row.updates
    )
    ends = distinct_ends([path for path, _ in alike])
    for ((path, roles), count), end in zip(alike.items(), ends, strict=True):
        *outer, _ = path.split("/")
        numbers = (i for i, part in enumerate(outer) if part[-1:].isdigit())
        module = "/".join(outer[: next(numbers, 0) + 1])  # params/blocks/0
        modules += [module] if module else []
        by_roles.setdefault(roles, []).append(end + f" ({count} blocks)" * (count > 1))
    parts = [f"{few(names)} {roles}" for roles, names in by_roles.items()]
    parts = [few(parts, "; ")] if parts else []
    if updates := [block for block in segment.blocks if block.row.updates]:
        parts.append(" ".join(update_texts(updates)[:2]))
    where = f" ({few(modules)})" if modules else ""
    stored = words.parameters_text(segment.parameters)
    text = f"segment {span_text([*segment.indices])}{where}"
    return f"{text}: {'; '.join([*parts, stored])}"


def _variant_texts(plan: Plan) -> Iterator[str]:
    for one in plan.figures.variants if plan.figures else ():
        this = " (this one)" * one.taken
        if one.step_ms is not None:
            yield f"variant {one.name}: {one.step_ms:.3f} ms{this}"
        elif one.estimated_ms is not None:
            yield f"variant {one.name}: {one.estimated_ms:.3f} ms, estimated{this}"
        else:
            yield f"variant {one.name}: {one.note or 'not timed'}{this}"


def plan_view(plan: Plan, *, border: box.Box = box.ROUNDED) -> RenderableType:
    """Renders a plan's tables for a rich console."""
    tables = (blocks_rows(segments_of(plan)), variants_rows(plan), race_rows(plan))
    lines = [str(throughput(plan) or ""), words.summary_line(plan)]
    lines += map(words.sentence, remarks(plan))
    return sheet(border, words.headline(plan), tables, lines)


def plan_text(plan: Plan, width: int | None = None) -> str:
    """Renders a plan's tables as plain ASCII text, for files and pipes."""
    return plain_text(plan_view(plan, border=box.ASCII), width)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints a plan; see `print_view`."""
    print_view(lambda border: plan_view(plan, border=border), console)
