"""Compares ways to tune, build and time a target's first round of programs.

    python cfp_test/scripts/building.py TARGET [TARGET'S OPTIONS] --workdir DIR
        [--mesh x=4] [--tune] [--overlap] [--threads N] [--switch-interval SECONDS]
        [--pin] [--rates-only] [--json FILE]

A fresh working directory has nothing tuned; one of another run has what that tuned and
measured, so that ``--workdir`` is best a copy of one with the devices' rates alone,
which ``--rates-only`` makes. ``--tune`` has kernels tried out before programs are built
side by side. ``--overlap`` times programs while others are built, with a short interval
between threads if ``--switch-interval`` says so, and with the timing thread on a core
of its own if ``--pin`` does. Prints what the passes took, and appends every record's
samples to the JSON lines, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cfp import platform
from cfp.analysis.analyze import analyze
from cfp.cli.session import open_target
from cfp.context import open_context
from cfp.cost.costs import Costs
from cfp.passes.profile import profile_segments
from cfp.profiling import compile_pool, runner
from cfp.profiling.collectives import measure_rates
from cfp.profiling.measurer import first_of_kernels, tune_kernels
from cfp.program.trace import planning_mesh, trace
from cfp.search.choices import estimate_kinds
from cfp.search.requests import RequestBuilder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--mesh")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--platform")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--switch-interval", type=float)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--rates-only", action="store_true")
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args()
    axes = platform.parse_mesh(options.devices, options.mesh)
    target, mesh = open_target(
        options.target, rest, axes=axes, platform_name=options.platform
    )
    flat = target.flatten()
    mesh = planning_mesh(mesh)
    analysis = analyze(trace(flat, mesh)[0], tuple(mesh.shape.items()))
    program = analysis.frame.program
    with open_context(mesh, options.workdir) as context:
        rates = measure_rates(mesh, context.store)
        if options.rates_only:
            return
        presets = profile_segments(context, analysis, rates, measure=False)[0].presets
        costs, estimates = Costs(analysis, rates), estimate_kinds(analysis, rates)
        maker = RequestBuilder(costs, presets, estimates, context.environment)
        settings = context.settings
        wanted = maker.first(settings.per_kind, settings.others)
        jobs = [job for item in wanted for job in item.jobs]
        tuning = first_of_kernels(jobs)
        begun = time.perf_counter()
        if options.tune:
            tune_kernels(program, mesh, tuning, context.store)
        tuned = time.perf_counter()
        cores = os.sched_getaffinity(0)
        if options.switch_interval:
            sys.setswitchinterval(options.switch_interval)
        if options.pin:
            # Threads begin with the cores of what starts them: the builders get them.
            _builders_keep(cores - {min(cores)})
            os.sched_setaffinity(0, {min(cores)})
        if options.threads:
            runner.default_threads = lambda platform: options.threads
        if options.overlap:
            runner.overlaps = lambda platform: True
        done = runner.profile(program, mesh, jobs, context.store)
        ended = time.perf_counter()
    row = {
        "target": [options.target, *rest],
        "options": {
            name: str(value)
            for name, value in vars(options).items()
            if name not in {"target", "json", "workdir"}
        },
        "tuned": len(tuning) if options.tune else 0,
        "tune_seconds": tuned - begun,
        "profile_seconds": ended - tuned,
        "build_seconds": done.build_seconds,
        "run_seconds": done.run_seconds,
        "measured": done.measured,
        "failed": done.failed,
        "samples_ms": {
            key: list(record.samples_ms) for key, record in done.records.items()
        },
    }
    times = [statistics.median(s) for s in row["samples_ms"].values() if s]
    shown = {k: v for k, v in row.items() if k not in {"samples_ms", "target"}}
    print(json.dumps({**shown, "sum_of_times_ms": sum(times)}), flush=True)
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _builders_keep(cores: set[int]) -> None:
    """Has threads that build begin by leaving the timing thread's core."""
    compile_pool.ThreadPoolExecutor = lambda *args, **given: ThreadPoolExecutor(
        *args, **given, initializer=os.sched_setaffinity, initargs=(0, cores)
    )


if __name__ == "__main__":
    main()
