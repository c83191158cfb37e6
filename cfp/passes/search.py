"""The search pass: the fastest choice that fits in memory, by the profiles."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Storage
from cfp.context import PlanContext
from cfp.cost.costs import Costs
from cfp.errors import OptionError, known_names
from cfp.passes.profile import profile
from cfp.presets.presets import (
    ALIASES,
    DATA_PARALLEL,
    PRESETS,
    REPLICATED,
    ZERO1,
    is_known,
    named_choices,
    preset,
    presets,
)
from cfp.printable import mesh_text
from cfp.profiling.collectives import Rates, known_rates
from cfp.race.admission import over_budget
from cfp.race.compile import compiled_before
from cfp.race.programs import (
    LESS_MEMORY,
    TOO_LARGE,
    UNMEASURED,
    RaceOutcome,
    RaceResult,
    leanest_of,
    less_memory,
    named_candidates,
    programs_of,
    rematerialized,
    with_kernels,
)
from cfp.search.choices import estimate_kinds, whole_choice
from cfp.search.guided import build_problem, estimate_options, expect
from cfp.search.requests import Profiles, measured_options
from cfp.search.solver import Problem, scale_memory, solve
from cfp.settings import COMPILED_TO_PREDICTED, Dimension
from cfp.solution import RACE_SECONDS, Candidate, Solution, Stage, prediction_of


def search(context: PlanContext, analysis: Analysis, profiles: Profiles) -> Solution:
    """Searches for the fastest choice that fits in memory, by prediction.

    If no choice fits by prediction, the choice of least memory is the candidate.

    Raises:
        MemoryBudgetError: no choice fits by prediction, and none may be compiled.
    """
    started = time.perf_counter()
    context.measure.tell("searching for the fastest plan")
    costs = profiles.costs
    compiled = context.compiles
    # Times beside a neighbour, and times of segments alone; or estimates.
    problems = [profiles.problem] if profiles.problem else []
    for alone in () if problems else (False, True):
        wanted, records = profiles.requests, profiles.records
        options = measured_options(costs, wanted, records, alone)
        problems.append(build_problem(costs, options, context.budget_bytes))
    problem, tight = problems[0], profiles.memory_bound
    named = plain = with_kernels(analysis, problem, profiles.presets)
    if tight and compiled and not profiles.problem:
        # Rematerialized programs may need less memory than predicted.
        scale = COMPILED_TO_PREDICTED
        problems = [one for p in problems for one in (p, scale_memory(p, scale))]
    found = dict.fromkeys(
        whole_choice(analysis, one, best)
        for one in problems
        if (best := solve(one)) is not None
    )
    if tight:
        # Under XLA's memory limit more candidates may fit; compiling decides.
        reckonings = (problem, scale_memory(problem, context.usual_temp_share))
        named = named | rematerialized(analysis, reckonings, named)
    if not found:
        if not compiled:
            reserve = context.memory.reserve_bytes if context.memory else 0
            raise over_budget(analysis, problem, reserve)
        found = {leanest_of(analysis, problem).choice: None}
    first, *others = found
    candidates = [
        Candidate("planned", first),
        *named_candidates(named, context.rules.levels),
        *(Candidate(f"planned {n}", choice) for n, choice in enumerate(others, 2)),
    ]
    return Solution(
        _predicted(analysis, problem, candidates),
        unraced=_unraced(context, analysis, profiles, named),
        problem=problem,
        counts={**profiles.counts, "search_seconds": time.perf_counter() - started},
        rates=costs.rates,
        named=plain,
        profiles=profiles,
    )


def _unraced(
    context: PlanContext,
    analysis: Analysis,
    profiles: Profiles,
    named: Collection[str],
) -> dict[str, str]:
    """Maps presets that do not race to the reason.

    They are slow by estimate, or cannot fit in the memory budget.
    """
    every, most = presets(analysis.frame), inf
    if context.memory is not None:
        most = context.memory.budget_bytes

    def why_not(name: str) -> str:
        needed = profiles.costs.least_peak_bytes(every[name])
        return TOO_LARGE if needed > most else UNMEASURED

    absent = (name for name in every if name in PRESETS and name not in named)
    return {name: why_not(name) for name in absent}


def search_further(
    context: PlanContext, analysis: Analysis, outcome: RaceOutcome
) -> Solution | None:
    """Searches again if no candidate of a race fits; None if no search is left.

    The order: a search with the compiled sizes, presets that were not measured, and
    the candidate of least memory. Once time is over, only the last is tried. A winner
    that rematerializes gets a search by compiled sizes if predicted memory was ample.
    """
    solution, won = outcome.solution, outcome.winner
    profiles, may_go_on = solution.profiles, not context.is_over
    if won is not None:
        saw_no_need = profiles is not None and not profiles.memory_bound
        may_go_on = may_go_on and saw_no_need and bool(won.choice.remat)
    found = None
    if profiles is not None and may_go_on and solution.stage is Stage.PREDICTED:
        found = search_as_compiled(context, analysis, solution)
        if found is None and won is None and profiles.has_all_presets:
            # Candidates known not to fit are skipped, and others are compiled.
            found = replace(solution, stage=Stage.CORRECTED)
    if won is None and found is None:
        if profiles is not None and may_go_on and not profiles.has_all_presets:
            profiles = profile(context, analysis, all_presets=True)
            found = search(context, analysis, profiles)
        elif solution.problem is not None and solution.stage is not Stage.SMALLEST:
            found = _smallest(context, analysis, solution, outcome.results)
    if found is None:
        return None
    spent = {RACE_SECONDS: outcome.counts.get(RACE_SECONDS, 0.0)}
    return replace(found, counts={**found.counts, **spent})


def search_as_compiled(
    context: PlanContext, analysis: Analysis, solution: Solution
) -> Solution | None:
    """Searches with temporary memory scaled by compiled-to-predicted ratios.

    Uses the median and the largest ratio, and lets every segment be rematerialized.
    Returns None if the search finds nothing new.
    """
    problem, rates = solution.problem, solution.rates
    if problem is None or rates is None:
        return None
    may = Dimension.REMAT in context.settings.dimensions
    costs = Costs(analysis, rates, may, measured=not context.rules.estimates)
    estimates = estimate_kinds(analysis, rates)
    options = []
    for kind, row in enumerate(problem.options):
        there = {one.candidate for one in row}
        every = (replace(option.candidate, remat=True) for option in row)
        again = [one for one in every if one not in there]
        if again and costs.can_rematerialize(kind):
            row = [*row, *expect(costs, kind, estimates[kind], row, again)]
        options.append(row)
    is_wider = [*map(len, options)] != [*map(len, problem.options)]
    problem = build_problem(costs, options, problem.budget_bytes)
    solution = replace(solution, problem=problem, stage=Stage.CORRECTED)
    known = {one.choice for one in solution.candidates}
    plans, named = _fitting_as_compiled(context, analysis, solution, known)
    if not (plans or named or is_wider):
        return None
    return replace(solution, candidates=[*plans, *named, *solution.candidates])


def _fitting_as_compiled(
    context: PlanContext,
    analysis: Analysis,
    solution: Solution,
    known: Collection[Choice],
) -> tuple[list[Candidate], list[Candidate]]:
    """Finds plans and presets that fit by compiled sizes, without known choices."""
    problem, names = solution.problem, {one.name for one in solution.candidates}
    programs = programs_of(analysis, solution.candidates, context.environment)
    factors = dict[Choice, float]()
    for (choice, *_), one in compiled_before(context, programs).items():
        # Ratio of compiled to predicted temporary memory.
        size = prediction_of(analysis, problem, choice).size
        if size is not None and size.temp_bytes:
            needed = max(0, one.peak_bytes - size.argument_bytes)
            # Of several constraint levels, the smallest ratio counts.
            factor = needed / size.temp_bytes
            factors[choice] = min(factor, factors.get(choice, factor))
    if problem is None or problem.budget_bytes is None or not factors:
        return [], []
    usual, most = median(factors.values()), max(factors.values())
    scaled = [scale_memory(problem, factor) for factor in dict.fromkeys((usual, most))]
    best = dict.fromkeys(
        whole_choice(analysis, one, found)
        for one in scaled
        if (found := solve(one)) is not None
    )
    reckonings = (scaled[0], scale_memory(scaled[0], context.usual_temp_share))
    again = rematerialized(analysis, reckonings, solution.named)
    presets = {
        f"{name} further" if name in names else name: choice
        for name, choice in again.items()
        if choice not in known
    }

    first = 1 + sum(name.startswith(LESS_MEMORY) for name in names)
    new = (choice for choice in best if choice not in known)
    plans = [Candidate(less_memory(n), one) for n, one in enumerate(new, first)]
    others = named_candidates(presets, context.rules.levels)
    return _predicted(analysis, problem, plans), _predicted(analysis, problem, others)


def _predicted(
    analysis: Analysis, problem: Problem | None, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Returns candidates with their predicted times."""
    times = [prediction_of(analysis, problem, one.choice).time_ms for one in candidates]
    pairs = zip(candidates, times, strict=True)
    return [replace(one, predicted_ms=time_ms) for one, time_ms in pairs]


