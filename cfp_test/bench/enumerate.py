"""Block strategies of a layer, one by one: what each should send, and what it takes.

    python -m cfp_test.bench.enumerate gpt [--devices N] [--platform cpu|cuda]
        [--limit 64] [--per_block 3] [--json FILE] [--plot FILE] [more options]

For every combination, as CFP's artifact prints it: the volume that each device sends in
theory, seconds in kernels that communicate and in kernels that compute, by a profiler's
trace, and the step times in seconds with the memory in bytes. Added here: how much of
the communication ran beside compute, and how much held it up. A plot shows volume
against time: were modelling enough, it would be a line.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax

from alpa_test.cost_model.communication import sent_share
from cfp import platform
from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, lay_out
from cfp.analysis.presets import PRESETS, presets
from cfp.analysis.strategies import NONE, Strategy, block_strategies
from cfp.cli.session import Session, analyse
from cfp.cluster.doctor import shows_nvidia
from cfp.errors import CfpError
from cfp.models import find
from cfp.plan.describe import block_moves
from cfp.profiling.builder import BuildEnvironment, reason_of
from cfp.profiling.runner import execute
from cfp.search.guided import Candidate
from cfp.settings import ConstraintLevel
from cfp.targets import model_target
from cfp_test.bench.case import Ready, make_choice
from cfp_test.bench.clock import QUICK_TURN, traced, turn_on
from cfp_test.bench.passes import SIZES
from cfp_test.passes import model_passes, three_passes

RUNS = 3


# ------------------------------------------------------------------- what there is


def repeated_kind(analysis: Analysis) -> int:
    """The kind of segment that there are most of; of several the largest."""
    kinds = [segment.kind for segment in analysis.segments]
    return max(
        dict.fromkeys(kinds),
        key=lambda kind: (
            kinds.count(kind),
            len(analysis.segments[analysis.representatives[kind]].blocks),
        ),
    )


def layer_options(analysis: Analysis, kind: int, per_block: int) -> list[list[int]]:
    """For each block of a layer the numbers of the strategies to combine.

    Those of the presets come first, then others that split it over all axes.
    """
    parts = [layer_numbers(analysis, kind, c) for c in _presets(analysis).values()]
    found = []
    for place, every in enumerate(_layer_strategies(analysis, kind)):
        first = [numbers[place] for numbers in parts]
        split = [i for i, s in enumerate(every) if all(a.inner != NONE for a in s)]
        found.append(list(dict.fromkeys([*first, *split]))[:per_block])
    return found


def layer_numbers(analysis: Analysis, kind: int, choice: Choice) -> list[int]:
    """A choice's strategies in one layer of a kind, as numbers."""
    blocks = analysis.segments[analysis.representatives[kind]].blocks
    strategies = _layer_strategies(analysis, kind)
    return [
        every.index(choice.blocks[b])
        for every, b in zip(strategies, blocks, strict=True)
    ]


def _layer_strategies(analysis: Analysis, kind: int) -> list[list[Strategy]]:
    frame = analysis.frame
    blocks = analysis.segments[analysis.representatives[kind]].blocks
    return [
        block_strategies(frame.program, frame.blocks[b], frame.mesh) for b in blocks
    ]


def combinations(
    analysis: Analysis, kind: int, options: Sequence[Sequence[int]], limit: int
) -> list[tuple[int, ...]]:
    """Lists combinations to measure: the presets', and others drawn at random.

    Returns:
      At most `limit`, as numbers of the layer's block strategies; all there are, in
      order, if that is enough.
    """
    total = 1
    for numbers in options:
        total *= len(numbers)
    if total <= limit:
        return list(itertools.product(*options))
    found = {
        tuple(layer_numbers(analysis, kind, choice)): None
        for choice in _presets(analysis).values()
    }
    draw = random.Random(0)
    while len(found) < limit:
        found[tuple(draw.choice(numbers) for numbers in options)] = None
    return list(found)[:limit]


def _presets(analysis: Analysis) -> dict[str, Choice]:
    every = presets(analysis.frame)
    return {name: choice for name, choice in every.items() if name in PRESETS}


