"""Explains a plan: how it was chosen, its blocks, and the alternatives to each."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box

from cfp.errors import CfpError, known_names
from cfp.plan.plan import Plan
from cfp.printable import printable, span_text
from cfp.view import words
from cfp.view.console import plain_text, wrapped
from cfp.view.remarks import remarks
from cfp.view.rows import (
    BlockView,
    chosen_text,
    merged_moves,
    segments_of,
    strategies_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Segments that are alike, in words.

    Attributes:
        blocks: heading of each block, with its facts by label.
        kind: number of the segments' kind in the plan's figures; None without figures.
    """

    title: str
    blocks: tuple[tuple[str, dict[str, str]], ...]
    kind: int | None


def explained(plan: Plan, wanted: set[int] | None = None) -> Iterator[Explained]:
    """Explains segments in order.

    Args:
        wanted: the blocks to explain; by default all.
    """
    kinds = plan.figures.segment_kinds if plan.figures else ()
    for segment in segments_of(plan):
        shown = [
            one
            for one in segment.blocks
            if wanted is None or not wanted.isdisjoint(one.members)
        ]
        if not shown:
            continue
        span, count = span_text([*segment.indices]), len(segment.indices)
        title = f"Segments {span} ({count} alike)" if count > 1 else f"Segment {span}"
        title += f": {words.parameters_text(segment.parameters)}"
        if segment.time_ms is not None:
            title += f"; {segment.time_ms:.3f} ms each, {words.known_how(plan)}"
        yield Explained(
            title=title,
            blocks=tuple(map(_block, shown)),
            kind=kinds[segment.indices[0]] if kinds else None,
        )


def _block(block: BlockView) -> tuple[str, dict[str, str]]:
    row = block.row
    where = f"  at {row.source}" if row.source else ""
    where += f", {row.repeats} times in one step" if row.repeats > 1 else ""
    operands = " x ".join(map(words.tensor_text, row.operands))
    moves = "; ".join(map(words.move_text, merged_moves(row.moves)))
    return words.elided(block.name) + where, {
        "sharded": block.sharded,
        "tensors": f"{operands} -> {words.tensor_text(row.result)}",
        "collectives": "; ".join([moves or "none", *block.exceptions]),
    }


def facts(plan: Plan) -> Iterator[str]:
    """Lists sentences about the whole plan, its remarks included."""
    yield f"Chosen: {chosen_text(plan)}."
    if why := words.unsearched_text(plan):
        yield f"No strategies to compare: {why}."
    if any(move.time_ms is not None for row in plan.rows for move in row.moves):
        yield (
            "Times of collectives: each launched by itself; in a segment's time those "
            "that are combined may share a launch."
        )
    yield from (f"{words.sentence(remark)}." for remark in remarks(plan))


def explain_text(plan: Plan, block: str | None = None) -> str:
    """Explains a plan, or one of its blocks, ``columns`` characters wide.

    Args:
        block: part of a block's name, or a pattern with ``*``; by default all blocks.

    Raises:
        CfpError: no block has such a name.
    """
    wanted = None if block is None else _wanted(plan, block)
    lines = [words.headline(plan), *(facts(plan) if wanted is None else ())]
    parts, kinds = ["\n".join(map(wrapped, lines))], set()
    for segment in explained(plan, wanted):
        lines = [segment.title]
        for name, about in segment.blocks:
            lines.append(f"  {name}")
            lines += [f"    {label}: {text}" for label, text in about.items()]
        parts.append("\n".join(map(wrapped, lines)))
        if segment.kind not in kinds and segment.kind is not None:
            made = strategies_rows(plan, segment.kind)
            notes = "\n".join(map(wrapped, made.notes))
            parts.append(f"{plain_text(made.table(box.ASCII))}{notes}")
        kinds.add(segment.kind)
    return "\n\n".join(parts) + "\n"


def _wanted(plan: Plan, block: str) -> set[int]:
    """Finds blocks by their names, or by those of repeated ones: layer_0-3."""
    sought = block.casefold()
    pattern = sought if "*" in sought else f"*{sought}*"

    def is_it(name: str) -> bool:
        known = name.casefold()
        return known == sought or fnmatch.fnmatchcase(known, pattern)

    shown = [block for segment in segments_of(plan) for block in segment.blocks]
    found = {row.block for row in plan.rows if is_it(row.name)}
    found = found or {i for one in shown if is_it(one.name) for i in one.members}
    if not found:
        names = known_names(block, (printable(words.elided(b.name)) for b in shown))
        raise CfpError(f"No block has {block!r} in its name. {names}")
    return found
