"""Results of each pass, and of compiling, as tables and as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.text import Text

from cfp.analysis.analyze import Analysis
from cfp.analysis.dump import (
    Summary,
    opaque_lines,
    opaque_ops,
    segment_records,
    summarize,
)
from cfp.analysis.flow import op_path
from cfp.analysis.layout import Choice, lay_out, program_flops
from cfp.analysis.segments import Segment
from cfp.analysis.storage import spec_ways
from cfp.analysis.strategies import Strategy, block_strategies
from cfp.plan.describe import block_moves, op_text
from cfp.plan.parts import short_source
from cfp.printable import counted, merged_alike, printable
from cfp.profiling.hlo import CollectiveSite
from cfp.search.requests import Profiles
from cfp.units import format_bytes, format_flops
from cfp.view.console import Fitted, new_table, plain_text
from cfp.view.words import STRATEGIES, few

_MOST_OPAQUE = 5
_WORTH_NAMING = 0.001  # of all FLOPs, or of all bytes


def strategy_numbers(
    analysis: Analysis, segment: Segment, strategies: tuple[Strategy, ...]
) -> list[int]:
    """Strategies of a segment's blocks, as numbers in each block's own list."""
    frame = analysis.frame
    return [
        block_strategies(frame.program, frame.blocks[b], frame.mesh).index(strategy)
        for b, strategy in zip(segment.blocks, strategies, strict=True)
    ]


def search_space(analysis: Analysis, segment: Segment) -> list[int]:
    """Counts the strategies of each block of a segment."""
    frame = analysis.frame
    return [
        len(block_strategies(frame.program, frame.blocks[b], frame.mesh))
        for b in segment.blocks
    ]


# -------------------------------------------------------------------------- analyze


def analysis_view(
    analysis: Analysis, seconds: float, border: box.Box
) -> RenderableType:
    """Kinds of segments, the blocks of each, and the ops that cannot be sharded."""
    frame = analysis.frame
    program = frame.program
    ops = counted(len(program.ops), "op", "ops")
    blocks = counted(len(frame.blocks), "block", "blocks")
    segments = counted(len(analysis.segments), "segment", "segments")
    kinds = counted(len(analysis.representatives), "kind", "kinds")
    flops = format_flops(program_flops(program))
    lines = (
        f"{ops}, {blocks}, {segments} of {kinds}, {flops} per step; "
        f"analysed in {seconds:.2f} s"
    )
    headings = ("kind", "segments", "block", "operation", "strategies")
    table = new_table(border, "Segments", dict.fromkeys(headings, "text"))
    for kind, index in enumerate(analysis.representatives):
        members = [s.index for s in analysis.segments if s.kind == kind]
        segment = analysis.segments[index]
        sizes = search_space(analysis, segment)
        for place, (b, size) in enumerate(zip(segment.blocks, sizes, strict=True)):
            block = frame.blocks[b]
            table.add_row(
                str(kind) if place == 0 else "",
                ", ".join(map(str, members)) if place == 0 else "",
                block.name,
                op_text(program, program.ops[block.anchor]),
                str(size),
            )
        table.add_section()
    parts: list[RenderableType] = [Text(lines, style="bold"), Text()]
    parts += [Fitted(table), Text()]
    parts += map(Text, summary_lines(summarize(analysis)))
    opaque = list(opaque_lines(program))
    if opaque_ops(program):
        parts += [Text(), *map(Text, opaque[: _MOST_OPAQUE + 1])]
    if len(opaque) > _MOST_OPAQUE + 1:
        parts.append(Text(f"and {len(opaque) - _MOST_OPAQUE - 1} more"))
    return Group(*parts)


def summary_lines(summary: Summary) -> Iterator[str]:
    """Counts the parts of a program that can be sharded, and the others."""
    flops = summary.split_share(summary.contractions)
    state = summary.split_share(summary.state)
    if summary.devices > 1:
        yield (
            f"All {summary.devices} devices can share {flops:.1%} of the FLOPs and "
            f"{state:.1%} of the bytes of parameters and optimizer state."
        )
    for title, shares in (
        ("Contractions", summary.contractions),
        ("State", summary.state),
    ):
        whole = summary.whole(shares)
        total = sum(s.amount for s in shares)
        large = [s for s in whole if s.amount >= _WORTH_NAMING * total]
        if large:
            yield f"{title} that cannot be split so many ways:"
        yield from (f"  {s.amount / total:.1%} {s}" for s in large[:_MOST_OPAQUE])
        if len(large) > _MOST_OPAQUE:
            yield f"  and {len(large) - _MOST_OPAQUE} more"


def analysis_data(analysis: Analysis, seconds: float) -> dict[str, Any]:
    """The same as plain data."""
    program = analysis.frame.program
    summary = summarize(analysis)
    return {
        "ops": len(program.ops),
        "flops": program_flops(program),
        "seconds": seconds,
        "shareable": {
            "devices": summary.devices,
            "flops": summary.split_share(summary.contractions),
            "state_bytes": summary.split_share(summary.state),
            "unshared_contractions": [
                str(s) for s in summary.whole(summary.contractions)
            ],
            "unshared_state": [str(s) for s in summary.whole(summary.state)],
        },
        "blocks": [
            {
                "name": block.name,
                "op": op_text(program, program.ops[block.anchor]),
                "contractions": [m.op for m in block.members],
            }
            for block in analysis.frame.blocks
        ],
        "segments": segment_records(analysis),
        "opaque_ops": list(opaque_lines(program))[1:],
    }


# -------------------------------------------------------------------------- profile


def profiles_view(
    analysis: Analysis, profiles: Profiles, border: box.Box
) -> RenderableType:
    """For each kind of segment what was measured, the best and the worst."""
    headings = ("kind", "segments", "measured", "failed", "best", "worst")
    table = new_table(border, "Profiles", dict.fromkeys(headings, "text"))
    records = profiles.records
    for kind in range(len(analysis.representatives)):
        members = [s.index for s in analysis.segments if s.kind == kind]
        mine = (w for w in profiles.requests if w.kind == kind)
        known = [w for w in mine if w.outcome(records) is not None]
        times = [w.alone_ms(records) for w in known if w.is_measured(records)]
        table.add_row(
            str(kind),
            ", ".join(map(str, members)),
            str(len(times)),
            str(len(known) - len(times)),
            f"{min(times):.3f} ms" if times else "-",
            f"{max(times):.3f} ms" if times else "-",
        )
    counts = profiles.counts
    line = (
        f"{counted(counts['strategies_measured'], *STRATEGIES)} measured, "
        f"{counts['strategies_cached']} from the cache, "
        f"{counts['strategies_failed']} failed; {counts['profile_seconds']:.1f} s"
    )
    return Group(Fitted(table), Text(), Text(line))


def profiles_data(analysis: Analysis, profiles: Profiles) -> dict[str, Any]:
    """All records as plain data; strategies are numbers in each block's own list."""
    found, records = [], profiles.records
    for wanted in profiles.requests:
        segment = analysis.segments[analysis.representatives[wanted.kind]]
        record = records.get(wanted.own_job.key.digest)
        ran = wanted.is_measured(records)
        numbers = strategy_numbers(analysis, segment, wanted.candidate.strategies)
        found.append(
            {
                "kind": wanted.kind,
                "segment": segment.index,
                "strategies": numbers,
                "storage": str(wanted.candidate.storage),
                "computed_again": wanted.candidate.remat,
                "estimate_ms": wanted.candidate.estimate_ms,
                "status": record.status if record else "missing",
                "reason": record.reason if record else "",
                "time_ms": wanted.alone_ms(records) if ran else None,
                "temp_bytes": record.temp_bytes if record else None,
            }
        )
    return {
        "measured": profiles.counts["strategies_measured"],
        "cached": profiles.counts["strategies_cached"],
        "failed": profiles.counts["strategies_failed"],
        "seconds": profiles.counts["profile_seconds"],
        "rounds": len(profiles.rounds) - 1,
        "profiles": found,
    }