def choice_of(analysis: Analysis, kind: int, numbers: Sequence[int]) -> Choice:
    """All layers of a kind by these strategies, the rest data parallel."""
    frame = analysis.frame
    base = presets(frame)["data_parallel"]
    blocks: list[Strategy] = list(base.blocks)
    for segment in analysis.segments:
        if segment.kind == kind:
            for b, number in zip(segment.blocks, numbers, strict=True):
                every = block_strategies(frame.program, frame.blocks[b], frame.mesh)
                blocks[b] = every[number]
    return Choice(tuple(blocks), base.storage)


def theoretical_volume(analysis: Analysis, choice: Choice) -> float:
    """Bytes that a device sends in one step, by Shardy's rules and Alpa's formulas."""
    sizes = dict(analysis.frame.mesh)
    total = 0.0
    layout = lay_out(analysis.frame, choice)
    for _, kind, axes, size, turns in block_moves(analysis, layout):
        ways = prod(sizes[axis] for axis in axes)
        total += sent_share(kind, ways) * turns * size
    return total


# ------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Compiled:
    """A combination, compiled; without a program where it cannot be.

    Attributes:
      row: what is known of it.
      made: the program.
    """

    row: Mapping[str, Any]
    made: Ready | None = None


def compiled(
    session: Session, kind: int, numbers: Sequence[int], args: argparse.Namespace
) -> Compiled:
    """Compiles one combination; several may be compiled at once."""
    analysis = session.analysis
    choice = choice_of(analysis, kind, numbers)
    row: dict[str, Any] = {
        "sval": sval(analysis, kind, numbers),
        "volume_bytes": theoretical_volume(analysis, choice),
    }
    where = session.mesh.devices.flat[0].platform
    environment = BuildEnvironment(folder=args.workdir)
    candidate = Candidate(str(row["sval"]), choice, level=ConstraintLevel.EVERYTHING)
    try:
        made = make_choice(session, candidate, environment.options(where))
    except Exception as error:  # Compilers' errors have no type in common.
        failed = {"status": "compile_error", "reason": reason_of(error)}
        return Compiled({**row, **failed})
    return Compiled({**row, "status": "ok"}, made)


def sval(analysis: Analysis, kind: int, numbers: Sequence[int]) -> list[int]:
    """A combination's strategies in all layers."""
    return list(numbers) * [s.kind for s in analysis.segments].count(kind)


def measured(
    one: Compiled, session: Session, args: argparse.Namespace
) -> dict[str, Any]:
    """One combination, timed and traced."""
    row, made, costs = dict(one.row), one.made, []
    if made is None:
        return row
    for _ in range(RUNS):
        record = execute(
            made.built,
            made.kinds,
            session.mesh,
            feedback=made.feedback,
            timing=QUICK_TURN if args.quick else turn_on(session.mesh),
        )
        if not record.ok:
            return {**row, "status": record.status, "reason": record.reason}
        costs.append(statistics.median(record.samples_ms) / 1000)
    found = traced(made, session.mesh)
    return {
        **row,
        "cost_seconds": costs,
        "memory_bytes": made.built.peak_bytes,
        "collectives": [asdict(one) for one in made.built.collectives],
        "trace": asdict(found) if found else None,
    }


def lines(row: Mapping[str, Any]) -> Iterator[str]:
    """A combination as the artifact prints it."""
    yield f"Comm Volume: {row['volume_bytes']:.6g}"
    if row["status"] != "ok":
        yield f"sval {row['sval']} {row['status']}: {row['reason'].splitlines()[0]}"
        return
    trace = row["trace"]
    if trace is not None:
        yield f"Comm Overhead: {trace['communication_ms'] / 1000:.6g}"
        yield f"Comp Overhead: {trace['compute_ms'] / 1000:.6g}"
        yield f"Overlapped: {trace['overlapped_ms'] / 1000:.6g}"
        yield f"Exposed: {trace['exposed_ms'] / 1000:.6g}"
    shown = " ".join(f"{cost:.8f}" for cost in row["cost_seconds"])
    yield f"sval {row['sval']} [{shown}] {row['memory_bytes']}"


