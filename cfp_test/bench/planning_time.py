"""How long a first plan takes on virtual CPU devices, and what GPUs would build for it.

    python cfp_test/bench/planning_time.py --json FILE [NAME ...] [--page FILE]

Each program of cfp_test/programs is planned with the default settings and an empty
store, one after another. Beside it stands how many programs planning on GPUs builds
before its first search, which estimates on virtual devices leave as it is. Rows are
added to the JSON as they come, and programs that it holds already are not planned
again; `--page` makes the results page of it and plans nothing.
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
from statistics import median
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

import cfp
from cfp.analysis.analyze import analyze
from cfp.presets import presets
from cfp.profiling.rates import Rates
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.search.shortlist import estimate_kinds, leading_classics
from cfp.search.wanted import WantedMaker
from cfp_test.checking import make_mesh
from cfp_test.programs.registry import PROGRAMS, programs_on

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
    estimates = estimate_kinds(analysis, Rates.default(SIZES))
    every = leading_classics(analysis, estimates, presets(analysis.frame), 1.6)
    maker = WantedMaker(analysis, every, estimates, ())
    first = maker.first(cfp.PlannerSettings().per_kind, 1)
    return len({job.key.digest for wanted in first for job in wanted.jobs})


def page(data: dict[str, Any]) -> str:
    """The results page."""
    rows = sorted(data["rows"], key=lambda r: -r["seconds"])
    seconds = [r["seconds"] for r in rows]
    lines = [
        "# Planning time on virtual CPU devices, November 2026",
        "",
        f"Every program of `cfp_test/programs` on x=4, planned with default settings "
        f"from an empty store, one after another: median {median(seconds):.1f} s, "
        f"worst {max(seconds):.1f} s, of {len(rows)} programs.",
        "",
        f"{data['machine']}; Python {data['python']}, jax {data['jax']}; "
        f"{data['date']}; `{data['command']}`. All samples of the races: "
        "the JSON beside this page.",
        "",
        "On GPUs nothing changed: the last column counts the programs that measuring "
        "begins with there. Virtual devices build only the raced ones.",
        "",
        "| program | seconds | of which race | ops | kinds of segments | raced | "
        "estimated | built first on GPUs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['name']} | {r['seconds']:.1f} | {r['race_seconds']:.1f} | {r['ops']} | "
        f"{r['kinds']} | {r['raced']} | {r['strategies_estimated']:.0f} | "
        f"{r['builds_first_on_gpus']} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="by default all programs")
    parser.add_argument("--json", type=Path, required=True, help="where rows are kept")
    parser.add_argument("--page", type=Path, help="write the results page, and end")
    options = parser.parse_args()
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.page:
        options.page.write_text(page(known))
        return
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