def _smallest(
    context: PlanContext,
    analysis: Analysis,
    solution: Solution,
    results: Sequence[RaceResult],
) -> Solution | None:
    """Returns the best by compiled sizes and the leanest that were not compiled yet."""
    assert solution.problem is not None, "something was searched"
    done = [r.candidate for r in results if not r.skipped]
    known = {one.choice for one in done}
    plans, _ = _fitting_as_compiled(context, analysis, solution, known)
    tried = {(one.choice, one.level) for one in done}
    # The last plan is that of the largest ratio.
    every = (*plans[-1:], leanest_of(analysis, solution.problem))
    found = [one for one in every if (one.choice, one.level) not in tried]
    return replace(solution, candidates=found, stage=Stage.SMALLEST) if found else None


def _no_preset(
    name: str, known: Mapping[str, Choice], analysis: Analysis
) -> OptionError:
    here = analysis.frame.mesh
    own = ALIASES.get(name, name)
    if own in PRESETS and own not in known:
        role, storage = PRESETS[own]
        alike = preset(analysis.frame, (role,) * len(here), storage)
        same = next(other for other, choice in known.items() if choice == alike)
        why = "it finds nothing of its own to shard"
        if storage is Storage.INNER:
            why = "the mesh has no axis within hosts beside one from host to host"
        return OptionError(
            f"The preset {own!r} shards this program as {same!r} does, since {why}. "
            f"Use {same!r}."
        )
    axes = [part.partition("=")[0] for part in name.split(",") if "=" in part]
    text = f"There is no preset {name!r} for this program"
    if axes and here and axes != [axis for axis, _ in here]:
        mesh = ",".join(f"{axis}=2" for axis in axes)
        text = (
            f"The preset {name!r} is for a mesh with the axes {', '.join(axes)}, and "
            f"this one is {mesh_text(here)}. Give such a mesh, as --mesh {mesh}, or a "
            "preset of this one"
        )
    return OptionError(f"{text}. {known_names(name, known, ALIASES)}")


