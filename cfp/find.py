"""Finds a plan for one step on one mesh: runs the passes of `cfp.passes.pipeline`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.host_state import enough_state
from cfp.analysis.layout import lay_out
from cfp.checking.sites import check_sites
from cfp.context import PlanContext, device_memory, open_context
from cfp.cost.memory import host_bytes
from cfp.devices.described import DescribedMesh
from cfp.errors import MemoryBudgetError
from cfp.passes.pipeline import Analyzed, Pins, analyze_step, decide
from cfp.passes.profile import estimate, profile
from cfp.passes.search import preset_solution, search, search_as_compiled
from cfp.plan.plan import Plan
from cfp.planner_settings import PlannerSettings
from cfp.program.callbacks import host_calls
from cfp.program.meaning import check_settings, unchecked
from cfp.program.memory import has_host_memory
from cfp.program.step import FlatStep
from cfp.race.programs import NoneFits, RaceOutcome, kernels_not_timed
from cfp.search.problem import Problem
from cfp.search.requests import UNMEASURED_STRATEGIES, Profiles
from cfp.settings import HOST_BYTES_PER_MS, Dimension, defaults_of
from cfp.solution import Candidate, Estimate, Solution
from cfp.units import format_bytes, parse_bytes
from cfp.view.evidence import with_figures
from cfp.view.words import RESERVE_BYTES


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A plan, and what of its making a comparison with other plans needs.

    Attributes:
        winner: what the plan decides.
    """

    plan: Plan
    analysis: Analysis = field(repr=False)
    winner: Candidate = field(repr=False)
    problem: Problem | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of :func:`cfp.plan` that say how to plan; the same for all variants.

    Attributes:
        memory_budget, pins, preset, cache_dir, settings: as of :func:`cfp.plan`.
    """

    memory_budget: int | str | None = None
    pins: Pins | None = None
    preset: str | None = None
    cache_dir: str | Path | None = None
    settings: PlannerSettings = field(default_factory=PlannerSettings)

    def context(
        self, mesh: Mesh | DescribedMesh
    ) -> AbstractContextManager[PlanContext]:
        """Opens the context of all passes on a mesh."""
        budget = parse_bytes(self.memory_budget)
        return open_context(mesh, self.cache_dir, budget, self.settings)


def find_plan(
    step: FlatStep,
    mesh: Mesh | DescribedMesh,
    options: PlanOptions,
    analyzed: Analyzed | None = None,
) -> FoundPlan:
    """Runs all passes for a step over flat arguments; see :func:`cfp.plan`.

    Raises:
        MemoryBudgetError: nothing fits; see :func:`find_with_state_in_host`.
    """
    check_settings()
    with unchecked():
        return _find_plan(
            step, analyzed or analyze_step(step, mesh, options.pins), options
        )


def find_with_state_in_host(
    step: FlatStep,
    shortage: MemoryBudgetError,
    end: float,
    analyzed: Analyzed,
    options: PlanOptions,
    analyze: Callable[[FlatStep], Analyzed],
) -> FoundPlan:
    """Plans a step that does not fit with a part of its state in host memory.

    State that only its own update reads, such as an optimizer's moments, is in the
    memory of the host between steps: as much as is lacking by prediction, and all of
    it if that is not enough.

    Args:
        shortage: the error of planning it as it is.
        end: when planning is to end, as `time.monotonic` counts.
        analyze: analyses the step with some of its state there.

    Raises:
        MemoryBudgetError: nothing fits then, time is over, or devices cannot use the
            host's memory.
    """
    mesh, frame = analyzed.mesh, analyzed.analysis.frame
    budget = parse_bytes(options.memory_budget)
    most = device_memory(mesh) if budget is None else budget
    settings = options.settings
    may_move = Dimension.HOST_MEMORY in settings.dimensions and _uses_host_memory(mesh)
    if most is None or not may_move:
        raise shortage
    error = shortage
    with unchecked():
        for some in enough_state(frame, shortage.smallest_feasible_bytes - most):
            if time.monotonic() >= end:
                raise error.with_line(
                    "With a longer --time-budget there is time to plan with more state "
                    "in the memory of the host, too."
                )
            size = format_bytes(sum(one.size_bytes for one in some))
            if settings.progress is not None:
                settings.progress(f"planning again with {size} of state in host memory")
            moved = step.with_state_in_host([(s.argument, s.result) for s in some])
            rest = replace(settings, seconds=max(0.0, end - time.monotonic()))
            try:
                found = _find_plan(
                    moved,
                    analyze(moved),
                    replace(options, preset=None, settings=rest),
                )
            except MemoryBudgetError as again:
                error = again.with_line(
                    f"That is with {size} of state in the memory of the host, all that "
                    "only its own update reads."
                )
                continue
            return _with_host_figures(found, shortage)
    raise error


def _uses_host_memory(mesh: Mesh | DescribedMesh) -> bool:
    """Returns True if what is in the host's memory is none of a device's."""
    if isinstance(mesh, DescribedMesh):
        return defaults_of(mesh.environment["platform"]).host_memory
    device = mesh.local_devices[0]
    return defaults_of(device.platform).host_memory and has_host_memory(device)


def _with_host_figures(found: FoundPlan, shortage: MemoryBudgetError) -> FoundPlan:
    """Adds what state in host memory saves and costs to a plan's figures."""
    layout = lay_out(found.analysis.frame, found.winner.choice)
    kept, moved = host_bytes(layout, [argument for argument, _ in found.plan.in_host])
    figures = {"host_bytes": kept, "host_ms": moved / HOST_BYTES_PER_MS}
    if shortage.fastest_ms is not None:
        figures["unfit_ms"] = shortage.fastest_ms
    plan = replace(found.plan, search={**found.plan.search, **figures})
    return replace(found, plan=plan)


