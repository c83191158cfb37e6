"""The profile pass: selects strategies of segments, and measures or estimates them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.context import PlanContext
from cfp.cost.costs import Costs, SegmentEstimate
from cfp.devices.described import DescribedMesh
from cfp.profiling.collectives import Rates, measure_rates
from cfp.profiling.jobs import Measurer
from cfp.search.choices import estimate_among, leading_presets, preset_times
from cfp.search.guided import estimate_options, measure_candidates
from cfp.search.requests import UNMEASURED_STRATEGIES, Profiles, RequestBuilder
from cfp.search.solver import leanest, solve
from cfp.settings import MEASURED_SHARE, Dimension
from cfp.solution import Estimate


def profile(
    context: PlanContext,
    analysis: Analysis,
    all_presets: bool = False,
    races: bool = True,
) -> Profiles:
    """Measures or estimates strategies of every kind of segment (a run of blocks).

    Args:
        all_presets: True also measures presets that are slow by estimate.
        races: True leaves a share of the time budget for a race.
    """
    started = time.perf_counter()
    if context.rules.estimates:
        return _estimated(context, analysis, started)
    end = context.end
    if races and context.races:  # The race has the rest of the time.
        now = time.monotonic()
        end = now + MEASURED_SHARE * (end - now)
    rates = measured_rates(context)
    measurer = Measurer(
        analysis.frame.program,
        context.devices,
        context.store,
        context.settings.measure is not False,
        context.measure,
        end,
    )
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
    """Measures strategies until no unmeasured preset may be faster or leaner."""
    settings, rules = context.settings, context.rules
    estimates, every = estimate_among(analysis, rates, settings.dimensions)
    costs = Costs(analysis, rates, Dimension.REMAT in settings.dimensions)
    if memory := context.memory:
        least = costs.least_peak_bytes
        able = {n: c for n, c in every.items() if least(c) <= memory.budget_bytes}
        every = able or every
    # If memory is short, leaner presets are measured though they are slow. If a
    # strategy fails, or nothing fits once compiled, all presets are.
    near = leading_presets(analysis, estimates, every, rules.estimate_reach)
    leaner = _with_leaner(analysis, estimates, costs, every, near)
    # True if the estimated fastest segments of presets exceed the memory.
    tight = estimate_options(
        estimates,
        every,
        costs,
        per_kind=0,
        budget_bytes=context.budget_bytes,
        replacing=rules.replacing,
    ).memory_bound
    first = leaner if memory and tight else near
    maker = RequestBuilder(
        costs=costs,
        presets=every if all_presets else first,
        estimates=estimates,
        environment=context.environment,
        in_context=settings.in_context,
        replacing=rules.replacing_for_memory if tight else rules.replacing,
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


def _with_leaner(
    analysis: Analysis,
    estimates: Sequence[SegmentEstimate],
    costs: Costs,
    presets: Mapping[str, Choice],
    near: Mapping[str, Choice],
) -> dict[str, Choice]:
    """Returns near presets, and others that need less memory than all faster ones."""
    times_ms = preset_times(analysis, estimates, presets)
    needs = {name: costs.least_peak_bytes(one) for name, one in presets.items()}
    least = min((needs[name] for name in near), default=0)
    found = dict(near)
    for name in sorted(presets, key=times_ms.__getitem__):
        if name not in near and needs[name] < least:
            least, found[name] = needs[name], presets[name]
    return found


def measured_rates(context: PlanContext) -> Rates:
    """Returns the devices' rates, from the store or measured now."""
    return measure_rates(context.devices, context.store, context.measure)


def estimate(context: PlanContext, analysis: Analysis) -> Estimate:
    """Estimates the step time of the best choice, without running the program."""
    started = time.perf_counter()
    profiles = _estimated(context, analysis, started)
    problem = profiles.problem
    assert problem is not None, "estimates decide"
    best = solve(problem)
    return Estimate(
        time_ms=(best or leanest(problem)).cost_ms,
        fits=best is not None,
        profiles=profiles if context.rules.estimates else None,
    )


def _estimated(context: PlanContext, analysis: Analysis, started: float) -> Profiles:
    """Estimates all strategies; only rates of real devices are measured."""
    context.measure.tell("estimating what each strategy takes")
    if isinstance(context.mesh, DescribedMesh):
        rates = context.mesh.rates
    elif context.rules.estimates:
        rates = Rates.of_virtual_devices(context.devices)
    else:
        rates = measured_rates(context)
    rules = context.rules
    estimates, named = estimate_among(analysis, rates, context.settings.dimensions)
    may = Dimension.REMAT in context.settings.dimensions
    costs = Costs(analysis, rates, may, measured=False)

    found = estimate_options(
        estimates,
        named,
        costs,
        per_kind=context.settings.per_kind,
        budget_bytes=context.budget_bytes,
        replacing=rules.replacing,
        for_memory=rules.replacing_for_memory,
    )
    problem = found.problem
    assert problem is not None, "estimates decide"
    counts = {
        "strategies_estimated": sum(map(len, problem.options)),
        "estimate_seconds": time.perf_counter() - started,
    }
    return replace(found, counts=counts)
