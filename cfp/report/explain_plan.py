"""Explanation of a plan, block by block, as lines of text.

Everything stands in the plan itself, so that a saved plan explains itself.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import TextWrapper
from typing import Any

from cfp.errors import CfpError
from cfp.plan.figures import BlockFigures, OptionFigures
from cfp.plan.parts import PlanRow
from cfp.plan.plan import Plan
from cfp.plan.text import (
    Repeat,
    collapse,
    headline,
    merged_name,
    roles_text,
    span_text,
    storage_name,
    storage_text,
    why_text,
)
from cfp.plan.words import (
    elided,
    has_raced,
    known_how,
    move_text,
    runner_up,
    surprise_text,
    tensor_text,
    too_large_text,
)
from cfp.printable import columns, printable
from cfp.units import format_bytes

_NAMES_SHOWN = 12
_LIKE = 0.6  # of 1: as much of two words is spelt alike
_WORDS_WIDTH = 300


def explain_text(plan: Plan, block: str | None = None) -> str:
    """Explains the plan, or one of its blocks, as wide as `columns` says.

    Args:
        plan: the plan.
        block: part of a block's name, or a pattern with ``*``; all, if not given.

    Raises:
        CfpError: no block has such a name.
    """
    repeats = collapse(plan)
    wanted = _wanted(plan, block)
    lines = list(_overall(plan)) if block is None else [headline(plan)]
    for repeat in repeats:
        if any(row.block in wanted for part in repeat.rows for row in part):
            lines += ["", *_repeat_lines(plan, repeat, wanted)]
    if not plan.rows:
        lines.append("The plan has no blocks: the step has no contraction to shard.")
    return "\n".join(wrapped(line) for line in lines) + "\n"


def wrapped(line: str) -> str:
    """A line that is folded; what follows is indented more than its start."""
    text = printable(line)
    indent = len(text) - len(text.lstrip()) + 2
    wrap = TextWrapper(
        width=columns(),
        initial_indent=" " * (indent - 2),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
    return wrap.fill(text.lstrip())


def _wanted(plan: Plan, block: str | None) -> set[int]:
    if block is None:
        return {row.block for row in plan.rows}
    sought = block.casefold()
    pattern = sought if "*" in sought else f"*{sought}*"

    def is_it(name: str) -> bool:
        known = name.casefold()
        return known == sought or fnmatch.fnmatchcase(known, pattern)

    found = {row.block for row in plan.rows if is_it(row.name)}
    if not found:  # Perhaps as repeated ones are shown: layer_0-3.
        found = {
            twin.block
            for repeat in collapse(plan)
            for twins in zip(*repeat.rows, strict=True)
            if is_it(merged_name([twin.name for twin in twins]))
            for twin in twins
        }
    if not found:
        names = [*dict.fromkeys(row.name for row in plan.rows)]
        close = _nearest(sought, names)
        shown = ", ".join(map(elided, (close or names)[:_NAMES_SHOWN]))
        more = ", ..." if len(close or names) > _NAMES_SHOWN else ""
        raise CfpError(
            f"No block has {block!r} in its name. "
            f"{'Nearest' if close else 'Blocks'}: {printable(shown)}{more}."
        )
    return found


def _nearest(sought: str, names: Sequence[str]) -> list[str]:
    """The names of which some part is spelt like what is sought, the nearest first."""

    def likeness(name: str) -> float:
        parts = {name, *name.split("/")}
        return max(
            difflib.SequenceMatcher(None, sought, part.casefold()).ratio()
            for part in parts
        )

    alike = {name: likeness(name) for name in names}
    return sorted((n for n in names if alike[n] >= _LIKE), key=lambda n: -alike[n])


# ---------------------------------------------------------------------------- the plan


def _overall(plan: Plan) -> Iterator[str]:
    yield headline(plan)
    if why := why_text(plan):
        yield why
    yield from memory_lines(plan)
    yield from attention_lines(plan)


def attention_lines(plan: Plan) -> Iterator[str]:
    """The attentions that no kernel computes, the kernels that cannot, and others.

    Others are the step's own kernels that are sharded, and loops that communicate.
    """
    for one in plan.figures.left if plan.figures else ():
        times = f"{one.count} times: " if one.count > 1 else ""
        where = f", at {one.source}" if one.source else ""
        what = f"{one.name.capitalize()} as written{where}"
        yield f"{what}: {times}{one.reason}."
    for one in plan.figures.refused if plan.figures else ():
        times = f"{one.count} times: " if one.count > 1 else ""
        where = f"Attention not by {one.kernel}, at {one.source}"
        yield f"{where}: {times}{one.reason}."
    for text in plan.figures.kernels if plan.figures else ():
        yield f"Kernel that is sharded: {text}."
    for text in plan.figures.loops if plan.figures else ():
        yield f"Communicated in a loop that computes no products: {text}."


def memory_lines(plan: Plan) -> Iterator[str]:
    """Describes memory and the budget."""
    if plan.figures is None or "adapted" in plan.search:
        return
    budget, peak = plan.figures.budget_bytes, plan.peak_bytes
    limit = "no limit" if budget is None else f"at most {format_bytes(budget)}"
    needs = f"{format_bytes(peak)} as compiled, " if peak else ""
    yield f"Memory: {needs}{limit} on each device."


# ---------------------------------------------------------------------------- segments


def _repeat_lines(plan: Plan, repeat: Repeat, wanted: set[int]) -> Iterator[str]:
    first = repeat.rows[0]
    for segment in dict.fromkeys(row.segment for row in first):
        places = [i for i, row in enumerate(first) if row.segment == segment]
        shown = [
            place
            for place in places
            if any(part[place].block in wanted for part in repeat.rows)
        ]
        if not shown:
            continue
        members = [segment + i * repeat.period for i in range(repeat.count)]
        yield _segment_title(plan, members)
        for place in shown:
            yield from _block_lines(plan, [part[place] for part in repeat.rows])
        yield from _choice_lines(plan, segment)


def _segment_title(plan: Plan, members: list[int]) -> str:
    word = f"Segment {members[0]}" if len(members) == 1 else ""
    title = word or f"Segments {span_text(members)} ({len(members)} alike)"
    time_ms = plan.segments[members[0]].time_ms
    stored = f"parameters {storage_text(plan.segments[members[0]])}"
    if time_ms is None:
        return f"{title}: {stored}"
    time = f"{title}: {stored}; {time_ms:.3f} ms each, {known_how(plan)}"
    # The middle of a run stands for it, as for its blocks.
    shown = members[len(members) // 2]
    blocks = {found.block for found in plan.rows if found.segment == shown}
    drawn = plan.figures.blocks if plan.figures else ()
    moves = [move for one in drawn if one.block in blocks for move in one.moves]
    alone_ms = sum(move.time_ms or 0.0 for move in moves)
    if alone_ms > time_ms:
        time += (
            f" (its collectives one after another {alone_ms:.3f} ms: some are combined "
            "or run beside others)"
        )
    return time


def _block_lines(plan: Plan, twins: Sequence[PlanRow]) -> Iterator[str]:
    # The middle of a run stands for it: the first and the last have other neighbours.
    row = twins[len(twins) // 2]
    figures = _figures_of(plan, row.block)
    where = f"  at {figures.source}" if figures and figures.source else ""
    if row.repeats > 1:
        where += f", {row.repeats} times in one step"
    yield f"  {elided(merged_name([twin.name for twin in twins]))}{where}"
    yield f"    sharded: {roles_text(row.strategy)}"
    if figures is None:
        yield f"    then: {row.collectives}"
        return
    operands = " x ".join(map(tensor_text, figures.operands))
    yield f"    tensors: {operands} -> {tensor_text(figures.result)}"
    moves = "; ".join(map(move_text, figures.moves))
    yield f"    collectives: {moves or 'none'}"


def _figures_of(plan: Plan, block: int) -> BlockFigures | None:
    blocks = plan.figures.blocks if plan.figures else ()
    return next((found for found in blocks if found.block == block), None)


def _choice_lines(plan: Plan, segment: int) -> Iterator[str]:
    """Explains a segment's strategy, with the cost of the runner-up."""
    figures = plan.figures
    if "adapted" in plan.search:
        yield "  why: carried over from the plan of another program"
        return
    if figures is None or not figures.kinds:
        yield "  why: nothing else was measured; the strategy was asked for by name"
        return
    kind = figures.kinds[figures.segment_kinds[segment]]
    taken = figures.taken(segment)
    if taken is None:
        how = "it won the race" if has_raced(plan) else "it is part of the choice"
        yield f"  why: {how}; this strategy was not measured by itself"
        return
    others = [option for option in kind.options if option is not taken]
    if not others:
        yield "  why: it is the only strategy that was measured"
        return
    runner = runner_up(kind.options, taken, figures.budget_bytes)
    why = surprise_text(taken, runner, has_raced(plan))
    if not why:
        why = f"the fastest of {len(kind.options)} {known_how(plan)}"
    yield (
        f"  why: {why}: predicted step {taken.step_ms:.3f} ms, memory "
        f"{format_bytes(taken.memory_bytes)}, {taken.name}"
    )
    yield (
        f"  runner-up: {runner.name}: predicted step {runner.step_ms:.3f} ms "
        f"({_change(runner.step_ms, taken.step_ms)}), memory "
        f"{format_bytes(runner.memory_bytes)} "
        f"({_change(runner.memory_bytes, taken.memory_bytes)})"
        f"{too_large_text(runner, figures.budget_bytes)}; "
        f"{elided(runner.words, _WORDS_WIDTH)}"
    )