def preset_solution(context: PlanContext, analysis: Analysis, name: str) -> Solution:
    """Makes a preset, given by name, the solution without a search.

    The preset races with attention kernels and as written, since a kernel may fail or
    be slower. Without compiling, real devices get the preset as written.

    Raises:
        OptionError: the program has no preset of this name.
    """
    known = presets(analysis.frame)
    for one, other in ((ZERO1, DATA_PARALLEL), (DATA_PARALLEL, REPLICATED)):
        name = other if name == one and name not in known else name
    if not analysis.frame.mesh and is_known(name):
        name = REPLICATED  # On one device every preset shards nothing.
    if name not in known:
        known = named_choices(analysis.frame)  # Propagation takes longer than the rest.
    if name not in known:
        raise _no_preset(name, known, analysis)
    written, rates, replacing = known[name], None, context.rules.replacing
    if decided := context.rules.estimates:
        found = profile(context, analysis)
        rates, replacing = found.costs.rates, found.replacing
    else:
        rates = known_rates(context.devices, context.store)
    likely = rates or Rates.default(analysis.frame.mesh)
    problem = estimate_options(
        estimate_kinds(analysis, likely, written.blocks),
        {name: written},
        Costs(analysis, likely, measured=False),
        per_kind=0,
        budget_bytes=None,
        replacing=replacing,
    ).problem
    assert problem is not None, "estimates are a problem"
    best = with_kernels(analysis, problem, {name: written})[name]
    candidates = [Candidate(name, best if context.compiles or decided else written)]
    if best != written and context.compiles:
        candidates.append(Candidate(f"{name} (as written)", written))
    if not decided:
        return Solution(candidates, rates=rates)
    candidates = _predicted(analysis, problem, candidates)
    return Solution(candidates, rates=rates, problem=problem, stage=Stage.SMALLEST)
