"""The three passes one at a time, with the output of CFP's artifact.

The folders `moe/` and others hold the shell entry points; each says what its options
mean for its model.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cfp import platform
from cfp.analysis.analyze import Analysis, program_flops
from cfp.analysis.dump import (
    block_lines,
    op_line,
    strategy_map,
    write_files,
)
from cfp.analysis.layout import Layout, lay_out
from cfp.analysis.strategies import block_strategies
from cfp.cli.planning import search_stored
from cfp.cli.session import Session, analyse, dump_session
from cfp.cli.supervise import Supervision
from cfp.cluster.doctor import shows_nvidia
from cfp.context import DetailedSettings, PlannerSettings, open_context
from cfp.errors import CfpError
from cfp.models import find
from cfp.passes import profile
from cfp.profiling.store import store_path
from cfp.search.requests import MeasurementRequest
from cfp.settings import ConstraintLevel
from cfp.targets import model_target
from cfp.view.console import Display
from cfp.view.passes import strategy_numbers
from cfp_test.support.golden import plan_text

GIB = 2**30
TITLES = {"gpt": "GPT", "bert": "BERT", "llama": "LLAMA", "moe": "MoE"}


def add_options(parser: argparse.ArgumentParser, workdir: Path) -> None:
    """Adds the options that the tests of all models share."""
    parser.add_argument(
        "--mode", choices=("analysis", "profile", "search", "all"), required=True
    )
    parser.add_argument("--config", default="F", help="a name for the sizes' headline")
    parser.add_argument("--json", type=Path, help="append a row about the search here")
    parser.add_argument("--platform", choices=platform.PLATFORMS)
    parser.add_argument("--device_num", "--devices", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--workdir", type=Path, default=workdir)
    parser.add_argument("--memory_budget", help="of one device, such as 40GiB")
    parser.add_argument("--quick", action="store_true", help="measure less")
    parser.add_argument(
        "--per_kind", type=int, default=PlannerSettings().per_kind, help="to measure"
    )


def run(model: str, shape: Mapping[str, int], args: argparse.Namespace) -> int:
    """Runs one pass; returns the exit code.

    Args:
        model: name in the zoo.
        shape: options of the model, `dtype` apart.
        args: what `add_options` parsed.
    """
    try:
        if args.mode != "analysis":
            Supervision().enter(store_path(args.workdir))
        axes = platform.parse_mesh(args.device_num, None)
        platform.select(args.platform or _found_platform(), axes)
        target = model_target(model, {**shape, "dtype": args.dtype})
        session = analyse(target, platform.make_mesh(axes))
        passes = {"analysis": _analysis, "profile": _profile, "search": _search}
        if args.mode == "all":
            _all(model, shape, session, args)
        else:
            passes[args.mode](session, args)
    except CfpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. What was measured is kept.", file=sys.stderr)
        return 130
    return 0


def headline(title: str, config: str, shape: Mapping[str, int], devices: int) -> str:
    """The line above a setting, as the artifact prints it."""
    return (
        f"============ {title} config:{config} batchsize:{shape['batch']} "
        f"layers:{shape['layers']} devices:{devices} ============"
    )


def _all(
    model: str, shape: Mapping[str, int], session: Session, args: argparse.Namespace
) -> None:
    """All passes, as the artifact's performance test prints them."""
    known = {option.name: option.default for option in find(model).options}
    sizes = {**known, **shape}
    title = f"{TITLES[model]} test: parallel_block_opt:True"
    print("=" * 120)
    print(headline(title, args.config, sizes, session.mesh.size), flush=True)
    print("***********Analysis Pass****************")
    _analysis(session, args)
    print("***********Profiling Pass****************", flush=True)
    _profile(session, args)
    print("***********Search Pass****************", flush=True)
    _search(session, args)
    print("=" * 65, flush=True)


def append_row(file: Path | None, row: Mapping[str, Any]) -> None:
    """Adds a row of JSON to a file, if one is named."""
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")


def _settings(args: argparse.Namespace) -> PlannerSettings:
    quick: dict[str, Any] = {
        "in_context": False,
        "constraint_levels": (ConstraintLevel.EVERYTHING,),
    }
    how = quick if args.quick else {}
    return DetailedSettings(per_kind=args.per_kind, measure=True, **how)


def _found_platform() -> str:
    return "cuda" if shows_nvidia() else "cpu"


def _talkative() -> bool:
    return os.environ.get("DUMP_PROFILE_PARALLEL_BLOCK", "1") != "0"


def sequence_lines(analysis: Analysis) -> Iterator[str]:
    """The segments, each mapped to the first of its kind."""
    first: dict[int, tuple[int, int]] = {}
    for segment in analysis.segments:
        span = (segment.start, segment.end)
        known = first.setdefault(segment.kind, span)
        yield f"ParallelBlocks sequence: {span} mapped to  {known}"


def layout_lines(layout: Layout) -> Iterator[str]:
    """Every op with the sharding of what it makes, as a plan has it."""
    program = layout.frame.program
    for op in program.ops:
        specs = [layout.spec(v) for v in op.results]
        text = " ".join("any" if spec is None else _spec_text(spec) for spec in specs)
        yield f"{op_line(program, op)}, sharding={text}"


def _spec_text(spec: tuple[tuple[str, ...], ...]) -> str:
    """A sharding on one line: ``[x, -, y+z]``."""
    return "[" + ", ".join("+".join(names) or "-" for names in spec) + "]"


