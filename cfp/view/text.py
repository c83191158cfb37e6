"""Renders plans as text: in a few lines, as tables, explained, and compared.

Everything stands in the plan itself, so that a saved plan prints like a fresh one.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from textwrap import TextWrapper
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.text import Text

from cfp.analysis.strategies import Spec
from cfp.errors import CfpError
from cfp.plan.figures import OptionFigures
from cfp.plan.parts import Detail, roles_text, shape_of
from cfp.plan.plan import Plan
from cfp.printable import (
    columns,
    counted,
    distinct_ends,
    merged_alike,
    mesh_text,
    printable,
    span_text,
)
from cfp.units import format_bytes
from cfp.view import words
from cfp.view.console import Fitted, new_table, plain_text, print_view, wrapped
from cfp.view.model import (
    BlockView,
    ChoiceView,
    PlanView,
    RaceView,
    RunView,
    SegmentView,
    choice_of,
    strategy_text,
    view_of,
)
from cfp.view.words import elided, few

_MOST_RUNS = 4  # as many as a short text has room for
_NAMES_SHOWN = 12
_LIKE = 0.6  # of 1: as much of two words is spelt alike

# ------------------------------------------------------------------------- a few lines


def short_text(plan: Plan) -> str:
    """Returns the most important facts about a plan in a few lines."""
    view, figures = view_of(plan), "; ".join(words.figure_texts(plan))
    lines = [words.title(plan), f"  {figures or 'neither predicted nor measured'}"]
    lines += [f"  {rates}"] if (rates := words.throughput(plan)) is not None else []
    lines.append(f"  chosen: {view.chosen}")
    lines += map(_run_text, view.runs[:_MOST_RUNS])
    if len(view.runs) > _MOST_RUNS:
        more = counted(len(view.runs) - _MOST_RUNS, "more run", "more runs")
        lines.append(f"  and {more} of segments")
    sharded = sum(map(any, plan.arg_specs))
    verb = "is" if sharded == 1 else "are"
    lines.append(f"  arguments: {sharded} of {len(plan.arg_specs)} {verb} sharded")
    lines += [f"  {remark}" for remark in view.remarks]
    lines.append('  more: plan.save("plan.json"), then: cfp show plan.json')
    wrap = TextWrapper(
        width=columns(),
        subsequent_indent=" " * 4,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join(map(wrap.fill, lines))


def _run_text(run: RunView) -> str:
    """Describes briefly how the blocks of some segments are sharded."""
    every = [block for segment in run.segments for block in segment.blocks]
    blocks = [block for block in every if not block.row.updates]
    updates = [block for block in every if block.row.updates]
    modules: list[str] = []
    ways: dict[str, list[str]] = {}
    alike = Counter((b.path, roles_text(b.row.strategy, Detail.ROLES)) for b in blocks)
    ends = distinct_ends([path for path, _ in alike])
    for ((path, way), count), end in zip(alike.items(), ends, strict=True):
        *outer, _ = path.split("/")
        numbers = (i for i, part in enumerate(outer) if part[-1:].isdigit())
        module = "/".join(outer[: next(numbers, 0) + 1])  # params/blocks/0
        modules += [module] if module else []
        ways.setdefault(way, []).append(end + f" ({count} blocks)" * (count > 1))
    where = f" ({few(modules)})" if modules else ""
    parts = [f"{few(names)} {way}" for way, names in ways.items()]
    parts = [few(parts, "; ")] if parts else []
    parts += [f"{_update_name(updates)} {_update_sharded(updates)}"] if updates else []
    sharded = "; ".join(parts)
    stored = few([segment.parameters for segment in run.segments], " or ")
    numbers = span_text([i for segment in run.segments for i in segment.indices])
    return f"  segment {numbers}{where}: {sharded}; {words.parameters_text(stored)}"


def _update_name(updates: Sequence[BlockView]) -> str:
    """Names the blocks without products in an optimizer's update, as one."""
    blocks = counted(len(updates), "block", "blocks")
    return f"optimizer update ({blocks} without products)"


