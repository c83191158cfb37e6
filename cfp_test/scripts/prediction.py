"""Compares predictions: profiles a model, then times whole plans.

    python cfp_test/scripts/prediction.py TARGET [TARGET'S OPTIONS] --json FILE
        [--mesh x=4] [--per-kind 6] [--plans 14] [--seed 0] [--workdir DIR]

Takes the presets and random mixes of what was measured, predicts time and memory of
each from the profiles, and only then compiles them whole: what the compiler says they
need, what the device's own high-water mark is, and what a step takes, in turn A B C,
A B C. Prints a line for each plan, and writes everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path

import jax

from cfp import platform
from cfp.analysis.analyze import Analysis
from cfp.cli.session import analyse, open_target
from cfp.context import open_context
from cfp.passes.profile import profile
from cfp.passes.search import search
from cfp.planner_settings import PlannerSettings
from cfp.profiling.builder import BuildEnvironment, Built, build
from cfp.profiling.compile_pool import CompilePool, default_threads
from cfp.profiling.runner import run, timing_on
from cfp.profiling.timing import TimingOptions
from cfp.search.choices import picks_of, whole_choice
from cfp.search.jobs import whole_job
from cfp.search.problem import Problem

_ONCE = TimingOptions(
    warmup_seconds=0.0, min_samples=1, max_samples=1, budget_seconds=0.0, min_repeat=1
)
_TURN = {"warmup_seconds": 0.4, "min_samples": 3, "max_samples": 8}


def plans(analysis: Analysis, problem: Problem, by_name: dict, count: int, seed: int):
    """Names and picks: the best, the presets, and random mixes of what is measured."""
    found: dict[tuple[int, ...], str] = {}
    for name, choice in by_name.items():
        picks = picks_of(analysis, problem, choice)
        if picks is not None:
            found.setdefault(tuple(picks), name)
    chance = random.Random(seed)
    for _ in range(1000):
        if len(found) >= count:
            break
        number = len(found)
        kinds = [chance.randrange(len(options)) for options in problem.options]
        picks = [kinds[kind] for kind in problem.kinds]
        if number % 2:  # equal segments that choose differently
            place = chance.randrange(len(picks))
            picks[place] = chance.randrange(len(problem.options[problem.kinds[place]]))
        found.setdefault(tuple(picks), f"mix {number}")
    return [(name, list(picks)) for picks, name in found.items()]


def high_water() -> int:
    """The most memory that was ever in use on the first device; 0 if it won't say."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", 0))


