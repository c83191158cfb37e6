"""The cost model's choice for a model, compiled and timed: a line as Alpa's scripts.

Takes the options of `cfp_test/gpt/gpt_test.sh`, and `--model`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from alpa_test.cost_model import LINKS, AlphaBeta, choose, fit
from cfp import platform
from cfp.analysis.analyze import program_flops
from cfp.cli.session import analyse
from cfp.context import open_context
from cfp.errors import CfpError
from cfp.models import find
from cfp.printable import parse_bytes
from cfp.profiling.collectives import measure_rates
from cfp.profiling.runner import execute
from cfp.search.guided import Candidate
from cfp.targets import model_target
from cfp_test.bench.case import make_choice
from cfp_test.bench.clock import QUICK_TURN, turn_on
from cfp_test.passes import model_passes, three_passes

RUNS = 3


def _options() -> tuple[str, dict[str, int], argparse.Namespace]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    three_passes.add_options(parser, Path(__file__).parent)
    parser.add_argument("--model", choices=three_passes.TITLES, required=True)
    parser.add_argument(
        "--link", choices=(*LINKS, "fitted"), default="fitted", help="between devices"
    )
    model_passes.add_sizes(parser)
    args = parser.parse_args()
    return args.model, model_passes.shape_of(args.model, args), args


def main() -> int:
    model, shape, args = _options()
    try:
        axes = platform.parse_mesh(args.device_num, None)
        platform.select(args.platform, axes)
        target = model_target(model, {**shape, "dtype": args.dtype})
        session = analyse(target, platform.make_mesh(axes))
        defaults = {option.name: option.default for option in find(model).options}
        title = f"Alpa {three_passes.TITLES[model]} test:"
        sizes = {**defaults, **shape}
        print(three_passes.headline(title, args.config, sizes, session.mesh.size))
        _run(session, args)
    except CfpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(session, args: argparse.Namespace) -> None:
    frame = session.analysis.frame
    budget = parse_bytes(args.memory_budget)
    with open_context(session.mesh, args.workdir) as context:
        if args.link == "fitted":
            prices = fit(measure_rates(session.mesh, context.store))
        else:
            prices = AlphaBeta.uniform(frame.mesh, LINKS[args.link])
    found = choose(session.analysis, prices, budget_bytes=budget)
    made = make_choice(session, Candidate("cost model", found.choice), {})
    timing = QUICK_TURN if args.quick else turn_on(session.mesh)
    records = [
        execute(
            made.built,
            made.kinds,
            session.mesh,
            feedback=made.feedback,
            timing=timing,
        )
        for _ in range(RUNS)
    ]
    for record in records:
        if not record.ok:
            raise CfpError(f"It did not run: {record.status}: {record.reason}")
    costs = [statistics.median(r.samples_ms) / 1000 for r in records]
    tflop = program_flops(frame.program) / 1e12
    print(f"[{' '.join(f'{cost:.8f}' for cost in costs)}]")
    print(f"TFLOP_COUNT: {tflop}")
    print(f"tflops: {[tflop / cost for cost in costs]}\n", flush=True)
    three_passes.append_row(
        args.json,
        {
            "model": session.target.name,
            "devices": session.mesh.size,
            "batch": int(session.target.args[1]["tokens"].shape[0]),
            "dtype": args.dtype,
            "winner": f"cost model, {args.link}",
            "believed_ms": found.cost_ms,
            "solver_seconds": found.seconds,
            "cost_seconds": costs,
            "samples_ms": [s for r in records for s in r.samples_ms],
            "peak_bytes": made.built.peak_bytes,
            "tflop": tflop,
        },
    )


if __name__ == "__main__":
    raise SystemExit(main())
