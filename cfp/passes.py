"""The passes that analyze a step, profile its segments, and search for a plan.

Analyze traces a step and analyzes it on a mesh. It reads types of the arguments, and
values of scalars and small masks (:mod:`cfp.program.step`). Profile selects strategies
of each segment (a run of blocks that repeats), and measures or estimates them. Search
finds the fastest choice that fits in memory by prediction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.analysis.analyze import Analysis, analyze, resolve_pins
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.presets import (
    ALIASES,
    DATA_PARALLEL,
    PRESETS,
    REPLICATED,
    ZERO1,
    check_preset,
    named_choices,
    preset,
    presets,
)
from cfp.analysis.roles import has_experts
from cfp.context import PlanContext, PlannerSettings, open_context
from cfp.cost.costs import Costs
from cfp.cost.described import DescribedMesh, slice_of
from cfp.errors import OptionError, known_names
from cfp.printable import mesh_text, parse_bytes
from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.collectives import Rates, known_rates, measure_rates
from cfp.profiling.jobs import Measurer
from cfp.profiling.record import environment_parts
from cfp.profiling.runner import place_of_parts
from cfp.program.graph import PARTITIONED
from cfp.program.memory import mesh_of_results
from cfp.program.step import FlatStep, flatten_step
from cfp.program.trace import Lowering, planning_mesh, trace
from cfp.race.admission import over_budget
from cfp.race.compile import EARLIER_RUN, compiled_before
from cfp.race.programs import (
    LESS_MEMORY,
    TOO_LARGE,
    UNMEASURED,
    RaceOutcome,
    RaceResult,
    leanest_of,
    like,
    named_candidates,
    programs_of,
    rematerialized,
    with_kernels,
)
from cfp.search.choices import (
    estimate_among,
    estimate_kinds,
    leading_presets,
    preset_times,
    whole_choice,
)
from cfp.search.guided import (
    RACE_SECONDS,
    Candidate,
    Estimate,
    Solution,
    Stage,
    build_problem,
    estimate_options,
    expect,
    measure_candidates,
    prediction_of,
)
from cfp.search.requests import (
    UNMEASURED_STRATEGIES,
    Profiles,
    RequestBuilder,
    measured_options,
)
from cfp.search.solver import Problem, leanest, scale_memory, solve
from cfp.settings import COMPILED_TO_PREDICTED, MEASURED_SHARE, Dimension

Pins = Mapping[str, PartitionSpec | NamedSharding | str]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of :func:`cfp.plan` that all variants of a step share."""

    static_argnums: int | Sequence[int] = ()
    static_argnames: str | Sequence[str] = ()
    donate_argnums: int | Sequence[int] = ()
    donate_argnames: str | Sequence[str] = ()
    memory_budget: int | str | None = None
    pins: Pins | None = None
    preset: str | None = None
    cache_dir: str | Path | None = None
    settings: PlannerSettings = field(default_factory=PlannerSettings)

    def __post_init__(self) -> None:
        parse_bytes(self.memory_budget)
        check_preset(self.preset)

    @property
    def of_arguments(self) -> dict[str, Any]:
        """The four options that name static and donated arguments, as keywords."""
        return {name: value for name, value in vars(self).items() if "_arg" in name}

    def flatten(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> FlatStep:
        """Returns the step as a function of flat arrays; see `flatten_step`."""
        precision = self.settings.precision
        return flatten_step(fn, args, kwargs, **self.of_arguments, precision=precision)

    def context(
        self, mesh: Mesh | DescribedMesh
    ) -> AbstractContextManager[PlanContext]:
        budget = parse_bytes(self.memory_budget)
        return open_context(mesh, self.cache_dir, budget, self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Analyzed:
    """A step, traced and analysed.

    Attributes:
        mesh: the devices, real or described.
        analysis: the step's blocks and segments (repeated runs of blocks).
        seconds: time of tracing and analysing.
        profiles: estimated profiles that replace the profile pass; None without.
    """

    step: FlatStep
    mesh: Mesh | DescribedMesh
    lowering: Lowering
    analysis: Analysis
    seconds: float
    profiles: Profiles | None = None


def analyze_step(
    step: FlatStep, mesh: Mesh | DescribedMesh, pins: Pins | None = None
) -> Analyzed:
    """Traces and analyses a step; meshes of equally many devices may share a trace.

    Raises:
        CfpError: the step cannot be traced, or the pins do not fit.
    """
    started = time.perf_counter()
    if isinstance(mesh, DescribedMesh):
        where = mesh.abstract
    else:
        where, mesh = planning_mesh(mesh), mesh_of_results(mesh, step.explicit)
    axes = tuple(mesh.shape.items())
    devices = type(where), prod(mesh.shape.values())
    if devices in step.programs:
        program, lowering = step.programs[devices]
    else:
        program, lowering = trace(step, where)
        calls = (op.manual or PARTITIONED.search(op.attributes) for op in program.ops)
        if not any(calls):
            step.programs[devices] = program, lowering  # No op depends on the mesh.
    pinned = resolve_pins(pins or {}, program, axes, step.other_names)
    analysis = analyze(program, axes, pinned, outer_axes(mesh))
    return Analyzed(
        step=step,
        mesh=mesh,
        lowering=lowering,
        analysis=analysis,
        seconds=time.perf_counter() - started,
    )


def outer_axes(mesh: Mesh | DescribedMesh) -> frozenset[str]:
    """Returns the mesh axes that cross hosts; for a TPU slice, at most one axis."""
    if isinstance(mesh, DescribedMesh):
        return mesh.outer
    devices = [*mesh.devices.flat]
    known = dict(environment_parts(devices)).get("hosts", "0")  # Of several processes.
    hosts = np.resize(known.split(","), mesh.devices.shape)
    names = enumerate(mesh.axis_names)
    found = [n for i, n in names if (hosts != hosts.take([0], i)).any()]
    return frozenset(found[:1] if slice_of(devices) else found)


def profile(
    context: PlanContext,
    analysis: Analysis,
    all_presets: bool = False,
    races: bool = True,
) -> Profiles:
    """Measures or estimates strategies of every kind of segment (a run of blocks).

    Args:
        all_presets: True also measures presets slow by estimate, if they may fit.
        races: True leaves a share of the time budget for a race, if there is one.

    Raises:
        CfpError: no strategy of some kind could be measured.
    """
    started = time.perf_counter()
    if context.defaults.estimates:
        return _estimated(context, analysis, started)
    end = context.end
    if races and context.races:  # The race has the rest of the time.
        now = time.monotonic()
        end = now + MEASURED_SHARE * (end - now)
    rates = measured_rates(context)
    program, kept = analysis.frame.program, BuildEnvironment.beside(context.store.path)
    place = place_of_parts(program, context.devices, kept)
    how = context.settings.measure is not False, context.measure, program.name, end
    measurer = Measurer(place, context.store, *how)
    found = _measured(context, analysis, rates, measurer, all_presets)
    jobs = {item.own_job.key.digest for item in found.requests}
    done, cached = [*map(found.records.get, jobs)], len(jobs & {*measurer.known})
    counts = {
        "strategies_measured": sum(record is not None for record in done) - cached,
        "strategies_cached": cached,
        "strategies_failed": sum(r is not None and not r.ok for r in done),
        "profile_seconds": time.perf_counter() - started,
    }
    late = sum(one.outcome(found.records) is None for one in found.requests)
    if measurer.has_end and late:
        counts[UNMEASURED_STRATEGIES] = late
    return replace(found, counts=counts)


def _measured(
    context: PlanContext,
    analysis: Analysis,
    rates: Rates,
    measurer: Measurer,
    all_presets: bool,
) -> Profiles:
    """Measures strategies; of more presets if one fails, or if memory may be short."""
    settings, defaults = context.settings, context.defaults
    estimates, every = estimate_among(analysis, rates, settings.dimensions)
    costs = Costs(analysis, rates, Dimension.REMAT in settings.dimensions)
    needs = {name: costs.least_peak_bytes(one) for name, one in every.items()}
    if memory := context.memory:
        able = {n: c for n, c in every.items() if needs[n] <= memory.budget_bytes}
        every = able or every
    # If memory is short, slow but lean presets are measured; after a failure, all.
    near = leading_presets(analysis, estimates, every, defaults.estimate_reach)
    leaner, least = dict(near), min((needs[name] for name in near), default=0)
    times_ms = preset_times(analysis, estimates, every)
    for name in sorted(every, key=times_ms.__getitem__):
        if name not in near and needs[name] < least:
            least, leaner[name] = needs[name], every[name]
    # True if the estimated fastest segments of presets exceed the memory.
    tight = estimate_options(
        estimates,
        every,
        costs,
        per_kind=0,
        budget_bytes=context.budget_bytes,
        replacing=defaults.replacing,
    ).memory_bound
    first = leaner if memory and tight else near
    maker = RequestBuilder(
        costs=costs,
        presets=every if all_presets else first,
        estimates=estimates,
        environment=context.environment,
        in_context=settings.in_context,
        replacing=defaults.replacing_for_memory if tight else defaults.replacing,
        options=defaults.shared_options,
    )
    explored = partial(
        measure_candidates,
        per_kind=settings.per_kind,
        others=settings.others,
        budget_bytes=context.budget_bytes,
        measurer=measurer,
    )
    found = explored(maker)
    while True:
        failed = any(not record.ok for record in found.records.values())
        wider = every if failed else leaner if found.memory_bound else {}
        if not wider.keys() - found.presets.keys():
            break
        more = explored(replace(maker, presets=wider))
        # Without time left, the wider set is measured less than the first presets.
        if found.memory_bound and measurer.is_over and not more.memory_bound:
            break
        found = more
    return replace(found, has_all_presets=found.presets == every)


def measured_rates(context: PlanContext) -> Rates:
    """Returns rates of compute, memory and collectives, stored or measured now."""
    return measure_rates(context.devices, context.store, context.measure)


def estimate(context: PlanContext, analysis: Analysis) -> Estimate:
    """Estimates the fastest choice that fits, else the leanest; may measure rates."""
    profiles = _estimated(context, analysis, time.perf_counter())
    problem = profiles.problem
    assert problem is not None, "estimates decide"
    best = solve(problem)
    return Estimate(
        time_ms=(best or leanest(problem)).cost_ms,
        fits=best is not None,
        profiles=profiles if context.defaults.estimates else None,
    )


def _estimated(context: PlanContext, analysis: Analysis, started: float) -> Profiles:
    """Estimates presets and the best others; may measure rates of devices."""
    context.measure.tell("estimating what each strategy takes")
    if isinstance(context.mesh, DescribedMesh):
        rates = context.mesh.rates
    elif context.defaults.estimates:
        rates = Rates.of_virtual_devices(context.devices)
    else:
        rates = measured_rates(context)
    defaults = context.defaults
    estimates, named = estimate_among(analysis, rates, context.settings.dimensions)
    may = Dimension.REMAT in context.settings.dimensions
    costs = Costs(analysis, rates, may, measured=False)
    found = estimate_options(
        estimates,
        named,
        costs,
        per_kind=context.settings.per_kind,
        budget_bytes=context.budget_bytes,
        replacing=defaults.replacing,
        for_memory=defaults.replacing_for_memory,
    )
    problem = found.problem
    assert problem is not None, "estimates decide"
    counts = {
        "strategies_estimated": float(sum(map(len, problem.options))),
        "estimate_seconds": time.perf_counter() - started,
    }
    return replace(found, counts=counts)


def search(context: PlanContext, analysis: Analysis, profiles: Profiles) -> Solution:
    """Returns candidates: the fastest choices that fit by prediction, and presets.

    If no choice fits, that of least memory takes their place. Presets may not fit.

    Raises:
        MemoryBudgetError: no choice fits by prediction, and nothing is compiled.
    """
    started = time.perf_counter()
    context.measure.tell("searching for the fastest plan")
    costs = profiles.costs
    # Times beside a neighbour, and times of segments alone; or estimates.
    problems = [profiles.problem] if profiles.problem else []
    for alone in () if problems else (False, True):
        wanted, records = profiles.requests, profiles.records
        options = measured_options(costs, wanted, records, alone)
        problems.append(build_problem(costs, options, context.budget_bytes))
    problem, tight = problems[0], profiles.memory_bound
    named = plain = with_kernels(analysis, problem, profiles.presets)
    if tight and context.compiles and not profiles.problem:
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
        if not context.compiles:
            reserve = context.memory.reserve_bytes if context.memory else 0
            raise over_budget(analysis, problem, reserve)
        found = {leanest_of(analysis, problem).choice: None}
    first, *others = found
    candidates = [
        Candidate("planned", first),
        *named_candidates(named, context.defaults.levels),
        *(Candidate(f"planned {n}", choice) for n, choice in enumerate(others, 2)),
    ]
    every = presets(analysis.frame)
    most = context.memory.budget_bytes if context.memory else inf
    unraced = {
        name: TOO_LARGE if costs.least_peak_bytes(every[name]) > most else UNMEASURED
        for name in every
        if name in PRESETS and name not in named
    }
    return Solution(
        _predicted(analysis, problem, candidates),
        unraced=unraced,
        problem=problem,
        counts={**profiles.counts, "search_seconds": time.perf_counter() - started},
        rates=costs.rates,
        named=plain,
        profiles=profiles,
    )


def search_further(
    context: PlanContext, analysis: Analysis, outcome: RaceOutcome
) -> Solution | None:
    """Searches again after a race; returns None if no search is left.

    Without a winner: by compiled sizes, else of all presets, else candidates of least
    memory; once time is over, only the last. With a winner: by compiled sizes, if it
    rematerializes and predicted memory was ample. After a remembered winner without a
    race: by compiled sizes, else of all presets.
    """
    solution, won = outcome.solution, outcome.winner
    profiles, may_go_on = solution.profiles, not context.is_over
    goes_on = won is None or (not context.races and won.name.startswith(EARLIER_RUN))
    if won is not None and not goes_on:
        saw_no_need = profiles is not None and not profiles.memory_bound
        may_go_on = may_go_on and saw_no_need and bool(won.choice.remat)
    found = None
    if profiles is not None and may_go_on and solution.stage is Stage.PREDICTED:
        found = search_as_compiled(context, analysis, solution)
        if found is None and goes_on and profiles.has_all_presets:
            # Candidates known not to fit are skipped, and others are compiled.
            found = replace(solution, stage=Stage.CORRECTED)
    if goes_on and found is None:
        if profiles is not None and may_go_on and not profiles.has_all_presets:
            profiles = profile(context, analysis, all_presets=True)
            found = search(context, analysis, profiles)
        elif won is None and solution.problem and solution.stage is not Stage.SMALLEST:
            found = _smallest(context, analysis, solution, outcome.results)
    if found is None:
        return None
    spent = {RACE_SECONDS: outcome.counts.get(RACE_SECONDS, 0.0)}
    return replace(found, counts={**found.counts, **spent})


def search_as_compiled(
    context: PlanContext, analysis: Analysis, solution: Solution
) -> Solution | None:
    """Searches with temporary memory scaled by compiled-to-predicted ratios.

    Uses the median and the largest ratio, and may rematerialize further segments.
    Returns None if nothing was searched before, or nothing is new.
    """
    problem, rates = solution.problem, solution.rates
    if problem is None or rates is None:
        return None
    may = Dimension.REMAT in context.settings.dimensions
    costs = Costs(analysis, rates, may, measured=not context.defaults.estimates)
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
    plans, named = _fitting_by_scaled_memory(context, analysis, solution, known)
    if not (plans or named or is_wider):
        return None
    return replace(solution, candidates=[*plans, *named, *solution.candidates])


def _fitting_by_scaled_memory(
    context: PlanContext,
    analysis: Analysis,
    solution: Solution,
    known: Collection[Choice],
) -> tuple[list[Candidate], list[Candidate]]:
    """Returns (plans, rematerialized presets), none in `known`, that fit if scaled."""
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
    plans = [Candidate(f"{LESS_MEMORY} {n}", one) for n, one in enumerate(new, first)]
    others = named_candidates(presets, context.defaults.levels)
    return _predicted(analysis, problem, plans), _predicted(analysis, problem, others)


def _predicted(
    analysis: Analysis, problem: Problem | None, candidates: Sequence[Candidate]
) -> list[Candidate]:
    predict = partial(prediction_of, analysis, problem)
    return [replace(o, predicted_ms=predict(o.choice).time_ms) for o in candidates]


def _smallest(
    context: PlanContext,
    analysis: Analysis,
    solution: Solution,
    results: Sequence[RaceResult],
) -> Solution | None:
    """Returns a solution of new candidates of little memory; None if all were tried.

    The fastest by compiled sizes, the leanest, the leanest like the smallest program;
    and presets predicted below that program, constrained at arguments as if by hand.
    """
    problem, most = solution.problem, inf
    assert problem is not None, "something was searched"
    done = [r.candidate for r in results if not r.skipped]
    tried = {(one.choice, one.level) for one in done}
    known = {choice for choice, _ in tried}
    plans, _ = _fitting_by_scaled_memory(context, analysis, solution, known)
    every = [*plans[-1:], leanest_of(analysis, problem)]
    compiled = [one for one in results if one.peak_bytes]
    if best := min(compiled, key=lambda one: one.peak_bytes, default=None):
        most, kept = best.peak_bytes, like(analysis, problem, best.candidate.choice)
        if kept is not None:
            leaner, name = leanest_of(analysis, problem.among(kept)), best.name
            every.append(replace(leaner, name=f"{name.partition(',')[0]}, leanest"))
    for one in _predicted(analysis, problem, named_candidates(solution.named)):
        if (prediction_of(analysis, problem, one.choice).peak_bytes or 0) < most:
            every.append(one)
    new = {(one.choice, one.level): one for one in reversed(every)}
    found = [one for key, one in reversed(new.items()) if key not in tried]
    return replace(solution, candidates=found, stage=Stage.SMALLEST) if found else None


def _no_preset(
    name: str, known: Mapping[str, Choice], analysis: Analysis
) -> OptionError:
    here = analysis.frame.mesh
    if name in PRESETS:
        role, storage = PRESETS[name]
        alike = preset(analysis.frame, (role,) * len(here), storage)
        same = next((n for n, one in known.items() if one == alike), REPLICATED)
        why = "it finds nothing of its own to shard"
        if storage is Storage.INNER:
            why = "the mesh has no axis within hosts beside one from host to host"
        elif role == "expert" and not has_experts(analysis.frame):
            why = "the program has no experts"
        return OptionError(
            f"The preset {name!r} shards this program as {same!r} does, since {why}. "
            f"Use {same!r}. {known_names('', known)}"
        )
    axes = [part.partition("=")[0] for part in name.split(",") if "=" in part]
    text = f"There is no preset {name!r}"
    if axes and here and axes != [axis for axis, _ in here]:
        mesh = ",".join(f"{axis}=2" for axis in axes)
        text = (
            f"The preset {name!r} is for a mesh with the axes {', '.join(axes)}, and "
            f"the mesh is {mesh_text(here)}. Give such a mesh, as --mesh {mesh}, or "
            "another preset"
        )
    return OptionError(f"{text}. {known_names(name, known, ALIASES)}")


def preset_solution(context: PlanContext, analysis: Analysis, name: str) -> Solution:
    """Returns a solution of one preset, given by name, without a search.

    Candidates are the preset with kernels, if some can replace ops, and without, since
    a kernel may fail or be slower. Without a race, the faster by estimate comes first.
    If nothing is compiled, and estimates do not decide, no kernels are tried.

    Raises:
        OptionError: the program has no such preset, or has it by another name.
    """
    known = presets(analysis.frame)
    for one, other in ((ZERO1, DATA_PARALLEL), (DATA_PARALLEL, REPLICATED)):
        name = other if name == one and name not in known else name
    if not analysis.frame.mesh:
        name = REPLICATED  # On one device every preset shards nothing.
    if name not in known:
        known = named_choices(analysis.frame)  # Propagation takes longer than the rest.
    if name not in known:
        raise _no_preset(name, known, analysis)
    written, replacing, counts = known[name], context.defaults.replacing, {}
    if decided := context.defaults.estimates:
        found = profile(context, analysis)
        rates, replacing, counts = found.costs.rates, found.replacing, found.counts
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
    every = [option.candidate for row in problem.options for option in row]
    able = {one.as_written for one in every if one.kernels}
    kept = [
        [i for i, option in enumerate(row) if option.candidate not in able]
        for row in problem.options
    ]
    best = with_kernels(analysis, problem.among(kept), {name: written})[name]
    candidates = [Candidate(name, written)]
    if best != written and (context.compiles or decided):
        title = f"{name} (as written)"
        candidates = [Candidate(name, best), Candidate(title, written)]
    if not context.races:
        predict = partial(prediction_of, analysis, problem)
        candidates.sort(key=lambda one: predict(one.choice).time_ms or inf)
    if not decided:
        return Solution(candidates, rates=rates)
    candidates = _predicted(analysis, problem, candidates)
    return Solution(
        candidates, rates=rates, problem=problem, counts=counts, stage=Stage.SMALLEST
    )