# -------------------------------------------------------------------------- presets


def presets_data(
    analysis: Analysis, presets: Mapping[str, Choice]
) -> list[dict[str, Any]]:
    """For each preset what it keeps on a device and what it sends in a step."""
    frame = analysis.frame
    found = []
    for name, choice in presets.items():
        layout = lay_out(frame, choice)
        held = sum(
            frame.program.values[v].size_bytes
            // spec_ways(layout.arg_spec(position), frame.mesh)
            for position, v in enumerate(frame.program.args)
        )
        sent: dict[str, int] = {}
        for _, kind, axes, size, turns in block_moves(analysis, layout):
            over = f"{kind} {','.join(axes)}"
            sent[over] = sent.get(over, 0) + turns * size
        found.append({"name": name, "argument_bytes": held, "collective_bytes": sent})
    return found


def presets_view(found: list[dict[str, Any]], border: box.Box) -> RenderableType:
    """The presets as a table."""
    headings = ("name", "arguments per device", "collectives in a step")
    table = new_table(border, "Presets", dict.fromkeys(headings, "text"))
    for item in found:
        sent = sorted(item["collective_bytes"].items(), key=lambda pair: -pair[1])
        table.add_row(
            item["name"],
            format_bytes(item["argument_bytes"]),
            ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sent) or "-",
        )
    return Fitted(table)


