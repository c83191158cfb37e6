"""Results of analyze, profile and curves of links, as tables and as plain data."""

from __future__ import annotations

from math import prod
from typing import Any

from rich import box
from rich.console import RenderableType

from cfp.analysis.analyze import Analysis, program_flops
from cfp.analysis.dump import OPAQUE, opaque_lines, segment_records
from cfp.analysis.segments import Segment
from cfp.analysis.strategies import Strategy, block_strategies
from cfp.plan.describe import op_text
from cfp.printable import counted, format_bytes, format_flops
from cfp.profiling.collectives import Rates, sent_share
from cfp.search.requests import Profiles
from cfp.view.console import Row, Rows, row_of, sheet
from cfp.view.words import STRATEGIES

_MOST_OPAQUE, _COUNTS = 5, ("measured", "cached", "failed")


def strategy_numbers(
    analysis: Analysis, segment: Segment, strategies: tuple[Strategy, ...]
) -> list[int]:
    """Returns for each block its strategy's index in the block's list of strategies."""
    frame = analysis.frame
    return [
        block_strategies(frame.program, frame.blocks[b], frame.mesh).index(strategy)
        for b, strategy in zip(segment.blocks, strategies, strict=True)
    ]


def analysis_data(analysis: Analysis, seconds: float) -> dict[str, Any]:
    """Collects blocks, segments, arguments and ops without a rule, for JSON."""
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
        "arguments": list(program.arg_names),
        "opaque_ops": list(opaque_lines(program))[1:],
    }


def analysis_view(data: dict[str, Any], border: box.Box) -> RenderableType:
    """Renders `analysis_data`: a table of kinds' blocks, up to 5 ops without rules."""
    blocks, segments, opaque = data["blocks"], data["segments"], data["opaque_ops"]
    kinds = [one for one in segments if one["representative"]]
    head = (
        f"{counted(data['ops'], 'op', 'ops')}, "
        f"{counted(len(blocks), 'block', 'blocks')}, "
        f"{counted(len(segments), 'segment', 'segments')} of "
        f"{counted(len(kinds), 'kind', 'kinds')}, {format_flops(data['flops'])} per "
        f"step; analysed in {data['seconds']:.2f} s"
    )
    rows = []
    for one in kinds:
        first = str(one["kind"]), _members(segments, one["kind"])
        start, end = one["blocks"]
        for block, count in zip(blocks[start:end], one["strategies"], strict=True):
            cells = (*first, block["name"], block["op"], str(count))
            rows.append(Row(cells=cells, ends=block is blocks[end - 1]))
            first = "", ""
    headings = ("kind", "segments", "block", "operation", "strategies")
    lines = [counted(len(opaque), *OPAQUE)] * bool(opaque) + opaque[:_MOST_OPAQUE]
    if (more := len(opaque) - _MOST_OPAQUE) > 0:
        lines.append(f"and {more} more")
    table = Rows(title="Segments", headings=headings, rows=rows)
    return sheet(border, head, [table], lines)


def _members(segments: list[dict[str, Any]], kind: int) -> str:
    return ", ".join(str(one["index"]) for one in segments if one["kind"] == kind)


def profiles_data(analysis: Analysis, profiles: Profiles) -> dict[str, Any]:
    """Collects requested measurements for JSON; strategies by `strategy_numbers`."""
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
        **{name: profiles.counts[f"strategies_{name}"] for name in _COUNTS},
        "seconds": profiles.counts["profile_seconds"],
        "rounds": len(profiles.rounds) - 1,
        "profiles": found,
    }


def profiles_view(
    data: dict[str, Any], segments: list[dict[str, Any]], border: box.Box
) -> RenderableType:
    """Tabulates kinds of segments: numbers measured and failed, best and worst ms."""
    rows = []
    for kind in sorted({one["kind"] for one in segments}):
        mine = [one for one in data["profiles"] if one["kind"] == kind]
        times = [one["time_ms"] for one in mine if one["time_ms"] is not None]
        missing = sum(one["status"] == "missing" for one in mine)
        counts = str(len(times)), str(len(mine) - len(times) - missing)
        ends = [f"{most(times):.3f} ms" if times else "-" for most in (min, max)]
        rows.append(row_of(str(kind), _members(segments, kind), *counts, *ends))
    headings = ("kind", "segments", "measured", "failed", "best", "worst")
    line = (
        f"{counted(data['measured'], *STRATEGIES)} measured, {data['cached']} from the "
        f"cache, {data['failed']} failed; {data['seconds']:.1f} s"
    )
    table = Rows(title="Profiles", headings=headings, rows=rows)
    return sheet(border, "", [table], [line])


# ---------------------------------------------------------------- rates of collectives


def curve_points(rates: Rates) -> list[dict[str, Any]]:
    """Lists all measured collectives, by axes, kind and size.

    `size_bytes` is the whole tensor of a group of devices, as in `Rates.collective_ms`.
    `sent_gb_per_s` is the rate at which each device of a ring sends, in 1e9 bytes/s.
    """
    sizes, found = dict(rates.mesh), []
    for (kind, axes), curve in sorted(rates.curves.items(), key=lambda p: p[0][::-1]):
        share = sent_share(kind, prod(sizes[name] for name in axes)) / 1e6
        for size, time_ms in curve:
            point = {"kind": kind, "axes": axes, "size_bytes": size, "time_ms": time_ms}
            found.append({**point, "sent_gb_per_s": size * share / time_ms})
    return found


def curves_data(rates: Rates, link_gb_per_s: float | None) -> dict[str, Any]:
    """Collects measured collectives, and the devices' rates, for JSON."""
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
    """Tabulates collectives: times, rates, and shares of `link_gb_per_s` if given."""
    headings = ("collective", "axes", "tensor", "ms", "GB/s sent", "of link")
    rows = []
    for point in curve_points(rates):
        sent = point["sent_gb_per_s"]
        share = f"{sent / link_gb_per_s:.0%}" if link_gb_per_s else "-"
        cells = (format_bytes(point["size_bytes"]), f"{point['time_ms']:.4f}")
        axes = ",".join(point["axes"])
        rows.append(row_of(point["kind"], axes, *cells, f"{sent:.1f}", share))
    return Rows(title="Collectives", headings=headings, rows=rows).filled()
