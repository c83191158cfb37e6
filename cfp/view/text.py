"""Writes plans as text, HTML and Python; explains and compares plans.

All data is in the plan, so that a saved plan prints like a fresh one. The page has the
rows of the text, with bars, and escapes every text.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.console import Console, RenderableType

from cfp.analysis.strategies import Spec
from cfp.errors import CfpError, known_names
from cfp.plan.parts import Detail, roles_text, shape_of
from cfp.plan.plan import Plan
from cfp.printable import (
    counted,
    distinct_ends,
    few,
    format_bytes,
    merged_alike,
    mesh_text,
    one_line,
    printable,
    span_text,
)
from cfp.view import words
from cfp.view.console import plain_text, print_view, sheet, wrapped
from cfp.view.remarks import remarks
from cfp.view.rows import (
    BlockView,
    SegmentView,
    blocks_rows,
    chosen_text,
    merge_neighbours,
    merged_moves,
    more_rows,
    race_rows,
    segments_of,
    strategies_rows,
    update_texts,
    variants_rows,
)
from cfp.view.words import headline, throughput

_MOST_SEGMENTS = _MOST_NAMES = 4  # Of a short text.


def short_text(plan: Plan) -> str:
    """Returns the most important facts about a plan in short lines, for its repr."""
    lines = [words.title(plan), "; ".join(words.figure_texts(plan))]
    lines += [f"{rates}"] if (rates := throughput(plan)) is not None else []
    lines.append(f"chosen: {chosen_text(plan)}")
    segments = segments_of(plan)
    most = _MOST_SEGMENTS + (len(segments) == _MOST_SEGMENTS + 1)  # No line for one.
    lines += map(_segment_text, segments[:most])
    if (more := len(segments) - most) > 0:
        lines.append(f"and {more} other segments")
    lines += [_arguments_text(plan), *_variant_texts(plan), *remarks(plan)]
    lines.append('more: plan.save("plan.json"), then: cfp show plan.json')
    folded = (wrapped(f"  {line}", break_long_words=False) for line in lines)
    return "\n".join(folded).removeprefix("  ")


def _segment_text(segment: SegmentView) -> str:
    """Describes the shardings and the storage of a segment in one line."""
    plain = [block for block in segment.blocks if not block.row.updates]
    modules, by_roles = list[str](), defaultdict[str, list[str]](list)
    for block, end in zip(plain, distinct_ends([b.path for b in plain]), strict=True):
        *outer, _ = block.path.split("/")
        numbered = (i for i, part in enumerate(outer, 1) if part[-1:].isdigit())
        modules += filter(None, ["/".join(outer[: next(numbered, None)])])  # blocks/0
        by_roles[roles_text(block.row.strategy, Detail.ROLES)].append(end)
    parts = [f"{few(merged_alike(n))} ({roles})" for roles, n in by_roles.items()]
    parts = [few(parts, "; ")] if parts else []
    if updates := [block for block in segment.blocks if block.row.updates]:
        parts.append(" ".join(update_texts(updates)[:2]))
    stored = words.parameters_text(segment.parameters)
    which = span_text([*segment.indices]) + f" ({few(modules)})" * bool(modules)
    return f"segment {which}: {'; '.join([*parts, stored])}"


def _arguments_text(plan: Plan) -> str:
    """Counts sharded arguments; names the largest, shortest paths first, up to four."""
    every = zip(plan.arg_names, plan.arg_types, plan.arg_specs, strict=True)
    some = [(-prod(shape_of(kind)), name) for name, kind, spec in every if any(spec)]
    sharded = sorted(some, key=lambda one: (one[0], one[1].count("/")))
    names = merged_alike([name for _, name in sharded])
    text = f"arguments: {len(sharded)} of {len(plan.arg_specs)} sharded"
    text += f": {few(names)}" * bool(names)
    return text + " (all: cfp show --python)" * (len(names) > _MOST_NAMES)


def _variant_texts(plan: Plan) -> Iterator[str]:
    for one in plan.figures.variants if plan.figures else ():
        ms, how = one.step_ms, ", estimated" * (plan.rung == "estimated")
        if ms is None:
            ms, how = one.estimated_ms, ", estimated before planning"
        note = one.note.partition(". ")[0] or "not timed"
        text = f"{ms:.3f} ms{how}" if ms is not None else note
        yield f"variant {one.name}: {text}" + " (this one)" * one.taken


def plan_view(plan: Plan, *, border: box.Box = box.ROUNDED) -> RenderableType:
    """Renders a plan's headline, tables, throughput, summary and remarks, for rich."""
    tables = (blocks_rows(segments_of(plan)), variants_rows(plan), race_rows(plan))
    lines = [str(throughput(plan) or ""), words.summary_line(plan)]
    lines += map(words.sentence, remarks(plan))
    return sheet(border, words.headline(plan), tables, lines)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints a plan; see `print_view`."""
    print_view(lambda border: plan_view(plan, border=border), console)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Text about segments (runs of blocks) with equal choices.

    Attributes:
        blocks: heading of each block, with its facts by label.
        kind: number of the segments' kind in the plan's figures; None without a search.
    """

    title: str
    blocks: tuple[tuple[str, dict[str, str]], ...]
    kind: int | None


