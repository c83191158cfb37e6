"""The last pass: makes the winner's plan with its figures, and checks its kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.context import PlanContext
from cfp.errors import CfpError, MemoryBudgetError
from cfp.passes import Analyzed
from cfp.plan.describe import compose_plan
from cfp.plan.plan import Plan
from cfp.profiling.builder import BuildEnvironment
from cfp.race.admission import no_winner
from cfp.race.programs import RaceOutcome, kernels_not_timed
from cfp.search.guided import Candidate
from cfp.search.requests import UNMEASURED_STRATEGIES
from cfp.view.evidence import with_figures
from cfp.view.words import RESERVE_BYTES


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A plan, with the analysis and the race's winner that it was made from."""

    plan: Plan
    analysis: Analysis = field(repr=False)
    winner: Candidate = field(repr=False)


def complete_plan(
    context: PlanContext, analyzed: Analyzed, outcome: RaceOutcome
) -> FoundPlan:
    """Completes the plan of a race's winner.

    Raises:
        MemoryBudgetError: no candidate fits in memory.
        CfpError: no candidate runs.
    """
    analysis, rules, winner = analyzed.analysis, context.rules, outcome.winner
    if winner is None:
        raise _nothing_fits(context, outcome, analysis)
    kept = BuildEnvironment.beside(context.store.path)
    environment = dict(context.environment)
    made = compose_plan(analysis, context.mesh, environment, outcome, kept)
    made = made.bound_to(analyzed.step, analyzed.lowering.out_tree)
    if context.memory is not None and context.memory.reserve_bytes:
        reserve = {RESERVE_BYTES: float(context.memory.reserve_bytes)}
        made = replace(made, search={**made.search, **reserve})
    solution, profiles = outcome.solution, outcome.solution.profiles
    made = with_figures(
        made,
        analysis,
        winner.choice,
        solution.problem,
        profiles.replacing if profiles else rules.replacing,
        profiles.failed_kernels if profiles else kernels_not_timed(outcome),
        outcome.raced,
        dimensions=context.settings.dimensions,
        budget_bytes=context.budget_bytes,
    )
    late = profiles is None or UNMEASURED_STRATEGIES in profiles.counts
    if late and made.figures is not None:
        # The best step without a choice may use an unmeasured strategy.
        known = (one for one in made.figures.worth if one.without_ms is not None)
        made = replace(made, figures=replace(made.figures, worth=tuple(known)))
    return FoundPlan(plan=made, analysis=analysis, winner=winner)


def _nothing_fits(
    context: PlanContext, outcome: RaceOutcome, analysis: Analysis
) -> CfpError:
    """Error: no compiled candidate fits in memory or runs."""
    reserve = context.memory.reserve_bytes if context.memory else 0
    error = no_winner(analysis, outcome.results, context.budget_bytes, reserve)
    if isinstance(error, MemoryBudgetError) and context.is_over:
        return error.with_line(
            "Planning ran out of time before it compiled all smaller candidates. "
            "Give it more (--time-budget, cfp.PlannerSettings(seconds=...))."
        )
    return error


def wrong_kernels(
    context: PlanContext, found: FoundPlan
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Runs replaced parts beside the original ops; returns wrong kernels, and notes.

    Both are empty for described devices and for a mesh of several processes.
    """
    plan, mesh = found.plan, context.mesh
    is_here = isinstance(mesh, Mesh) and len(mesh.local_devices) == mesh.size
    if not plan.constraints.replaced or not is_here:
        return frozenset(), ()
    from cfp.checking.sites import check_sites  # It runs parts of a step.

    checks = check_sites(context, found.analysis.frame.program, plan.constraints)
    wrong = frozenset(one.kernel for one in checks if one.is_wrong)
    return wrong, tuple(str(one) for one in checks if one.is_wrong or one.reason)