# ------------------------------------------------------ collectives of a compiled step

_MOST_NAMES = 3
_NAME_WIDTH = 60
_STEP = re.compile(r"^jit\([^()]*\)/")
_MERGED = re.compile(r"^((?:[^:]*/)?)\((.*:.*)\)$")


def sites_view(sites: Sequence[CollectiveSite], border: box.Box) -> RenderableType:
    """A table of collectives, most bytes first, and their sum.

    Those of one kind, size and line whose ops differ in numbers alone, as those of
    layers do, stand in one row.
    """
    if not sites:
        return Text("The program has no collectives.")
    headings = {
        "collective": "word",
        "times": "number",
        "bytes of one": "number",
        "devices": "number",
        "source line": "text",
        "op": "text",
    }
    table = new_table(border, "Collectives", headings)
    for alike in _alike(sites):
        first = alike[0]
        table.add_row(
            first.kind,
            str(sum(site.count for site in alike)),
            format_bytes(first.bytes),
            str(first.group_size),
            printable(short_source(first.source)) or "-",
            printable(_row_text(alike)) or "-",
        )
    total = sum(site.bytes * site.count for site in sites)
    count = sum(site.count for site in sites)
    line = (
        f"{counted(count, 'collective', 'collectives')} in one step; "
        f"{format_bytes(total)} on each device together. Bytes of one: the larger of "
        "what a device gives and gets. --json lists each op."
    )
    return Group(Fitted(table), Text(line))


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
    return plain_text(sites_view(sites, box.ASCII))


def ops_text(scopes: Sequence[str]) -> str:
    """The ops of some name stacks in short: ``Block_0-11/Dense_0/dot_general``.

    XLA names an op that it merged of several ``jit(step)/(a:b:c)``, and in a loop
    ``jit(step)/while/body/(a:b:c)``.
    """
    ops = [op for scope in scopes for op in _ops(scope)]
    names = merged_alike([_op_text(op) for op in dict.fromkeys(ops) if op])
    return few(names, most=_MOST_NAMES, width=_NAME_WIDTH)


def _ops(scope: str) -> list[str]:
    """The ops that a name stack is of: several, if XLA merged them."""
    inside = _STEP.sub("", scope)
    merged = _MERGED.match(inside)
    return [merged[1] + op for op in merged[2].split(":")] if merged else [inside]


def _op_text(op: str) -> str:
    """An op's place in the user's model; what differentiation made of it says so."""
    return op_path(op) + (" (backward)" if "transpose(" in op else "")