def explained(plan: Plan, wanted: set[int] | None = None) -> Iterator[Explained]:
    """Yields texts on the `wanted` blocks (None: all) of `segments_of`, in order."""
    kinds = plan.figures.segment_kinds if plan.figures else ()
    for segment in segments_of(plan):
        shown = [b for b in segment.blocks if wanted is None or {*b.members} & wanted]
        if not shown:
            continue
        span, count = span_text([*segment.indices]), len(segment.indices)
        title = f"Segments {span} ({count} alike)" if count > 1 else f"Segment {span}"
        title += f": {words.parameters_text(segment.parameters)}"
        if segment.time_ms is not None:
            title += f"; {segment.time_ms:.3f} ms each, {words.known_how(plan)}"
        yield Explained(
            title=title,
            blocks=tuple(
                (words.elided(name) + where, about)
                for name, where, about in merge_neighbours(map(_block, shown))
            ),
            kind=kinds[segment.indices[0]] if kinds else None,
        )


def _block(block: BlockView) -> tuple[str, str, dict[str, str]]:
    """Returns a block's name, its place, and facts by label."""
    row = block.row
    where = f"  at {block.source}" if block.source else ""
    where += f", {row.repeats} times in one step" if row.repeats > 1 else ""
    moves = "; ".join(map(words.move_text, merged_moves(row.moves)))
    about = {"sharded": block.sharded, "operation": row.op}
    if block.arguments:
        about["arguments"] = few(merged_alike(block.arguments))
    about["collectives"] = "; ".join([moves or "none", *block.exceptions])
    return block.name, where, about


def facts(plan: Plan) -> Iterator[str]:
    """Lists sentences about the whole plan, its remarks included."""
    yield f"Chosen: {chosen_text(plan)}."
    if why := words.unsearched_text(plan):
        yield f"No strategies to compare: {why}."
    if any(move.time_ms is not None for row in plan.rows for move in row.moves):
        yield "Times of collectives: estimated, each alone; a segment may combine some."
    yield from (f"{words.sentence(remark)}." for remark in remarks(plan))


