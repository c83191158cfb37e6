"""The profile pass: selects strategies of segments, and measures or estimates them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.context import DecidedBy, PlanContext, open_context
from cfp.cost.costs import Costs
from cfp.cost.estimate import SegmentEstimate
from cfp.cost.memory import can_rematerialize
from cfp.devices.described import DescribedMesh
from cfp.planner_settings import PlannerSettings
from cfp.presets.presets import named_choices
from cfp.printable import counted
from cfp.profiling.collectives import measure_rates
from cfp.profiling.measurer import Measurer
from cfp.profiling.rates import Rates
from cfp.search.choices import estimate_among, leading_presets, preset_times
from cfp.search.expected import build_problem, estimate_options
from cfp.search.guided import measure_candidates
from cfp.search.problem import Problem
from cfp.search.requests import (
    UNMEASURED_STRATEGIES,
    MeasurementRequest,
    Profiles,
    RequestBuilder,
    measured_options,
    rematerialize,
)
from cfp.search.solver import leanest, solve
from cfp.settings import (
    MEASURED_SHARE,
    ROUND_SIZE,
    Dimension,
    Replacing,
)
from cfp.solution import Estimate
from cfp.units import overtime_text


def profile(
    context: PlanContext,
    analysis: Analysis,
    all_presets: bool = False,
    races: bool = True,
) -> Profiles:
    """Measures options of every kind of segment, as the search asks for them.


    Args:
        all_presets: see `profile_segments`.
        races: whether a race may follow, which has a share of a budget of time.
    """
    started = time.perf_counter()
    if context.rules.estimates:
        return _estimated(context, analysis, started, context.budget_bytes)
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
    done = [found.records.get(item.own_job.key.digest) for item in found.requests]
    cached = sum(item.own_job.key.digest in measurer.known for item in found.requests)
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
    """The moment from which on nothing else is measured.

    Under a budget of time a race has a share of what is left of it.
    """
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
    """All that was asked for, and what answered.

    Args:
        measure: whether to measure; otherwise no device is used.
        end: from this moment on nothing else is measured; by default planning's end.
        all_presets: whether presets are measured, too, that are estimated to be far
            behind and need no less memory than faster ones.
    """
    settings, alone = context.settings, context.agreement.alone
    rules = context.rules
    estimates, among = estimate_among(
        analysis, rates, named_choices(analysis.frame), rules.dimensions
    )
    every = leading_presets(analysis, estimates, among)
    costs = Costs(analysis, rates, Dimension.REMAT in rules.dimensions)
    memory = context.memory
    if memory is not None:
        needs = {name: costs.least_peak_bytes(c) for name, c in every.items()}
        able = {n: every[n] for n, b in needs.items() if b <= memory.budget_bytes}
        every = able or every
    # Where memory is short, what saves it is worth measuring however long it takes; and
    # so are all where one could not be built or run, or nothing fits once compiled.
    # That depends on times, too, that several processes may know differently.
    near = leading_presets(analysis, estimates, every, rules.estimate_reach)
    tight = _tight_by_estimate(context, every, estimates, costs)
    with_leaner = partial(_with_leaner, analysis, estimates, costs, every, near)
    short = memory is not None and tight
    first = every if all_presets or not alone else with_leaner() if short else near
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
            # What is asked for later depends on times, which processes that remember
            # different runs know differently: they measure all at once.
            others=settings.others if alone else settings.per_kind,
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
    """Near presets, and those that need less memory than all estimated to be faster."""
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
    profiles = _estimated(context, analysis, started, context.budget_bytes)
    may = Dimension.REMAT in context.rules.dimensions
    costs = Costs(analysis, profiles.rates, may, measured=False)
    options, budget = profiles.estimated, context.budget_bytes
    problem = build_problem(costs, options, budget, fixed_ms=costs.fixed_ms)
    best = solve(problem)
    found = best or leanest(problem)
    return Estimate(
        time_ms=found.cost_ms,
        memory_bytes=found.memory_bytes,
        fits=best is not None,
        is_final=context.rules.estimates,
        profiles=profiles if context.rules.estimates else None,
    )


def _estimated(
    context: PlanContext, analysis: Analysis, started: float, budget_bytes: int | None
) -> Profiles:
    """Options by estimates; nothing is run, but to find rates that are not known.

    Those of virtual and of described devices are.
    """
    context.measure.tell("estimating what each strategy takes")
    if isinstance(context.mesh, DescribedMesh):
        rates = context.mesh.rates
    elif context.agreement.alone and context.rules.estimates:
        rates = Rates.of_virtual_devices(context.devices)
    else:
        # What lies between processes may be anything, and is found out in seconds.
        rates = measured_rates(context)
    rules = context.rules
    estimates, among = estimate_among(
        analysis, rates, named_choices(analysis.frame), rules.dimensions
    )
    named = leading_presets(analysis, estimates, among)
    may = Dimension.REMAT in rules.dimensions
    costs = Costs(analysis, rates, may, measured=False)

    def options_of(replacing: Replacing) -> Profiles:
        return estimate_options(
            estimates,
            named,
            costs,
            per_kind=context.settings.per_kind,
            budget_bytes=budget_bytes,
            replacing=replacing,
        )

    found = options_of(rules.replacing)
    if found.memory_bound and rules.replacing_for_memory != rules.replacing:
        found = options_of(rules.replacing_for_memory)
    counts = {
        "strategies_estimated": sum(map(len, found.estimated)),
        "estimate_seconds": time.perf_counter() - started,
    }
    return replace(found, counts=counts)


# ------------------------------------------------------------------------- all budgets

# More than any device has.
_PLENTY_BYTES = 2**62
# Less than any program needs.
_TIGHT_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBudgets:
    """The search problem of choices for budgets of any size, and no budget.

    Attributes:
        measured: whether its options were measured; otherwise they are estimated.
        cut: what was not measured, and why, or that it took longer than asked for; ""
            if all was measured in time, or nothing was to be.
    """

    problem: Problem
    measured: bool = True
    cut: str = ""


def profile_all_budgets(
    analysis: Analysis,
    mesh: Mesh,
    cache_dir: str | Path | None,
    settings: PlannerSettings,
) -> AllBudgets:
    """Measures or estimates choices for budgets of any size, and no budget.

    These are what a search with plenty of memory asks for, the presets among it, and
    the fastest of every kind of segment with their forward pass rematerialized: of
    these, if the time of the settings is over, only what is known.

    Raises:
        CfpError: nothing can be measured.
    """
    started = time.perf_counter()
    with open_context(mesh, cache_dir, _PLENTY_BYTES, settings) as context:
        if context.rules.estimates:
            found = _estimated(context, analysis, started, _TIGHT_BYTES)
            costs = Costs(analysis, found.rates, measured=False)
            options, fixed_ms = found.estimated, costs.fixed_ms
            problem = build_problem(costs, options, None, fixed_ms=fixed_ms)
            return AllBudgets(problem=problem, measured=False)
        rates = measured_rates(context)
        found, measurer = profile_segments(
            context, analysis, rates, measure=True, all_presets=True
        )
        wanted, records = [*found.requests], dict(found.records)
        again = _again(context, analysis, found)
        wanted += again
        jobs = [job for item in again for job in item.jobs]
        for start in range(0, len(jobs), ROUND_SIZE):
            if measurer.is_over:
                break  # Without the others there is a curve, too.
            measurer(jobs[start : start + ROUND_SIZE])
        records |= context.store.get_many(job.key.digest for job in jobs)
        late, given = time.monotonic() - context.end, context.settings.seconds
    costs = Costs(analysis, rates)
    problem = build_problem(costs, measured_options(costs, wanted, records), None)
    missing = [item for item in wanted if item.outcome(records) is None]
    cut = _cut_text(wanted, missing)
    overtime = overtime_text("Measuring", late, given)
    return AllBudgets(problem=problem, cut=". ".join(filter(None, (cut, overtime))))


def _cut_text(
    wanted: Sequence[MeasurementRequest],
    missing: Sequence[MeasurementRequest],
) -> str:
    """Says what was not measured for lack of time; "" if all was."""
    if not missing:
        return ""
    again = sum(item.candidate.remat for item in missing)
    what = f"{len(missing)} of {counted(len(wanted), 'strategy', 'strategies')}"
    if again:
        what += f", {again} of them rematerialized"
    return (
        f"Not measured, since time was over: {what}. The curve may be better with "
        "them: run it again with a longer --time-budget, for what is measured is kept"
    )


def _again(
    context: PlanContext, analysis: Analysis, profiles: Profiles
) -> list[MeasurementRequest]:
    """The fastest candidates of every kind, with their forward pass rematerialized.

    The fastest of all kinds come first, since time may be over before the last.
    """
    records = profiles.records
    found: list[tuple[int, MeasurementRequest]] = []
    for kind, index in enumerate(analysis.representatives):
        if not can_rematerialize(analysis.frame, analysis.segments[index]):
            continue
        good = [
            (item.time_ms(records), item)
            for item in profiles.requests
            if item.kind == kind
            and not item.candidate.remat
            and item.is_measured(records)
        ]
        good.sort(key=lambda pair: pair[0])
        for number, (_, item) in enumerate(good[: context.settings.per_kind], 1):
            label = f"strategy {number} of segment {kind}, rematerialized"
            again = rematerialize(analysis, context.environment, item, label, records)
            found.append((number, again))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]