def _find_plan(step: FlatStep, analyzed: Analyzed, options: PlanOptions) -> FoundPlan:
    started, preset = time.perf_counter(), options.preset
    if step.inner_jit_donates:
        warnings.warn(
            "The jax.jit around the step donates arguments, which cfp ignores: give "
            "cfp donate_argnums or donate_argnames, too.",
            stacklevel=3,
        )
    analysis = analyzed.analysis
    with options.context(analyzed.mesh) as context:
        profiles = None
        if preset is not None:
            solution = preset_solution(context, analysis, preset)
        else:
            profiles = analyzed.profiles or profile(context, analysis)
            solution = search(context, analysis, profiles)
        # Presets that were left out may need less memory.
        has_more = profiles is not None and not profiles.has_all_presets
        may_measure_more = has_more and not context.is_over
        parts = context, step, analyzed
        found, seconds_before = None, 0.0
        try:
            found = complete_plan(
                *parts, solution, profiles, last_resort=not may_measure_more
            )
        except NoneFits as unfit:
            seconds_before = unfit.seconds
        if found is None:
            # Memory was ample by predictions, and is short once compiled.
            profiles = profile(context, analysis, all_presets=True)
            solution = search(context, analysis, profiles)
            solution = solution.after_race(seconds_before)
            found = complete_plan(*parts, solution, profiles)
        found = _with_checked_sites(context, step, analyzed, options, found)
    seconds = analyzed.seconds + time.perf_counter() - started
    figures = {**found.plan.search, "planning_seconds": seconds}
    return replace(found, plan=replace(found.plan, search=figures))