def _update_sharded(updates: Sequence[BlockView]) -> str:
    """Says how many of such blocks each axis shards: ``x: 3 of 6``."""
    axes = Counter(one.axis for block in updates for one in block.row.strategy)
    parts = [f"{axis}: {n} of {len(updates)}" for axis, n in sorted(axes.items())]
    return "; ".join(parts) or "replicated"


def _update_collectives(updates: Sequence[BlockView]) -> str:
    """Sums up the collectives of such blocks."""
    sums: dict[tuple[str, tuple[str, ...]], int] = {}
    for move in (move for block in updates for move in block.row.moves):
        key = move.kind, move.axes
        sums[key] = sums.get(key, 0) + move.total_bytes
    texts = [
        f"{kind} over {','.join(axes)}, {format_bytes(size)}"
        for (kind, axes), size in sums.items()
    ]
    return "; ".join(texts) or "-"


# ------------------------------------------------------------------------------- tables


def plan_view(plan: Plan, *, border: box.Box = box.ROUNDED) -> RenderableType:
    """Everything, for a rich console."""
    view = view_of(plan)
    parts: list[RenderableType] = [Text(words.headline(plan), style="bold"), Text()]
    if view.runs:
        parts += [_blocks_table(view, border), Text()]
    race = view.race
    if race.candidates:
        parts.append(_race_table(race, border))
        lines = [f"Each: {race.shared_note}" * bool(race.shared_note), race.slower]
        parts += [*(Text(line) for line in lines if line), Text()]
    lines = [str(words.throughput(plan) or ""), words.summary_line(plan), *view.notes]
    return Group(*parts, *(Text(line) for line in lines if line))


def _blocks_table(view: PlanView, border: box.Box) -> Fitted:
    """The blocks, repeated segments once."""
    headings = {
        "segment": "word",
        "block": "text",
        "sharded": "text",
        "parameters": "text",
        "collectives that follow": "text",
        "segment ms": "number",
    }
    table = new_table(border, "Blocks", headings)
    for run in view.runs:
        for segment in run.segments:
            time = "-" if segment.time_ms is None else f"{segment.time_ms:.3g}"
            first, times = segment.span, ""
            if segment.count > 1:
                first += f" ({segment.count} x)"
                times = f"{segment.count} x " * (segment.time_ms is not None)
            shown = [b for b in segment.blocks if not b.row.updates]
            cells = [(b.path, b.sharded, b.collectives) for b in shown]
            if updates := [b for b in segment.blocks if b.row.updates]:
                name, sharded = _update_name(updates), _update_sharded(updates)
                cells.append((name, sharded, _update_collectives(updates)))
            ends = segment.parameters, times + time
            for (path, sharded, moved), alike in groupby(cells):
                count = len([*alike])
                path += f" ({count} blocks)" * (count > 1)
                table.add_row(first, path, sharded, ends[0], moved, ends[1])
                first, ends = "", ("", "")
        table.add_section()
    return Fitted(table)


