"""Compares search-guided profiling with measuring all there is, on real devices.

    python cfp_test/scripts/guided.py TARGET [TARGET'S OPTIONS] --json FILE
        [--mesh x=4] [--pool 40] [--per-kind 8] [--workdir DIR]

All there is: for each kind of segment the parts of the presets and the best ``--pool``
choices of every storage mode by estimate; the space itself has more than can
be measured. Both best plans are then run whole, in turns. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from cfp import platform
from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.cli.session import analyse, open_target
from cfp.context import PlanContext, open_context
from cfp.cost.costs import Costs
from cfp.passes.profile import profile as profile_segments
from cfp.planner_settings import DetailedSettings
from cfp.presets.presets import presets
from cfp.profiling.rates import Rates
from cfp.profiling.runner import profile
from cfp.race.compile import Builder
from cfp.race.programs import RaceProgram
from cfp.race.turns import race_programs
from cfp.search.choices import estimate_kinds, ranked_candidates, whole_choice
from cfp.search.expected import build_problem
from cfp.search.jobs import whole_job
from cfp.search.requests import MeasurementRequest, RequestBuilder, measured_options
from cfp.search.solver import solve
from cfp.solution import Candidate


def enumerate_pool(
    context: PlanContext,
    analysis: Analysis,
    guided: list[MeasurementRequest],
    rates: Rates,
    pool: int,
) -> list[MeasurementRequest]:
    """Measurements of guided profiling, and of all the rest of the pool."""
    estimates = estimate_kinds(analysis, rates)
    maker = RequestBuilder(
        Costs(analysis, rates),
        presets(analysis.frame),
        estimates,
        context.environment,
        context.settings.in_context,
    )
    found = {(w.kind, w.candidate): w for w in guided}
    for kind, estimate in enumerate(estimates):
        for number, candidate in enumerate(ranked_candidates(estimate, pool), 1):
            if (kind, candidate) not in found:
                found[kind, candidate] = maker.make(kind, candidate, number)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--mesh")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--platform")
    parser.add_argument("--pool", type=int, default=40)
    parser.add_argument("--per-kind", type=int, default=8)
    parser.add_argument("--in-context", action="store_true")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args()
    axes = platform.parse_mesh(options.devices, options.mesh)
    target, mesh = open_target(
        options.target, rest, axes=axes, platform_name=options.platform
    )
    session = analyse(target, mesh)
    analysis = session.analysis
    settings = DetailedSettings(
        per_kind=options.per_kind, in_context=options.in_context, plans=1
    )
    with open_context(mesh, options.workdir, None, settings) as context:
        profiles = profile_segments(context, analysis)
        costs = Costs(analysis, profiles.rates)
        guided = profiles.requests
        every = enumerate_pool(context, analysis, guided, profiles.rates, options.pool)
        begun = time.perf_counter()
        jobs = [job for item in every for job in item.jobs]
        summary = profile(analysis.frame.program, mesh, jobs, context.store)
        seconds = time.perf_counter() - begun
        programs: list[RaceProgram] = []
        rows: dict[str, dict] = {}
        for name, wanted in (("guided", guided), ("everything", every)):
            known = measured_options(costs, wanted, summary.records)
            problem = build_problem(costs, known, None)
            best = solve(problem)
            assert best is not None
            choice: Choice = whole_choice(analysis, problem, best)
            rows[name] = {
                "strategies": len(wanted),
                "predicted_ms": best.cost_ms,
            }
            job = whole_job(analysis, choice, context.environment, name)
            programs.append(
                RaceProgram(candidate=Candidate(name, choice, best.cost_ms), job=job)
            )
        program = analysis.frame.program
        builder = Builder(program=program, mesh=mesh, store=context.store)
        results = race_programs(builder, programs, rounds=6)
        for result in results:
            rows[result.name] |= {
                "median_ms": result.time_ms,
                "samples_ms": result.samples_ms,
            }
        row = {
            "target": [options.target, *rest],
            "rounds": len(profiles.rounds) - 1,
            "guided_seconds": profiles.counts["profile_seconds"],
            "remaining_seconds": seconds,
            "share": len(guided) / len(every),
            "same_plan": programs[0].job.key == programs[1].job.key,
            **rows,
        }
    text = json.dumps(row)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
