"""The profile pass: selects strategies of segments, and measures or estimates them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.context import DecidedBy, PlanContext
from cfp.cost.costs import Costs
from cfp.cost.estimate import SegmentEstimate
from cfp.devices.described import DescribedMesh
from cfp.presets.presets import named_choices
from cfp.profiling.collectives import measure_rates
from cfp.profiling.measurer import Measurer
from cfp.profiling.rates import Rates
from cfp.search.choices import estimate_among, leading_presets, preset_times
from cfp.search.expected import estimate_options
from cfp.search.guided import measure_candidates
from cfp.search.requests import UNMEASURED_STRATEGIES, Profiles, RequestBuilder
from cfp.search.solver import leanest, solve
from cfp.settings import MEASURED_SHARE, Dimension, Replacing
from cfp.solution import Estimate


def profile(
    context: PlanContext,
    analysis: Analysis,
    all_presets: bool = False,
    races: bool = True,
) -> Profiles:
    """Measures options of every kind of segment, at the search's requests.

    Args:
        all_presets: see `profile_segments`.
        races: True leaves a share of a budget of time to a race.
    """
    started = time.perf_counter()
    if context.rules.estimates:
        return _estimated(context, analysis, started)
    end = _end_of_measuring(context) if races else context.end
    rates = measured_rates(context)
    found, measurer = profile_segments(
        context,
        analysis,
        rates,
        measure=context.settings.measure is not False,
        all_presets=all_presets,
        end=end,
    )
    jobs = {item.own_job.key.digest for item in found.requests}
    done, cached = [*map(found.records.get, jobs)], len(jobs & {*measurer.known})
    counts = {
        "strategies_measured": sum(record is not None for record in done) - cached,
        "strategies_cached": cached,
        "strategies_failed": sum(r is not None and not r.ok for r in done),
        "profile_seconds": time.perf_counter() - started,
    }
    if measurer.has_end and (late := found.unmeasured):
        counts[UNMEASURED_STRATEGIES] = len(late)
    return replace(found, counts=counts)


def _end_of_measuring(context: PlanContext) -> float:
    """The moment at which measuring ends; a race has the rest of the time."""
    if context.decided_by is not DecidedBy.RACE:
        return context.end
    now = time.monotonic()
    return now + MEASURED_SHARE * (context.end - now)


def profile_segments(
    context: PlanContext,
    analysis: Analysis,
    rates: Rates,
    *,
    measure: bool,
    all_presets: bool = False,
    end: float | None = None,
) -> tuple[Profiles, Measurer]:
    """Measures segments; returns the profiles and their measurer.

    Args:
        measure: False uses only stored records, and no device.
        end: monotonic time at which measuring ends; by default planning's end.
        all_presets: True measures slow presets of much memory, too.
    """
    settings, rules = context.settings, context.rules
    estimates, among = estimate_among(
        analysis, rates, named_choices(analysis.frame), settings.dimensions
    )
    every = leading_presets(analysis, estimates, among)
    costs = Costs(analysis, rates, Dimension.REMAT in settings.dimensions)
    memory = context.memory
    if memory is not None:
        needs = {name: costs.least_peak_bytes(c) for name, c in every.items()}
        able = {n: every[n] for n, b in needs.items() if b <= memory.budget_bytes}
        every = able or every
    # Where memory is short, what saves it is worth measuring however long it takes; and
    # so are all where one could not be built or run, or nothing fits once compiled.
    near = leading_presets(analysis, estimates, every, rules.estimate_reach)
    tight = _tight_by_estimate(context, every, estimates, costs)
    with_leaner = partial(_with_leaner, analysis, estimates, costs, every, near)
    short = memory is not None and tight
    first = every if all_presets else with_leaner() if short else near
    replacing = rules.replacing_for_memory if tight else rules.replacing
    measurer = Measurer(
        analysis.frame.program,
        context.devices,
        context.store,
        measure,
        context.measure,
        context.end if end is None else end,
    )

    def explored(leading: Mapping[str, Choice]) -> Profiles:
        maker = RequestBuilder(
            costs=costs,
            presets=leading,
            estimates=estimates,
            environment=context.environment,
            in_context=settings.in_context,
            replacing=replacing,
        )
        return measure_candidates(
            maker,
            per_kind=settings.per_kind,
            others=settings.others,
            budget_bytes=context.budget_bytes,
            measurer=measurer,
        )

    found = explored(first)
    while True:
        failed = any(not record.ok for record in found.records.values())
        wider = every if failed else with_leaner() if found.memory_bound else first
        if not wider.keys() - first.keys():
            break
        more = explored(wider)
        # If time was over, less is known of all presets than is of the first ones.
        if found.memory_bound and measurer.is_over and not more.memory_bound:
            break
        found, first = more, wider
    return replace(found, has_all_presets=first == every), measurer


def _with_leaner(
    analysis: Analysis,
    estimates: Sequence[SegmentEstimate],
    costs: Costs,
    presets: Mapping[str, Choice],
    near: Mapping[str, Choice],
) -> dict[str, Choice]:
    """Adds presets that need less memory than all faster ones to the near presets."""
    times_ms = preset_times(analysis, estimates, presets)
    needs = {name: costs.least_peak_bytes(one) for name, one in presets.items()}
    least = min((needs[name] for name in near), default=0)
    found = dict(near)
    for name in sorted(presets.keys() - near.keys(), key=times_ms.__getitem__):
        if needs[name] < least:
            least, found[name] = needs[name], presets[name]
    return found


def _tight_by_estimate(
    context: PlanContext,
    presets: Mapping[str, Choice],
    estimates: Sequence[SegmentEstimate],
    costs: Costs,
) -> bool:
    """True if the fastest of the presets' parts may not fit, by estimates."""
    if context.budget_bytes is None:
        return False
    return estimate_options(
        estimates,
        presets,
        costs,
        per_kind=0,
        budget_bytes=context.budget_bytes,
        replacing=context.rules.replacing,
    ).memory_bound


