"""Explains a plan: of each segment its blocks, the reason and the runner-up."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cfp.errors import CfpError
from cfp.plan.figures import OptionFigures
from cfp.plan.plan import Plan
from cfp.printable import printable, span_text
from cfp.units import format_bytes
from cfp.view import words
from cfp.view.console import wrapped
from cfp.view.remarks import remarks
from cfp.view.rows import (
    BlockView,
    SegmentView,
    candidates_of,
    chosen_text,
    merged_moves,
    segments_of,
)
from cfp.view.words import elided, few, strategy_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The reason for a segment's choice, and the choice that comes next.

    Attributes:
        taken, runner_up: None where they were not measured.
    """

    why: str
    taken: OptionFigures | None = None
    runner_up: OptionFigures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Segments that are alike, in words.

    Attributes:
        blocks: the heading of each block, with its facts by label.
        choice: facts about the choice by label.
    """

    title: str
    blocks: tuple[tuple[str, dict[str, str]], ...]
    choice: dict[str, str]


def choice_of(plan: Plan, segment: int) -> Choice:
    """Explains the choice for a segment, with the runner-up."""
    figures, why = plan.figures, words.unsearched_text(plan)
    if figures is None or why:
        return Choice(why=why)
    known = words.known_how(plan)
    taken = figures.taken(segment)
    ran = [one for one in candidates_of(plan) if one.row.samples_ms]
    raced = "it won the race" if len(ran) > 1 else "it is part of what was chosen"
    if taken is None:
        return Choice(why=f"{raced}; this strategy was not {known} by itself")
    options = figures.kinds[figures.segment_kinds[segment]].options
    budget = figures.budget_bytes
    runner = min(
        (option for option in options if option is not taken),
        key=lambda o: (_is_too_large(o, budget), o.step_ms, o.memory_bytes),
        default=None,
    )
    if runner is None:
        return Choice(why=f"it is the only strategy that was {known}", taken=taken)
    gain_ms = runner.step_ms - taken.step_ms
    why = f"the fastest of {len(options)} {known}"
    if any(one.step_ms < taken.step_ms - words.SAME_MS for one in options):
        why = f"the fastest that fits of {len(options)} {known}"
    if gain_ms < -words.SAME_MS and not _is_too_large(runner, budget):
        why = f"{raced}, though another strategy was predicted to be faster"
    elif gain_ms <= words.SAME_MS and taken.memory_bytes == runner.memory_bytes:
        why += ", in a tie with the runner-up"
    return Choice(why=why, taken=taken, runner_up=runner)


def _is_too_large(option: OptionFigures, budget_bytes: int | None) -> bool:
    return budget_bytes is not None and option.memory_bytes > budget_bytes


def explained(plan: Plan, wanted: set[int] | None = None) -> Iterator[Explained]:
    """Explains segments in order.

    Args:
        wanted: the blocks to explain; all, if not given.
    """
    for segment in segments_of(plan):
        shown = [
            one
            for one in segment.blocks
            if wanted is None or not wanted.isdisjoint(one.members)
        ]
        if shown:
            yield Explained(
                title=_title(plan, segment),
                blocks=tuple(map(_block, shown)),
                choice=_choice_facts(plan, choice_of(plan, segment.indices[0])),
            )


def _title(plan: Plan, segment: SegmentView) -> str:
    span, count = span_text([*segment.indices]), len(segment.indices)
    title = f"Segments {span} ({count} alike)" if count > 1 else f"Segment {span}"
    title += f": {words.parameters_text(segment.parameters)}"
    if segment.time_ms is not None:
        title += f"; {segment.time_ms:.3f} ms each, {words.known_how(plan)}"
    return title


def _block(block: BlockView) -> tuple[str, dict[str, str]]:
    row = block.row
    where = f"  at {row.source}" if row.source else ""
    where += f", {row.repeats} times in one step" if row.repeats > 1 else ""
    operands = " x ".join(map(words.tensor_text, row.operands))
    moves = "; ".join(map(words.move_text, merged_moves(row.moves)))
    return elided(block.name) + where, {
        "sharded": block.sharded,
        "tensors": f"{operands} -> {words.tensor_text(row.result)}",
        "collectives": "; ".join([moves or "none", *block.exceptions]),
    }


def _choice_facts(plan: Plan, choice: Choice) -> dict[str, str]:
    taken, runner = choice.taken, choice.runner_up
    if taken is None or runner is None:
        return {"why": choice.why}
    unlike = strategy_text(runner.strategy, taken.strategy)
    budget = plan.figures.budget_bytes if plan.figures else None
    return {
        "why": (
            f"{choice.why}: predicted step {taken.step_ms:.3f} ms, memory "
            f"{format_bytes(taken.memory_bytes)}, {taken.name}"
        ),
        "runner-up": (
            f"{runner.name}: predicted step {runner.step_ms:.3f} ms "
            f"({_change(runner.step_ms, taken.step_ms)}), memory "
            f"{format_bytes(runner.memory_bytes)} "
            f"({_change(runner.memory_bytes, taken.memory_bytes)})"
            f"{', which does not fit' * _is_too_large(runner, budget)}"
            + (
                f"; unlike the choice: {unlike}"
                if unlike
                else "; the same as the choice"
            )
        ),
    }


def _change(now: float, before: float) -> str:
    if not before:
        return "new"
    share = now / before - 1.0
    return "the same" if abs(share) < 0.0005 else f"{share:+.1%}"


def facts(plan: Plan) -> Iterator[str]:
    """Sentences on all of a plan, with those of its remarks."""
    yield f"Chosen: {chosen_text(plan)}."
    if any(move.time_ms is not None for row in plan.rows for move in row.moves):
        yield (
            "Times of collectives: each launched by itself; in a segment's time those "
            "that are combined may share a launch."
        )
    figures = plan.figures
    for one in sorted(figures.left if figures else (), key=lambda o: bool(o.kernel)):
        how = f"not by {one.kernel}" if one.kernel else "as written"
        where = f", at {one.source}" if one.source else ""
        times = f"{one.count} times: " if one.count > 1 else ""
        yield f"Attention {how}{where}: {times}{one.reason}."
    if not plan.rows:
        yield "The plan has no blocks: the step has no contraction to shard."
    yield from (f"{words.sentence(remark)}." for remark in remarks(plan))


def explain_text(plan: Plan, block: str | None = None) -> str:
    """Explains the plan, or one of its blocks, as wide as `columns` says.

    Args:
        block: part of a block's name, or a pattern with ``*``; all, if not given.

    Raises:
        CfpError: no block has such a name.
    """
    wanted = None if block is None else _wanted(plan, block)
    lines = [words.headline(plan), *(facts(plan) if wanted is None else ())]
    for segment in explained(plan, wanted):
        lines += ["", segment.title]
        for name, about in segment.blocks:
            lines.append(f"  {name}")
            lines += [f"    {label}: {text}" for label, text in about.items()]
        lines += [f"  {label}: {text}" for label, text in segment.choice.items()]
    return "\n".join(map(wrapped, lines)) + "\n"


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
        names: Sequence[str] = [elided(one.name) for one in shown]
        raise CfpError(
            f"No block has {block!r} in its name. Blocks: "
            f"{printable(few(names, most=12))}."
        )
    return found


def explain_data(plan: Plan, block: str | None = None) -> dict[str, Any]:
    """The same as plain data; the plan's own file has the numbers."""
    wanted = None if block is None else _wanted(plan, block)
    segments = [asdict(one) for one in explained(plan, wanted)]
    return {"plan": plan.winner, "facts": [*facts(plan)], "segments": segments}