def command() -> str:
    """Returns the command line, but for where files lie."""
    words = iter(sys.argv[1:])
    kept = [w for w in words if w not in ("--workdir", "--json") or not next(words)]
    return " ".join(["cfp_test/scripts/prediction.py", *kept])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--mesh")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--platform")
    parser.add_argument("--per-kind", type=int, default=6)
    parser.add_argument("--plans", type=int, default=14)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args()

    started = time.perf_counter()
    axes = platform.parse_mesh(options.devices, options.mesh)
    target, mesh = open_target(
        options.target, rest, axes=axes, platform_name=options.platform
    )
    session = analyse(target, mesh)
    settings = PlannerSettings(per_kind=options.per_kind)
    analysis = session.analysis
    frame = analysis.frame
    with open_context(mesh, options.workdir, None, settings) as context:
        begun = time.perf_counter()
        profiles = profile(context, analysis)
        profile_seconds = time.perf_counter() - begun
        jobs = {j.key.digest for item in profiles.requests for j in item.jobs}
        known = [profiles.records[digest] for digest in jobs]
        begun = time.perf_counter()
        again = profile(context, analysis)
        again_seconds = time.perf_counter() - begun
        problem = search(context, analysis, profiles).problem
        assert problem is not None
        rows, built = [], []
        chosen = plans(
            analysis, problem, dict(profiles.presets), options.plans, options.seed
        )
        environment = BuildEnvironment.beside(context.store.path)
        whole = []
        for name, picks in chosen:
            predicted = problem.solution(picks)
            choice = whole_choice(session.analysis, problem, predicted)
            job = whole_job(analysis, choice, context.environment, name)
            whole.append((name, picks, predicted, job))
        with CompilePool(default_threads(mesh.devices.flat[0].platform)) as pool:
            builds = [
                pool.start(name, partial(build, frame.program, mesh, job, environment))
                for name, _, _, job in whole
            ]
            built = [one.result() for one in builds]
        for (name, picks, predicted, job), outcome in zip(whole, built, strict=True):
            row = {
                "name": name,
                "picks": picks,
                "predicted_ms": predicted.cost_ms,
                "predicted_bytes": predicted.memory_bytes,
            }
            if not isinstance(outcome, Built):
                row["failure"] = f"{outcome.status}: {outcome.reason}"
            else:
                row["compiled_bytes"] = outcome.peak_bytes
                row["compiled"] = {
                    part: getattr(outcome, f"{part}_bytes")
                    for part in ("argument", "output", "alias", "temp", "code")
                }
            rows.append((row, job, outcome))
        ready = [item for item in rows if isinstance(item[2], Built)]
        # The mark only rises, so that the smallest must come first.
        for row, job, outcome in sorted(ready, key=lambda item: item[2].peak_bytes):
            before = high_water()
            record = run(outcome, job, frame.program, mesh, timing=_ONCE)
            mark = high_water()
            row["high_water_bytes"] = mark if mark > before else None
            if not record.ok:
                row["failure"] = f"{record.status}: {record.reason}"
        for turn in range(options.turns):
            for place in range(len(ready)):
                row, job, outcome = ready[(place + turn) % len(ready)]
                if "failure" in row:
                    continue
                timing = timing_on(mesh, **_TURN)
                record = run(outcome, job, frame.program, mesh, timing=timing)
                row.setdefault("samples_ms", []).extend(record.samples_ms)
        counts = {
            "strategies": len(profiles.requests),
            "jobs": len(jobs),
            "failed": profiles.counts["strategies_failed"],
            "build_seconds": sum(r.build_seconds for r in known),
            "run_seconds": sum(r.run_seconds for r in known),
            "profile_seconds": profile_seconds,
            "again_seconds": again_seconds,
            "again_measured": again.counts["strategies_measured"],
        }
        environment_parts = dict(context.environment)
    found = [row for row, _, _ in rows]
    for row in found:
        if "samples_ms" not in row:
            print(f"{row['name']:40} {row.get('failure')}")
            continue
        row["measured_ms"] = statistics.median(row["samples_ms"])
        ratio = row["predicted_ms"] / row["measured_ms"]
        mark = row["high_water_bytes"]
        print(
            f"{row['name']:40} predicted {row['predicted_ms']:8.2f} ms, measured "
            f"{row['measured_ms']:8.2f} ({ratio:5.3f}); memory "
            f"{row['predicted_bytes'] / 2**30:6.2f}, compiled "
            f"{row['compiled_bytes'] / 2**30:6.2f}, high water "
            f"{mark / 2**30 if mark else float('nan'):6.2f} GiB",
            flush=True,
        )
    print(json.dumps(counts))
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "target": [options.target, *rest],
                    "command": command(),
                    "date": date.today().isoformat(),
                    "environment": environment_parts,
                    "mesh": dict(mesh.shape),
                    "price": counts,
                    "seconds": time.perf_counter() - started,
                    "options": [
                        [
                            {
                                "time_ms": o.time_ms,
                                "state_bytes": o.state_bytes,
                                "residual_bytes": o.residual_bytes,
                                "temp_bytes": o.temp_bytes,
                            }
                            for o in kind
                        ]
                        for kind in problem.options
                    ],
                    "kinds": problem.kinds,
                    "plans": found,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