def measured_rates(context: PlanContext) -> Rates:
    """The devices' rates, measured or from the store."""
    return measure_rates(context.devices, context.store, context.measure)


def estimate(context: PlanContext, analysis: Analysis) -> Estimate:
    """Estimates what the best choice for a program takes; of it nothing runs."""
    started = time.perf_counter()
    profiles = _estimated(context, analysis, started)
    problem = profiles.problem
    assert problem is not None, "estimates decide"
    best = solve(problem)
    found = best or leanest(problem)
    return Estimate(
        time_ms=found.cost_ms,
        memory_bytes=found.memory_bytes,
        fits=best is not None,
        is_final=context.rules.estimates,
        profiles=profiles if context.rules.estimates else None,
    )


def _estimated(context: PlanContext, analysis: Analysis, started: float) -> Profiles:
    """Estimates all options; only the rates of real devices are measured."""
    context.measure.tell("estimating what each strategy takes")
    if isinstance(context.mesh, DescribedMesh):
        rates = context.mesh.rates
    elif context.rules.estimates:
        rates = Rates.of_virtual_devices(context.devices)
    else:
        rates = measured_rates(context)
    rules = context.rules
    estimates, among = estimate_among(
        analysis, rates, named_choices(analysis.frame), context.settings.dimensions
    )
    named = leading_presets(analysis, estimates, among)
    may = Dimension.REMAT in context.settings.dimensions
    costs = Costs(analysis, rates, may, measured=False)

    def options_of(replacing: Replacing) -> Profiles:
        return estimate_options(
            estimates,
            named,
            costs,
            per_kind=context.settings.per_kind,
            budget_bytes=context.budget_bytes,
            replacing=replacing,
        )

    found = options_of(rules.replacing)
    if found.memory_bound and rules.replacing_for_memory != rules.replacing:
        found = options_of(rules.replacing_for_memory)
    problem = found.problem
    assert problem is not None, "estimates decide"
    counts = {
        "strategies_estimated": sum(map(len, problem.options)),
        "estimate_seconds": time.perf_counter() - started,
    }
    return replace(found, counts=counts)
