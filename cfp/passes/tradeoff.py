"""Measures what is worth choosing under any memory budget, large and small."""

from __future__ import annotations

from pathlib import Path

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.context import PlanContext, open_context
from cfp.cost.costs import Costs
from cfp.cost.memory import can_rematerialize
from cfp.passes.profile import measured_rates, profile_segments
from cfp.planner_settings import PlannerSettings
from cfp.search.build import build_problem
from cfp.search.problem import Problem
from cfp.search.wanted import (
    Explored,
    Measured,
    Wanted,
    measured_options,
    rematerialize,
)
from cfp.settings import ROUND_SIZE

# More than any device has.
_PLENTY_BYTES = 2**62


def measure_all_budgets(
    analysis: Analysis,
    mesh: Mesh,
    cache_dir: str | Path | None,
    settings: PlannerSettings,
) -> Problem:
    """The search problem of choices for budgets of any size, and no budget.

    It has what a search with plenty of memory asks for, the presets among it, and
    the fastest of every kind of segment with their forward pass rematerialized: of
    these, if the time of the settings is over, only what is known.

    Raises:
        CfpError: nothing can be measured.
    """
    with open_context(mesh, cache_dir, _PLENTY_BYTES, settings) as context:
        rates = measured_rates(context)
        _, found, looker = profile_segments(context, analysis, rates, measure=True)
        wanted, records = [*found.wanted], dict(found.records)
        if not looker.interrupted:
            again = _again(context, analysis, found)
            wanted += again
            jobs = [job for item in again for job in item.jobs]
            for start in range(0, len(jobs), ROUND_SIZE):
                if looker.is_over:
                    break  # Without the others there is a curve, too.
                looker(jobs[start : start + ROUND_SIZE])
            records |= context.store.get_many(job.key.digest for job in jobs)
    costs = Costs(analysis, rates)
    return build_problem(costs, measured_options(costs, wanted, records), None)


def _again(
    context: PlanContext, analysis: Analysis, explored: Explored
) -> list[Wanted]:
    """The fastest candidates of every kind, with their forward pass rematerialized.

    The fastest of all kinds come first, since time may be over before the last.
    """
    records = explored.records
    found: list[tuple[int, Wanted]] = []
    for kind, index in enumerate(analysis.representatives):
        if not can_rematerialize(analysis.frame, analysis.segments[index]):
            continue
        good = [
            (measured.time_ms, item)
            for item in explored.wanted
            if item.kind == kind
            and not item.candidate.remat
            and isinstance(measured := item.measured(records), Measured)
        ]
        good.sort(key=lambda pair: pair[0])
        for number, (_, item) in enumerate(good[: context.settings.per_kind], 1):
            label = f"strategy {number} of segment {kind}, rematerialized"
            again = rematerialize(analysis, context.environment, item, label, records)
            found.append((number, again))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]