def _with_checked_sites(
    context: PlanContext,
    step: FlatStep,
    analyzed: Analyzed,
    options: PlanOptions,
    found: FoundPlan,
) -> FoundPlan:
    """Compares replaced parts with the step; plans again without kernels that differ.

    Nothing runs for described devices; the devices of several processes are not used.
    """
    plan, mesh = found.plan, context.mesh
    is_here = isinstance(mesh, Mesh) and len(mesh.local_devices) == mesh.size
    if not plan.constraints.replaced or not is_here:
        return found
    checks = check_sites(context, analyzed.analysis.frame.program, plan.constraints)
    wrong = {one.kernel for one in checks if one.is_wrong}
    if wrong:
        every = context.rules.replacing.attention
        kernels = tuple(name for name in every if name not in wrong)
        settings = replace(options.settings, attention=kernels)
        found = _find_plan(step, analyzed, replace(options, settings=settings))
    notes = tuple(str(one) for one in checks if one.is_wrong or one.reason)
    notes = tuple(dict.fromkeys((*notes, *found.plan.site_checks)))
    return replace(found, plan=replace(found.plan, site_checks=notes))


def complete_plan(
    context: PlanContext,
    step: FlatStep,
    analyzed: Analyzed,
    solution: Solution,
    profiles: Profiles | None = None,
    last_resort: bool = True,
) -> FoundPlan:
    """Has a solution's candidates raced, and completes the plan of what won.

    Args:
        last_resort: whether the smallest are compiled where no candidate fits.
    """
    analysis, rules = analyzed.analysis, context.rules
    made, outcome, solution = _decided(
        context, analysis, solution, profiles, last_resort
    )
    made = made.bound_to(step, analyzed.lowering.out_tree)
    if context.memory is not None and context.memory.reserve_bytes:
        reserve = {RESERVE_BYTES: float(context.memory.reserve_bytes)}
        made = replace(made, search={**made.search, **reserve})
    made = replace(made, host_callbacks_skipped=host_calls(analysis.frame.program))
    made = with_figures(
        made,
        analysis,
        outcome.winner.choice,
        solution.problem,
        profiles.replacing if profiles else rules.replacing,
        profiles.failed_kernels
        if profiles
        else kernels_not_timed(solution.candidates, outcome.rows, context.budget_bytes),
        outcome.raced,
        dimensions=rules.dimensions,
    )
    late = profiles is not None and UNMEASURED_STRATEGIES in profiles.counts
    if late and made.figures is not None:
        # It may be that what goes without a kind of choice is what was not measured.
        kept = (one for one in made.figures.worth if one.without_ms is not None)
        made = replace(made, figures=replace(made.figures, worth=tuple(kept)))
    return FoundPlan(
        plan=made,
        analysis=analysis,
        winner=outcome.winner,
        problem=solution.problem,
    )


def _decided(
    context: PlanContext,
    analysis: Analysis,
    solution: Solution,
    profiles: Profiles | None,
    last_resort: bool,
) -> tuple[Plan, RaceOutcome, Solution]:
    """The plan of what won, the race, and the solution that raced.

    Where nothing that was predicted to fit does, as compiled, that is the one that was
    searched for by what was compiled; so it is where only what an earlier search has
    rematerialized fits, and this one saw no need.

    Args:
        last_resort: whether the smallest are compiled where no candidate of both fits.
    """

    may_again = profiles is not None and not context.is_over
    try:
        first = (
            *decide(context, analysis, solution, last_resort and not may_again),
            solution,
        )
    except NoneFits as unfit:
        again = search_as_compiled(context, analysis, solution)
        if again is None and not last_resort:
            raise
        first, solution = None, (again or solution).after_race(unfit.seconds)
    if first is None:
        return *decide(context, analysis, solution, last_resort), solution
    _, outcome, _ = first
    saw_no_need = profiles is not None and not profiles.memory_bound
    is_short = saw_no_need and outcome.winner.choice.remat
    if not is_short or context.is_over:
        return first
    again = search_as_compiled(context, analysis, solution)
    if again is None:
        return first
    return *decide(context, analysis, again, last_resort), again


def estimate_plan(analyzed: Analyzed, options: PlanOptions) -> Estimate:
    """Estimates what the best plan for a step on a mesh takes; of it nothing runs."""
    mesh = analyzed.mesh
    with unchecked(), options.context(mesh) as context:
        return estimate(context, analyzed.analysis)