def _race_table(race: RaceView, border: box.Box) -> Fitted:
    """The candidates, the fastest first; the winner is marked.

    Columns in which nothing would stand are left out.
    """
    found = race.candidates
    rows = [one.row for one in found]
    cells = {
        "": ["*" if one.won else "" for one in found],
        "plan": [row.name for row in rows],
        "predicted ms": [_number(row.predicted_ms, ".3f") for row in rows],
        "measured ms": [_number(row.time_ms, ".3f") for row in rows],
        "+-": [_number(one.spread_ms, ".2g") for one in found],
        "memory": [format_bytes(r.peak_bytes) if r.peak_bytes else "-" for r in rows],
        "from": [row.rung if race.has_rungs else "" for row in rows],
        "note": [one.note for one in found],
    }
    kinds = {"plan": "text", "note": "text", "": "word", "from": "word"}
    cells = {head: of for head, of in cells.items() if head == "" or {*of} - {"", "-"}}
    headings = {heading: kinds.get(heading, "number") for heading in cells}
    table = new_table(border, race.title, headings)
    for one, texts in zip(found, zip(*cells.values(), strict=True), strict=True):
        table.add_row(*texts, style="bold" if one.won else None)
    return Fitted(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plan_text(plan: Plan, width: int | None = None) -> str:
    """Everything as plain ASCII text, for files and pipes."""
    return plain_text(plan_view(plan, border=box.ASCII), width)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints a plan; see `print_view`."""
    print_view(lambda border: plan_view(plan, border=border), console)


# -------------------------------------------------------------------------- explanation


def explain_text(plan: Plan, block: str | None = None) -> str:
    """Explains the plan, or one of its blocks, as wide as `columns` says.

    Args:
        block: part of a block's name, or a pattern with ``*``; all, if not given.

    Raises:
        CfpError: no block has such a name.
    """
    view = view_of(plan)
    wanted = _wanted(view, block)
    lines, rates = [words.headline(plan)], words.rates_text(plan)
    how = words.known_how(plan)
    if block is None:
        times = f"Times of collectives: each launched by itself, by rates {rates}; "
        times += "in a segment's time those that are combined may share a launch."
        said = [view.why, view.memory, times if rates else ""]
        if text := words.unscattered_text(plan):
            said.append(f"{text[0].upper()}{text[1:]}.")
        lines += filter(None, said)
        lines += _kernel_lines(plan)
    for run in view.runs:
        parts = (_segment_lines(one, wanted, how) for one in run.segments)
        found = [line for part in parts for line in part]
        lines += ["", *found] if found else []
    if not plan.rows:
        lines.append("The plan has no blocks: the step has no contraction to shard.")
    return "\n".join(map(wrapped, lines)) + "\n"


def _wanted(view: PlanView, block: str | None) -> set[int]:
    """Finds blocks by their names, or by those of repeated ones: layer_0-3."""
    rows = view.plan.rows
    if block is None:
        return {row.block for row in rows}
    sought = block.casefold()
    pattern = sought if "*" in sought else f"*{sought}*"

    def is_it(name: str) -> bool:
        known = name.casefold()
        return known == sought or fnmatch.fnmatchcase(known, pattern)

    shown = [block for segment in view.segments for block in segment.blocks]
    found = {row.block for row in rows if is_it(row.name)}
    found = found or {i for one in shown if is_it(one.name) for i in one.members}
    if not found:
        names = [*dict.fromkeys(row.name for row in rows)]
        close = _nearest(sought, names)
        some = ", ".join(map(elided, (close or names)[:_NAMES_SHOWN]))
        more = ", ..." if len(close or names) > _NAMES_SHOWN else ""
        raise CfpError(
            f"No block has {block!r} in its name. "
            f"{'Nearest' if close else 'Blocks'}: {printable(some)}{more}."
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


def _kernel_lines(plan: Plan) -> Iterator[str]:
    """The attentions that no kernel computes, the kernels that cannot, and others.

    Others are the step's own kernels that are sharded.
    """
    figures = plan.figures
    if figures is None:
        return
    for one in sorted(figures.left, key=lambda one: bool(one.kernel)):
        how = f"not by {one.kernel}" if one.kernel else "as written"
        where = f", at {one.source}" if one.source else ""
        times = f"{one.count} times: " if one.count > 1 else ""
        yield f"Attention {how}{where}: {times}{one.reason}."
    for text in figures.kernels:
        yield f"Kernel that is sharded: {text}."


def _segment_lines(segment: SegmentView, wanted: set[int], how: str) -> Iterator[str]:
    shown = [one for one in segment.blocks if not wanted.isdisjoint(one.members)]
    if not shown:
        return
    title = f"Segment {segment.span}"
    if segment.count > 1:
        title = f"Segments {segment.span} ({segment.count} alike)"
    title += f": {words.parameters_text(segment.parameters)}"
    if segment.time_ms is not None:
        title += f"; {segment.time_ms:.3f} ms each, {how}"
        if segment.collectives_ms > segment.time_ms:
            title += (
                f" (its collectives one after another {segment.collectives_ms:.3f} ms: "
                "some are combined or run beside others)"
            )
    yield title
    for block in shown:
        yield from _block_lines(block)
    yield from _choice_lines(segment.choice)


def _block_lines(block: BlockView) -> Iterator[str]:
    row = block.row
    where = f"  at {row.source}" if row.source else ""
    where += f", {row.repeats} times in one step" if row.repeats > 1 else ""
    yield f"  {elided(block.name)}{where}"
    yield f"    sharded: {block.sharded}"
    operands = " x ".join(map(words.tensor_text, row.operands))
    yield f"    tensors: {operands} -> {words.tensor_text(row.result)}"
    moves = "; ".join(map(words.move_text, block.moves))
    yield f"    collectives: {'; '.join([moves or 'none', *block.exceptions])}"


def _choice_lines(choice: ChoiceView) -> Iterator[str]:
    """Explains a segment's strategy, with the cost of the runner-up."""
    taken, runner = choice.taken, choice.runner_up
    if taken is None or runner is None:
        yield f"  why: {choice.why}"
        return
    yield (
        f"  why: {choice.why}: predicted step {taken.step_ms:.3f} ms, memory "
        f"{format_bytes(taken.memory_bytes)}, {taken.name}"
    )
    unlike = strategy_text(runner.strategy, taken.strategy)
    unlike = f"unlike the choice: {unlike}" if unlike else "the same as the choice"
    yield (
        f"  runner-up: {runner.name}: predicted step {runner.step_ms:.3f} ms "
        f"({_change(runner.step_ms, taken.step_ms)}), memory "
        f"{format_bytes(runner.memory_bytes)} "
        f"({_change(runner.memory_bytes, taken.memory_bytes)})"
        f"{choice.too_large}; {unlike}"
    )


def _change(now: float, before: float) -> str:
    if not before:
        return "new"
    share = now / before - 1.0
    return "the same" if abs(share) < 0.0005 else f"{share:+.1%}"


def explain_data(plan: Plan, block: str | None = None) -> dict[str, Any]:
    """The same as plain data."""
    wanted = _wanted(view_of(plan), block)
    left = plan.figures.left if plan.figures else ()
    choices = [choice_of(plan, index) for index in range(len(plan.segments))]
    return {
        "plan": plan.winner,
        "measured_ms": plan.measured_ms,
        "attentions_as_written": [asdict(one) for one in left if not one.kernel],
        "kernels_refused": [asdict(one) for one in left if one.kernel],
        "blocks": [
            {
                "block": row.name,
                "segment": row.segment,
                "source": row.source,
                "sharded": roles_text(row.strategy),
                "storage": words.storage_text(plan.segments[row.segment], short=True),
                "repeats": row.repeats,
                "collectives": [asdict(move) for move in row.moves],
                "taken": _option_data(choices[row.segment].taken),
                "runner_up": _option_data(choices[row.segment].runner_up),
            }
            for row in plan.rows
            if row.block in wanted
        ],
    }


def _option_data(option: OptionFigures | None) -> dict[str, Any] | None:
    if option is None:
        return None
    return {
        "name": option.name,
        "in_words": strategy_text(option.strategy),
        "segment_ms": option.segment_ms,
        "step_ms": option.step_ms,
        "memory_bytes": option.memory_bytes,
    }


# -------------------------------------------------------------------------- differences

_NOTHING = "-"
_MOST_CHANGES = 4
_TITLES = {
    "figures": "Figures",
    "program": "Program and mesh",
    "environment": "Versions and devices",
    "options": "Compiler options",
    "sizes": "Arguments of other types or sizes",
    "arguments": "Arguments, by how each dim is sharded",
    "blocks": "Blocks",
    "collectives": "Collectives (bytes of all blocks together)",
}


def diff_data(first: Plan, second: Plan) -> dict[str, Any]:
    """The differences as plain data: of each, what it is in both plans."""
    views = view_of(first), view_of(second)
    moves = [move for view in views for move in view.moves]
    timed = all(move.time_ms is not None for move in moves)
    one, two = (_facts(view, timed) for view in views)
    found = {part: _unlike(one[part], two[part]) for part in _TITLES}
    found["sizes"] = {n: pair for n, pair in found["sizes"].items() if None not in pair}
    return found


def diff_text(
    first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")
) -> str:
    """The differences, folded; those of repeated layers stand once."""
    found = diff_data(first, second)
    lines = [f"{names[0]} -> {names[1]}"]
    for part, title in _TITLES.items():
        if found[part]:
            folded = _resized(found[part]) if part == "sizes" else _lines(found[part])
            lines += ["", title, *folded]
    if len(lines) == 1:
        lines.append("The plans do not differ.")
    return "\n".join(map(wrapped, lines)) + "\n"


def _lines(changes: Mapping[str, Sequence[str | None]]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, (before, after) in changes.items():
        pair = (before or _NOTHING, after or _NOTHING)
        groups.setdefault(pair, []).append(name)
    for (before, after), members in groups.items():
        names = [elided(name) for name in merged_alike(members)]
        for name in names[:_MOST_CHANGES]:
            yield f"  {name}: {before} -> {after}"
        if len(names) > _MOST_CHANGES:
            more = len(names) - _MOST_CHANGES
            yield f"  and {more} more, also {before} -> {after} (--json lists all)"


def _resized(changes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Arguments of which the same dims have other sizes, as with another batch."""
    alike: dict[str, list[str]] = {}
    for name, (before, after) in changes.items():
        kind, other = (text.partition("[")[0] for text in (before, after))
        sizes, others = map(shape_of, (before, after))
        pairs = list(zip(sizes, others, strict=False))
        dims = [(d, *pair) for d, pair in enumerate(pairs) if pair[0] != pair[1]]
        what = ", ".join(f"dim {d}: {one} -> {two}" for d, one, two in dims)
        if kind != other or len(sizes) != len(others):
            what = f"{before} -> {after}"
        alike.setdefault(what, []).append(name)
    for what, names in alike.items():
        merged = [elided(name) for name in merged_alike(names)]
        more = len(merged) - _MOST_CHANGES
        rest = f" and {more} more (--json lists all)" if more > 0 else ""
        yield f"  {what}: {', '.join(merged[:_MOST_CHANGES])}{rest}"


def _unlike(
    first: Mapping[str, str], second: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    return {
        name: (first.get(name), second.get(name))
        for name in {**first, **second}
        # An empty value reads as one that is not there.
        if (first.get(name) or None) != (second.get(name) or None)
    }


def _facts(view: PlanView, timed: bool) -> dict[str, Mapping[str, str]]:
    """Facts about a plan by part, each with its name.

    Args:
        timed: whether to give times of collectives, which both plans must know.
    """
    plan = view.plan
    figures = {"plan": plan.winner}
    times = {"measured": plan.measured_ms}
    times[f"predicted {words.basis_text(plan)}"] = plan.predicted_ms
    figures |= {name: f"{ms:.3f} ms" for name, ms in times.items() if ms is not None}
    if (memory := words.memory_figure(plan)) is not None:
        size, how = memory
        figures["memory on each device"] = format_bytes(size) + (how and f", {how}")
    return {
        "figures": figures,
        "program": {
            "program": plan.fingerprint[:12],
            "mesh": mesh_text(plan.mesh_axes),
            "constraint level": str(plan.level),
        },
        "environment": plan.environment,
        "options": plan.options,
        "sizes": dict(zip(plan.arg_names, plan.arg_types, strict=True)),
        "arguments": dict(
            zip(plan.arg_names, map(_spec_text, plan.arg_specs), strict=True)
        ),
        "blocks": _blocks(plan),
        "collectives": {
            f"{one.kind} over {','.join(one.axes)}": format_bytes(one.total_bytes)
            + (f", {one.time_ms:.3f} ms" if timed else "")
            for one in view.moves
        },
    }


def _spec_text(spec: Spec) -> str:
    """A sharding as a PartitionSpec's entries: ``None, x``."""
    dims = ["+".join(names) or "None" for names in spec]
    return ", ".join(dims) if any(spec) else "replicated"


def _blocks(plan: Plan) -> dict[str, str]:
    found: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for row in plan.rows:
        seen[row.name] += 1
        again = f" ({seen[row.name]})" if seen[row.name] > 1 else ""
        stored = words.storage_text(plan.segments[row.segment])
        sharded = roles_text(row.strategy, Detail.DIMS)
        found[row.name + again] = f"{sharded}; {words.parameters_text(stored)}"
    return found