def _print_lines(lines) -> None:
    for line in lines:
        print(line)


def _analysis(session: Session, args: argparse.Namespace) -> None:
    if _talkative():
        for block in session.analysis.frame.blocks:
            _print_lines(block_lines(session.analysis.frame, block))
    if _talkative() or args.mode != "all":
        _print_lines(sequence_lines(session.analysis))
    print(f"global analysis time: {session.seconds}")
    print(f"FLOP_COUNT: {program_flops(session.analysis.frame.program) / 1e12}")
    folder = dump_session(session, args.workdir)
    if _talkative() or args.mode != "all":
        print(f"debug files: {folder}")


def _profile(session: Session, args: argparse.Namespace) -> None:
    analysis = session.analysis
    frame = analysis.frame
    talks = _talkative() or args.mode != "all"
    if talks:
        print(f"NUM SEGMENT is {len(analysis.representatives)}")
    else:
        print("Profiling...", flush=True)
    with Display() as display:
        settings = replace(_settings(args), progress=display.tell)
        with open_context(session.mesh, args.workdir, settings=settings) as context:
            made = profile(context, analysis)
    for kind, index in enumerate(analysis.representatives):
        segment = analysis.segments[index]
        found = [
            _profile_data(session, kind, item, made.records)
            for item in made.requests
            if item.kind == kind
        ]
        if talks:
            print(f"\nRUN AutoSharding FOR SEGMENT {kind} segment_{kind}\n")
        if _talkative():
            counts = [
                len(block_strategies(frame.program, frame.blocks[b], frame.mesh))
                for b in segment.blocks
            ]
            print(f"segment PB search space: {counts}")
            _print_lines(map(_profile_line, found))
        write_files(
            args.workdir / f"debug_segment_{kind}_analysis_segment",
            {
                "strategy_map.txt": "\n".join(
                    line
                    for b in segment.blocks
                    for line in strategy_map(frame, frame.blocks[b])
                ),
                "profiles.json": json.dumps(found, indent=1),
            },
        )
    print(f"overlapped_profiling overall time {made.counts['profile_seconds']}")


def _profile_data(
    session: Session, kind: int, item: MeasurementRequest, records
) -> dict:
    analysis = session.analysis
    segment = analysis.segments[analysis.representatives[kind]]
    record = records[item.own_job.key.digest]
    numbers = strategy_numbers(analysis, segment, item.candidate.strategies)
    return {
        "segment": kind,
        "strategies": numbers,
        "storage": str(item.candidate.storage),
        "status": record.status,
        "time_ms": item.time_ms(records) if item.is_measured(records) else None,
        "samples_ms": record.samples_ms,
        "peak_bytes": record.peak_bytes,
    }


def _profile_line(found: dict) -> str:
    cost = found["time_ms"] / 1000 if found["time_ms"] is not None else float("inf")
    line = (
        f"SegmentIdx: {found['segment']} ParallelBlock Strategy: {found['strategies']} "
        f"avgcost: {cost} mem_cost(GB): {round(found['peak_bytes'] / GIB, 4)} "
        f"storage: {found['storage']}"
    )
    return line if found["status"] == "ok" else f"{line} ({found['status']})"


def _search(session: Session, args: argparse.Namespace) -> None:
    analysis = session.analysis
    with Display() as display:
        settings = replace(_settings(args), progress=display.tell)
        found = search_stored(session, args.workdir, args.memory_budget, settings)
    plan = found.plan
    numbers = [
        number
        for segment in analysis.segments
        for number in strategy_numbers(
            analysis,
            segment,
            tuple(found.winner.choice.blocks[b] for b in segment.blocks),
        )
    ]
    winner = next(row for row in plan.race if row.name == plan.winner)
    costs = [statistics.median(part) / 1000 for part in _thirds(winner.samples_ms)]
    tflop = program_flops(analysis.frame.program) / 1e12
    print(f"searched ParallelBlock Strategies solution: {numbers}")
    shown = " ".join(f"{cost:.8f}" for cost in costs)
    memory = round((plan.peak_bytes or 0) / GIB, 4)
    print(f"searched training cost: [{shown}], memory_cost: {memory}")
    print(f"TFLOP_COUNT: {tflop}")
    print(f"tflops: {[tflop / cost for cost in costs]}")
    table = plan_text(plan)
    if _talkative() or args.mode != "all":
        print(f"\n{table}")
    append_row(
        args.json,
        {
            "model": session.target.name,
            "devices": session.mesh.size,
            "environment": dict(plan.environment),
            "batch": int(session.target.args[1]["tokens"].shape[0]),
            "dtype": args.dtype,
            "winner": plan.winner,
            "solution": numbers,
            "cost_seconds": costs,
            "samples_ms": winner.samples_ms,
            "memory_gib": memory,
            "tflop": tflop,
            "tflops": [tflop / cost for cost in costs],
            "search": dict(plan.search),
        },
    )
    layout = lay_out(analysis.frame, found.winner.choice)
    write_files(
        args.workdir / "debug_search",
        {
            "plan.json": plan.to_json(),
            "plan.txt": table,
            "after_ir.txt": "".join(f"{line}\n" for line in layout_lines(layout)),
        },
    )


def _thirds(samples: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Three runs of samples, in the order taken; fewer if there are fewer."""
    size = max(1, len(samples) // 3)
    return [samples[i * size : (i + 1) * size] for i in range(min(3, len(samples)))]
