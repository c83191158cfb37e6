"""Measures what is worth choosing under any memory budget, large and small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.planner import Planner
from cfp.planner_parts import PlannerSettings, Profiles
from cfp.profiling.runner import profile
from cfp.search.costs import Costs, build_problem, measured_options
from cfp.search.measure import can_recompute, segment_job
from cfp.search.problem import Problem
from cfp.search.wanted import Wanted

# More than any device has.
_PLENTY_BYTES = 2**62


def measure_all_budgets(
    analysis: Analysis,
    mesh: Mesh,
    cache_dir: str | Path | None,
    settings: PlannerSettings,
) -> Problem:
    """The search problem of choices for budgets of any size, and no budget.

    It has what a search with plenty of memory asks for, the classics among it, and
    the fastest of every kind of segment with their forward pass computed again.

    Raises:
        CfpError: nothing can be measured.
    """
    with Planner(analysis, mesh, cache_dir, _PLENTY_BYTES, settings) as planner:
        profiles = planner.profile()
        wanted, records = profiles.found.wanted, dict(profiles.found.records)
        if not planner.interrupted:
            again = _again(planner, profiles)
            jobs = [item.job for item in again]
            try:
                found = profile(
                    analysis.frame.program,
                    mesh,
                    jobs,
                    planner.store,
                    retry_failures=settings.retry_failures,
                    progress=settings.progress,
                    limits=settings.limits,
                ).records
            except KeyboardInterrupt:  # Without these there is a curve, too.
                found = planner.store.get_many(job.key.digest for job in jobs)
            wanted, records = [*wanted, *again], {**records, **found}
    costs = Costs(analysis, profiles.rates, profiles.moved_ms)
    return build_problem(costs, measured_options(costs, wanted, records), None)


def _again(planner: Planner, profiles: Profiles) -> list[Wanted]:
    """The fastest candidates of every kind, with their forward pass computed again."""
    analysis, records = planner.analysis, profiles.found.records
    found = []
    for kind, index in enumerate(analysis.representatives):
        if not can_recompute(analysis.frame, analysis.segments[index]):
            continue
        good = [
            item
            for item in profiles.found.wanted
            if item.kind == kind
            and not item.candidate.remat
            and (record := records.get(item.job.key.digest)) is not None
            and record.ok
        ]
        good.sort(key=lambda item: item.time_ms(records))
        for number, item in enumerate(good[: planner.settings.per_kind], 1):
            candidate = replace(item.candidate, remat=True)
            job = segment_job(
                analysis.frame,
                analysis.segments,
                index,
                candidate,
                planner.environment,
                f"strategy {number} of segment {kind}, computed again",
            )
            found.append(Wanted(kind, candidate, job, base=item))
    return found
