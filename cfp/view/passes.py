"""Results of each pass, and of compiling, as tables and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from cfp.analysis.layout import Choice, lay_out, program_flops
from cfp.analysis.segments import Segment
from cfp.analysis.storage import spec_ways
from cfp.analysis.strategies import Strategy, block_strategies
from cfp.plan.describe import block_moves, op_text
from cfp.printable import counted
from cfp.search.requests import Profiles
from cfp.units import format_bytes, format_flops
from cfp.view.console import Fitted, new_table
from cfp.view.words import STRATEGIES

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
