"""Times of a first plan on virtual CPU devices, and what GPUs would build for it.

    python cfp_test/bench/planning_time.py --json FILE [NAME ...]

Each program of cfp_test/programs is planned with the default settings and an empty
store, one after another. Beside it stands how many programs planning on GPUs builds
before its first search, which estimates on virtual devices leave as it is. Rows are
added to the JSON as they come, and programs that it holds already are not planned
again. `python -m cfp_test.results` makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

import cfp
from cfp.analysis.analyze import analyze
from cfp.cost.costs import Costs
from cfp.presets.presets import presets
from cfp.profiling.rates import Rates
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.search.choices import estimate_kinds, leading_presets
from cfp.search.requests import RequestBuilder
from cfp_test.programs.registry import PROGRAMS, programs_on
from cfp_test.support.checking import make_mesh

SIZES = (("x", 4),)


def row(name: str, make: Callable[[], Any]) -> dict[str, Any]:
    """Plans one program, and counts what GPUs would build first."""
    fn, args, *rest = make()
    options = dict(rest[0]) if rest else {}
    options.pop("tolerance", None)
    kwargs = options.pop("kwargs", {})
    mesh = make_mesh(SIZES)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        how = {"mesh": mesh, "cache_dir": cache, **options}
        plan = cfp.plan(fn, *args, **how, **kwargs)
    seconds = time.perf_counter() - started
    step = flatten_step(
        fn, args, kwargs, **{k: v for k, v in options.items() if k != "pins"}
    )
    program, _ = trace(step, planning_mesh(mesh))
    analysis = analyze(program, SIZES)
    return {
        "name": name,
        "seconds": round(seconds, 2),
        "race_seconds": round(plan.search["race_seconds"], 2),
        "ops": len(program.ops),
        "kinds": len(analysis.representatives),
        "raced": sum(r.time_ms is not None for r in plan.race),
        # None where nothing can be sharded, so that nothing was searched.
        "strategies_estimated": plan.search.get("strategies_estimated", 0),
        "builds_first_on_gpus": _builds_on_gpus(analysis),
        "winner": plan.winner,
        "samples_ms": {r.name: r.samples_ms for r in plan.race if r.samples_ms},
    }


def _builds_on_gpus(analysis: Any) -> int:
    """Programs that measuring begins with, by the defaults for GPUs."""
    rates = Rates.default(SIZES)
    estimates = estimate_kinds(analysis, rates)
    every = leading_presets(analysis, estimates, presets(analysis.frame), 1.6)
    maker = RequestBuilder(Costs(analysis, rates), every, estimates, ())
    first = maker.first(cfp.PlannerSettings().per_kind, 1)
    return len({job.key.digest for wanted in first for job in wanted.jobs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="by default all programs")
    parser.add_argument("--json", type=Path, required=True, help="where rows are kept")
    options = parser.parse_args()
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    data = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python cfp_test/bench/planning_time.py --json FILE",
        "rows": known.get("rows", []),
    }
    there = {r["name"] for r in data["rows"]}
    for name in programs_on(SIZES):
        if name in there or (options.names and name not in options.names):
            continue
        data["rows"].append(row(name, PROGRAMS[name]))
        print(json.dumps({k: data["rows"][-1][k] for k in ("name", "seconds", "ops")}))
        options.json.write_text(json.dumps(data, indent=1))
        jax.clear_caches()


if __name__ == "__main__":
    main()
