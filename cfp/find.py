"""Finds a plan for one step on one mesh: the passes in a row, run.

The passes in a row are in :mod:`cfp.passes.pipeline`.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.context import agreement_of, open_context
from cfp.devices.described import DescribedMesh
from cfp.errors import CfpError
from cfp.passes.pipeline import Analyzed, Pins, analyze_step, decide
from cfp.passes.profile import estimate, profile
from cfp.passes.search import preset_solution, search
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings
from cfp.profiling.collectives import known_rates
from cfp.profiling.conversation import together
from cfp.profiling.interrupts import heeded
from cfp.program.callbacks import host_calls
from cfp.program.meaning import check_settings, unchecked
from cfp.program.step import FlatStep
from cfp.report.figures import with_figures
from cfp.search.kernels import Kernels
from cfp.solution import Candidate, Estimate
from cfp.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan, and what of its making a comparison with other plans needs.

    Attributes:
        plan: the plan.
        analysis: of the step that was planned.
        winner: what the plan decides.
        interrupted: whether the user ended the measuring, so that there was no race.
    """

    plan: Plan
    analysis: Analysis = field(repr=False)
    winner: Candidate = field(repr=False)
    interrupted: bool


def find_plan(
    step: FlatStep,
    *,
    mesh: Mesh | DescribedMesh,
    memory_budget: int | str | None = None,
    pins: Pins | None = None,
    preset: str | None = None,
    cache_dir: str | Path | None = None,
    settings: PlannerSettings | None = None,
    analyzed: Analyzed | None = None,
) -> Found:
    """Runs all passes for a step over flat arguments; see :func:`cfp.plan`.

    Args:
        step: the step.
        mesh, memory_budget, pins, preset, cache_dir, settings: as of `cfp.plan`.
        analyzed: the step on the mesh, if that is known.
    """
    check_settings()
    alone = agreement_of(mesh).alone
    with heeded(cache_dir), together(alone), unchecked():
        return _find_plan(
            step,
            analyzed=analyzed or analyze_step(step, mesh, pins),
            budget=parse_bytes(memory_budget),
            preset=preset,
            cache_dir=cache_dir,
            settings=settings,
        )


def _find_plan(
    step: FlatStep,
    *,
    analyzed: Analyzed,
    budget: int | None,
    preset: str | None,
    cache_dir: str | Path | None,
    settings: PlannerSettings | None,
) -> Found:
    started = time.perf_counter()
    if step.gives_unasked:
        warnings.warn(
            "The step is wrapped in a jax.jit that donates arguments, which a planned "
            "step does not take over: give cfp donate_argnums or donate_argnames, too.",
            stacklevel=3,
        )
    analysis, interrupted = analyzed.analysis, False
    with open_context(analyzed.mesh, cache_dir, budget, settings) as context:
        try:
            program = analysis.frame.program.fingerprint[:12]
            context.agreement.same({"program": program, "preset": str(preset)})
            if preset is not None:
                solution = preset_solution(analysis, preset)
                rates, kernels, failed = None, Kernels(), {}
                if isinstance(analyzed.mesh, Mesh):
                    rates = known_rates(analyzed.mesh, context.store)
            else:
                profiles = profile(context, analysis)
                interrupted, rates = profiles.interrupted, profiles.rates
                kernels = profiles.found.kernels
                failed = profiles.found.failed_kernels
                solution = search(context, analysis, profiles)
            made, outcome = decide(context, analysis, solution)
        except CfpError as error:
            error.interrupted = interrupted
            raise
    made = made.bound_to(step, analyzed.lowering.out_tree)
    made = replace(made, silenced=host_calls(analysis.frame.program))
    choice = outcome.winner.choice
    seconds = analyzed.seconds + time.perf_counter() - started
    made = replace(made, search={**made.search, "planning_seconds": seconds})
    how = (solution.problem, rates, kernels, failed, outcome.raced)
    return Found(
        plan=with_figures(made, analysis, choice, *how, context.rules.dimensions),
        analysis=analysis,
        winner=outcome.winner,
        interrupted=interrupted,
    )


def estimate_plan(
    analyzed: Analyzed,
    *,
    memory_budget: int | str | None = None,
    cache_dir: str | Path | None = None,
    settings: PlannerSettings | None = None,
) -> Estimate:
    """Estimates what the best plan for a step on a mesh takes, and runs nothing of it.

    Args:
        analyzed: the step on the mesh.
        memory_budget, cache_dir, settings: as of :func:`cfp.plan`.
    """
    budget = parse_bytes(memory_budget)
    alone = agreement_of(analyzed.mesh).alone
    with (
        heeded(cache_dir),
        together(alone),
        unchecked(),
        open_context(analyzed.mesh, cache_dir, budget, settings) as context,
    ):
        return estimate(context, analyzed.analysis)