def plot(rows: Sequence[Mapping[str, Any]], title: str, file: Path) -> None:
    """Volume against measured step time; colour tells how much of it was exposed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran = [row for row in rows if row["status"] == "ok"]
    volume = [row["volume_bytes"] / 2**30 for row in ran]
    times = [1000 * statistics.median(row["cost_seconds"]) for row in ran]
    exposed = [(row["trace"] or {}).get("exposed_ms", 0.0) for row in ran]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    points = axes.scatter(volume, times, c=exposed, cmap="viridis", s=24)
    figure.colorbar(points, label="communication exposed, ms")
    axes.set(
        xlabel="communication volume by formula, GiB sent by each device",
        ylabel="measured step time, ms",
        title=title,
    )
    axes.grid(alpha=0.3)
    figure.savefig(file)
    pyplot.close(figure)


def _known(file: Path | None, headline: str) -> list[dict[str, Any]]:
    """Reads the rows of an earlier run of the same model."""
    if file is None or not file.exists():
        return []
    found = json.loads(file.read_text())
    return found["rows"] if found["headline"] == headline else []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=three_passes.TITLES)
    parser.add_argument("--devices", type=int, help="all there are, if not given")
    parser.add_argument("--platform", choices=platform.PLATFORMS)
    parser.add_argument("--config", default="F", help="a name for the sizes' headline")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--limit", type=int, default=64, help="combinations to measure")
    parser.add_argument("--per_block", type=int, default=3, help="strategies of each")
    parser.add_argument("--compiles", type=int, default=1, help="at a time")
    parser.add_argument("--workdir", type=Path, help="for what compilers keep")
    parser.add_argument("--json", type=Path, help="all rows; those in it stay")
    parser.add_argument("--plot", type=Path, help="draw volume against time here")
    parser.add_argument("--quick", action="store_true", help="time two steps a run")
    model_passes.add_sizes(parser)
    # The sizes of the artifact's example; what follows on the command line wins.
    model = parser.parse_known_args()[0].model
    layers = "4" if model == "moe" else "2"  # Every second one has experts.
    usual = [*SIZES[model].split(), "--batch_size", "16", "--num_layer", layers]
    args = parser.parse_args([model, *usual, *sys.argv[2:]])
    try:
        with contextlib.ExitStack() as stack:
            if args.workdir is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                args.workdir = Path(folder)
            return _run(args)
    except CfpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    axes = platform.parse_mesh(args.devices, None)
    where = args.platform or ("cuda" if shows_nvidia() else "cpu")
    platform.select(where, axes)
    shape = model_passes.shape_of(args.model, args)
    target = model_target(args.model, {**shape, "dtype": args.dtype})
    session = analyse(target, platform.make_mesh(axes))
    analysis = session.analysis
    defaults = {option.name: option.default for option in find(args.model).options}
    title = f"{three_passes.TITLES[args.model]} test: parallel_block_opt:True"
    sizes = {**defaults, **shape}
    headline = three_passes.headline(title, args.config, sizes, session.mesh.size)
    print(headline)
    kind = repeated_kind(analysis)
    options = layer_options(analysis, kind, args.per_block)
    repeats = [s.kind for s in analysis.segments].count(kind)
    space = [len(numbers) for numbers in options] * repeats
    print(f"generated_search_space: {space}", flush=True)
    rows = _known(args.json, headline)
    known = [row["sval"] for row in rows]
    wanted = [
        numbers
        for numbers in combinations(analysis, kind, options, args.limit)
        if sval(analysis, kind, numbers) not in known
    ]
    for start in range(0, len(wanted), args.compiles):
        part = wanted[start : start + args.compiles]
        with ThreadPoolExecutor(args.compiles) as pool:
            made = [*pool.map(lambda n: compiled(session, kind, n, args), part)]
        for one in made:
            rows.append(measured(one, session, args))
            for line in lines(rows[-1]):
                print(line, flush=True)
            if args.json is not None:
                found = {"headline": headline, "space": space, "rows": rows}
                args.json.write_text(json.dumps(found, indent=1) + "\n")
        jax.clear_caches()
    if args.plot is not None:
        plot(rows, f"{three_passes.TITLES[args.model]}, {len(rows)} plans", args.plot)
        print(f"plot: {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