def _change(now: float, before: float) -> str:
    if not before:
        return "new"
    share = now / before - 1.0
    return "the same" if abs(share) < 0.0005 else f"{share:+.1%}"


# -------------------------------------------------------------------------------- data


def explain_data(plan: Plan, block: str | None = None) -> dict[str, Any]:
    """The same as plain data."""
    wanted = _wanted(plan, block)
    figures = plan.figures
    rows = []
    for row in plan.rows:
        if row.block not in wanted:
            continue
        drawn = _figures_of(plan, row.block)
        taken = figures.taken(row.segment) if figures else None
        runner = None
        if figures and taken:
            options = figures.kinds[figures.segment_kinds[row.segment]].options
            if len(options) > 1:
                runner = runner_up(options, taken, figures.budget_bytes)
        rows.append(
            {
                "block": row.name,
                "segment": row.segment,
                "source": drawn.source if drawn else "",
                "sharded": roles_text(row.strategy),
                "storage": storage_name(plan.segments[row.segment]),
                "repeats": row.repeats,
                "collectives": [
                    {
                        "kind": move.kind,
                        "axes": move.axes,
                        "count": move.count,
                        "total_bytes": move.total_bytes,
                        "time_ms": move.time_ms,
                    }
                    for move in (drawn.moves if drawn else ())
                ],
                "taken": _option_data(taken),
                "runner_up": _option_data(runner),
            }
        )
    left = [asdict(one) for one in figures.left] if figures else []
    refused = [asdict(one) for one in figures.refused] if figures else []
    return {
        "plan": plan.winner,
        "measured_ms": plan.measured_ms,
        "attentions_as_written": left,
        "kernels_refused": refused,
        "blocks": rows,
    }


def _option_data(option: OptionFigures | None) -> dict[str, Any] | None:
    if option is None:
        return None
    return {
        "name": option.name,
        "in_words": option.words,
        "segment_ms": option.segment_ms,
        "step_ms": option.step_ms,
        "memory_bytes": option.memory_bytes,
    }
