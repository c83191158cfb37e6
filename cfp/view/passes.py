"""Results of single passes, and rates of collectives, as tables and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from rich import box
from rich.console import RenderableType

from cfp.analysis.analyze import Analysis
from cfp.analysis.dump import opaque_lines, opaque_ops, segment_records
from cfp.analysis.layout import Choice, lay_out, program_flops
from cfp.analysis.segments import Segment
from cfp.analysis.storage import spec_ways
from cfp.analysis.strategies import Strategy, block_strategies
from cfp.plan.describe import block_moves, op_text
from cfp.printable import counted
from cfp.profiling.rates import Rates, sent_share
from cfp.search.requests import Profiles
from cfp.units import format_bytes, format_flops
from cfp.view.console import Row, Rows, sheet
from cfp.view.words import STRATEGIES

_MOST_OPAQUE = 5


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


def _members(analysis: Analysis, kind: int) -> str:
    return ", ".join(str(s.index) for s in analysis.segments if s.kind == kind)


def analysis_view(
    analysis: Analysis, seconds: float, border: box.Box
) -> RenderableType:
    """Kinds of segments, the blocks of each, and the ops that cannot be sharded."""
    frame, program = analysis.frame, analysis.frame.program
    head = (
        f"{counted(len(program.ops), 'op', 'ops')}, "
        f"{counted(len(frame.blocks), 'block', 'blocks')}, "
        f"{counted(len(analysis.segments), 'segment', 'segments')} of "
        f"{counted(len(analysis.representatives), 'kind', 'kinds')}, "
        f"{format_flops(program_flops(program))} per step; analysed in {seconds:.2f} s"
    )
    rows = []
    for kind, index in enumerate(analysis.representatives):
        segment = analysis.segments[index]
        first = str(kind), _members(analysis, kind)
        sizes = search_space(analysis, segment)
        for b, size in zip(segment.blocks, sizes, strict=True):
            block = frame.blocks[b]
            op = op_text(program, program.ops[block.anchor])
            ends = b == segment.blocks[-1]
            rows.append(Row(cells=(*first, block.name, op, str(size)), ends=ends))
            first = "", ""
    headings = ("kind", "segments", "block", "operation", "strategies")
    opaque = [*opaque_lines(program)] if opaque_ops(program) else []
    lines = opaque[: _MOST_OPAQUE + 1]
    if len(opaque) > _MOST_OPAQUE + 1:
        lines.append(f"and {len(opaque) - _MOST_OPAQUE - 1} more")
    return sheet(
        border, head, [Rows(title="Segments", headings=headings, rows=rows)], lines
    )


def analysis_data(analysis: Analysis, seconds: float) -> dict[str, Any]:
    """The same as plain data."""
    program = analysis.frame.program
    return {
        "ops": len(program.ops),
        "flops": program_flops(program),
        "seconds": seconds,
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


def profiles_view(
    analysis: Analysis, profiles: Profiles, border: box.Box
) -> RenderableType:
    """For each kind of segment what was measured, the best and the worst."""
    rows, records = [], profiles.records
    for kind in range(len(analysis.representatives)):
        mine = (w for w in profiles.requests if w.kind == kind)
        known = [w for w in mine if w.outcome(records) is not None]
        times = [w.alone_ms(records) for w in known if w.is_measured(records)]
        counts = str(len(times)), str(len(known) - len(times))
        ends = [f"{most(times):.3f} ms" if times else "-" for most in (min, max)]
        rows.append(Row(cells=(str(kind), _members(analysis, kind), *counts, *ends)))
    headings = ("kind", "segments", "measured", "failed", "best", "worst")
    counts = profiles.counts
    line = (
        f"{counted(counts['strategies_measured'], *STRATEGIES)} measured, "
        f"{counts['strategies_cached']} from the cache, "
        f"{counts['strategies_failed']} failed; {counts['profile_seconds']:.1f} s"
    )
    return sheet(
        border, "", [Rows(title="Profiles", headings=headings, rows=rows)], [line]
    )


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


def presets_rows(found: list[dict[str, Any]]) -> Rows:
    """The presets as a table."""
    rows = []
    for item in found:
        sent = sorted(item["collective_bytes"].items(), key=lambda pair: -pair[1])
        sends = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sent) or "-"
        held = format_bytes(item["argument_bytes"])
        rows.append(Row(cells=(item["name"], held, sends)))
    headings = ("name", "arguments per device", "collectives in a step")
    return Rows(title="Presets", headings=headings, rows=rows)


# ---------------------------------------------------------------- rates of collectives


def curve_points(rates: Rates) -> list[dict[str, Any]]:
    """All measured collectives, by axes, kind and size.

    `size_bytes` is the whole tensor of a group, as of `Rates.collective_ms`;
    `sent_gb_per_s` the bytes that each device sent, as in a ring, in 1e9 a second.
    """
    sizes, found = dict(rates.mesh), []
    for (kind, axes), curve in sorted(rates.curves.items(), key=lambda p: p[0][::-1]):
        share = sent_share(kind, prod(sizes[name] for name in axes)) / 1e6
        for size, time_ms in curve:
            point = {"kind": kind, "axes": axes, "size_bytes": size, "time_ms": time_ms}
            found.append({**point, "sent_gb_per_s": size * share / time_ms})
    return found


def curves_data(rates: Rates, link_gb_per_s: float | None) -> dict[str, Any]:
    """The curves and rates, as JSON."""
    return {
        "mesh": dict(rates.mesh),
        "link_gb_per_s": link_gb_per_s,
        "matmul_tflop_per_s": {
            dtype: flops / 1e9 for dtype, flops in rates.matmul_flops_per_ms.items()
        },
        "memory_gb_per_s": rates.memory_bytes_per_ms / 1e6,
        "collectives": curve_points(rates),
    }


def curves_rows(rates: Rates, link_gb_per_s: float | None) -> Rows:
    """The curves, a line for each size."""
    headings = ("collective", "axes", "tensor", "ms", "GB/s sent", "of link")
    rows = []
    for point in curve_points(rates):
        sent = point["sent_gb_per_s"]
        cells = [point["kind"], ",".join(point["axes"])]
        cells += [format_bytes(point["size_bytes"]), f"{point['time_ms']:.4f}"]
        cells += [
            f"{sent:.1f}",
            f"{sent / link_gb_per_s:.0%}" if link_gb_per_s else "-",
        ]
        rows.append(Row(cells=tuple(cells)))
    return Rows(title="Collectives", headings=headings, rows=rows).filled()