def explain_text(plan: Plan, block: str | None = None) -> str:
    """Explains a plan, or some of its blocks, in lines of `columns()` characters.

    Args:
        block: part of block names, or else of their arguments' names; with ``*`` a
            pattern of whole names. Case does not matter.

    Raises:
        CfpError: no name matches.
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
    """Finds blocks by name, else merged name, else arguments; CfpError without any."""
    sought = block.casefold()
    pattern = sought if "*" in sought else f"*{sought}*"

    def is_it(name: str) -> bool:
        known = name.casefold()
        return known == sought or fnmatch.fnmatchcase(known, pattern)

    shown = [block for segment in segments_of(plan) for block in segment.blocks]
    found = {row.block for row in plan.rows if is_it(row.name)}
    found = found or {i for one in shown if is_it(one.name) for i in one.members}
    found = found or {one.block for one in plan.rows if any(map(is_it, one.arguments))}
    if not found:
        names = known_names(block, (printable(words.elided(b.name)) for b in shown))
        raise CfpError(f"No block has {block!r} in its name or arguments. {names}")
    return found


_FOLDER = Path(__file__).parent


def page_html(plan: Plan, is_small: bool = False) -> str:
    """Renders a plan as HTML that contains its style, and loads no other file.

    Args:
        is_small: True for a fragment without the last tables, for notebooks.
    """
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        # Names in a plan may contain markup.
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["zip"] = partial(zip, strict=True)
    tables = [blocks_rows(segments_of(plan)), variants_rows(plan), race_rows(plan)]
    tables += [] if is_small else more_rows(plan)
    rates = throughput(plan)
    return environment.get_template("page.html.jinja").render(
        is_small=is_small,
        title=words.title(plan),
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        figures=[*words.figure_texts(plan), *([str(rates)] if rates else [])],
        remarks=[*facts(plan)],
        summary=words.summary_line(plan),
        tables=[one for one in tables if one.rows],
        segments=[*explained(plan)],
    )


def _without_controls(value: Any) -> Any:
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return one_line(value) if is_text else value


_MOST_CHANGES = 4


def diff_data(first: Plan, second: Plan) -> dict[str, tuple[str, str]]:
    """Maps facts that differ to their texts in both plans; "" where missing."""
    one, two = _facts(first), _facts(second)
    pairs = {name: (one.get(name, ""), two.get(name, "")) for name in {**one, **two}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def diff_text(
    first: Plan, second: Plan, names: tuple[str, str] = ("first", "second")
) -> str:
    """Lists facts that differ between two plans; of equal changes at most four."""
    lines = [f"{names[0]} -> {names[1]}"]
    groups: dict[tuple[str, str], list[str]] = {}
    for name, pair in diff_data(first, second).items():
        groups.setdefault(pair, []).append(name)
    for (before, after), members in groups.items():
        change = f"{before or 'none'} -> {after or 'none'}"
        merged = merged_alike(members)
        lines += [f"  {words.elided(one)}: {change}" for one in merged[:_MOST_CHANGES]]
        if (more := len(merged) - _MOST_CHANGES) > 0:
            lines.append(f"  and {more} more, also {change} (--json lists all)")
    if len(lines) == 1:
        lines.append("No compared fact differs.")
    return "\n".join(map(wrapped, lines)) + "\n"


def _facts(plan: Plan) -> dict[str, str]:
    """Maps facts' names to texts, for comparisons, without the version of measuring."""
    found = {"plan": plan.winner, "memory": words.memory_text(plan)}
    times = {"measured": plan.measured_ms, words.predicted_how(plan): plan.predicted_ms}
    found |= {name: f"{ms:.3f} ms" for name, ms in times.items() if ms is not None}
    found |= {"program": plan.fingerprint[:12], "mesh": mesh_text(plan.mesh_axes)}
    found |= {"constraint level": str(plan.level), **plan.environment, "measure": ""}
    found |= {f"compiler option {name}": text for name, text in plan.options.items()}
    arguments = zip(plan.arg_names, plan.arg_types, plan.arg_specs, strict=True)
    for name, kind, spec in arguments:
        found[f"type of {name}"] = kind
        found[f"sharding of {name}"] = _code(spec, kind)
    stored = [words.storage_text(plan, i) for i in range(len(plan.segments))]
    for row in plan.rows:
        text = words.parameters_text(stored[row.segment])
        found[f"block {row.name}"] = f"{roles_text(row.strategy, Detail.DIMS)}; {text}"
    for one in merged_moves(move for row in plan.rows for move in row.moves):
        name = f"collective {one.kind} over {','.join(one.axes)}"
        found[name] = format_bytes(one.total_bytes)
    return found


def python_text(plan: Plan) -> str:
    """Writes a plan's shardings of arguments, results and values as Python code."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"# {printable(headline(plan))}"
    yield "from jax.sharding import PartitionSpec as P"
    yield f"\nMESH = {dict(plan.mesh_axes)!r}"
    if plan.options:
        yield f"COMPILER_OPTIONS = {dict(plan.options)!r}"
    yield "\n# Leaves of the arguments, for in_shardings of jax.jit."
    yield "ARGUMENTS = {"
    host = {argument for argument, _ in plan.in_host}
    rows = zip(
        plan.arg_names, plan.arg_types, plan.arg_specs, plan.donated, strict=True
    )
    for place, (name, kind, spec, donated) in enumerate(rows):
        more = ", donated" * donated + ", in host memory" * (place in host)
        yield f"    {name!r}: {_code(spec, kind)},  # {kind}{more}"
    yield "}"
    yield "\n# Leaves of the results, in the order of jax.tree.leaves: out_shardings."
    yield "RESULTS = ["
    yield from (f"    {_code(spec)}," for spec in plan.output_specs)
    yield "]"
    yield "\n# Values inside: jax.lax.with_sharding_constraint(value, P(...))."
    yield "CONSTRAINTS = ["
    for site in plan.sites:
        count = counted(site.count, "value", "values")
        line = f"{printable(site.source) or 'no line of the step'}, {count}"
        yield f"    ({site.type!r}, {_code(site.spec, site.type)}),  # {line}"
    yield "]"


def _code(spec: Spec, kind: str | None = None) -> str:
    """Writes a sharding as Python, ``P(None, 'x')``, cut to the dims of type `kind`."""
    dims = spec if kind is None else spec[: len(shape_of(kind))]
    parts = [repr(one[0]) if len(one) == 1 else repr(one or None) for one in dims]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"
