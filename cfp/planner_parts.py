"""What the planner is told, and what its passes hand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from jax.sharding import Mesh

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, lay_out
from cfp.describe import plan_rows
from cfp.errors import CfpError, DeviceError, MemoryBudgetError
from cfp.plan import Plan
from cfp.plan_parts import RaceRow, type_text
from cfp.profiling.collectives import Rates
from cfp.profiling.key import Parts
from cfp.profiling.marks import Limits
from cfp.profiling.moves import Move
from cfp.profiling.runner import Progress
from cfp.profiling.store import ProfileStore
from cfp.program.graft import aval
from cfp.search.assemble import what_to_do, whole_choice
from cfp.search.explain import picks_of
from cfp.search.guided import Explored
from cfp.search.ilp import leanest
from cfp.search.measure import Told, told_of, whole_job
from cfp.search.problem import Problem
from cfp.search.race import Finalist, RaceResult
from cfp.search.remembered import remembered
from cfp.units import format_bytes

# Of the budget: without recomputation predictions were off by 3.2% at most on 2 H200.
_NEARLY = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """How much to measure, and who is told.

    Attributes:
        per_kind: how many strategies to measure for each kind of segment, at most.
        tolerance: measuring ends when no other plan can be faster by more than this
            share of the step.
        patience: or after so many rounds in a row that made no plan faster by that
            share; None for no such end.
        seconds: measuring ends after the round in which this much time is over.
        in_context: whether segments are measured with a neighbour, which predicts
            better and builds twice as many programs.
        plans: how many of the best plans, by each of two ways to predict, take part
            in the race; by default 2, and 1 on virtual CPU devices.
        extents: how much the compiler is told of the classics; each way takes part.
            By default all ways, and one on virtual CPU devices, where a build takes
            longer than the difference is worth.
        reach: classics that are predicted to take this many times as long as the plan
            are not raced; by default 1.1, or 1.2 where the compiler is told of their
            arguments alone, and 2 on virtual CPU devices.
        compiler_options: options of the compiler by the name that the race is to give
            them; the leaders are raced with each, too. By default a short list for
            the platform.
        race: whether the best plan and the classics are timed on the whole program;
            otherwise the prediction is trusted, and under a budget that was asked for
            the best that fits is found by compiling, which runs nothing.
        measure: whether devices may be used; otherwise only records that are in the
            store already.
        retry_failures: whether what failed before is tried again; or what failed
            before a moment, which a process that is started again keeps to.
        limits: what counts as hung.
        progress: told of every event, a :class:`Progress` or a line of text.
    """

    per_kind: int = 16
    tolerance: float = 0.01
    patience: int | None = 1
    seconds: float = float("inf")
    in_context: bool = True
    plans: int | None = None
    extents: tuple[Told, ...] | None = None
    reach: float | None = None
    compiler_options: Mapping[str, Mapping[str, str]] | None = None
    race: bool = True
    measure: bool = True
    retry_failures: bool | datetime = False
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[Progress | str], None] | None = None


@dataclass(frozen=True)
class Profiles:
    """What the profile pass measured.

    Attributes:
        classics: those classics that are worth measuring.
        found: the candidates of every kind of segment, and what they take.
        rates: the devices' rates.
        measured, cached, failed: counts of strategies.
        seconds: how long the pass took.
        moved_ms: what resharding between segments takes, where it was measured.
    """

    classics: Mapping[str, Choice]
    found: Explored
    rates: Rates
    measured: int
    cached: int
    failed: int
    seconds: float
    moved_ms: Mapping[Move, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """A choice for the whole program, and where it came from.

    Attributes:
        name: what the race calls it.
        choice: strategies and storage.
        predicted_ms: its step time by the profiles, or None.
        extent: how much of it the compiler is told.
        options: of the compiler.
        rivals: other choices that the search found promising.
        classics: the classics to race against.
        problem: what was searched, or None for a classic taken by name.
        search: counts and seconds of the search.
    """

    name: str
    choice: Choice
    predicted_ms: float | None = None
    extent: Told = Told.EVERYTHING
    options: Mapping[str, str] = field(default_factory=dict)
    rivals: tuple[Decision, ...] = ()
    classics: Mapping[str, Choice] = field(default_factory=dict)
    problem: Problem | None = None
    search: Mapping[str, float] = field(default_factory=dict)


def extent_name(name: str, extent: Told) -> str:
    """What a choice is called of which the compiler is told as much."""
    return name if extent is Told.EVERYTHING else f"{name}, {extent} told"


def in_reach(
    decision: Decision, classics: Sequence[Decision], reach: Mapping[Told, float]
) -> tuple[list[Decision], list[Decision]]:
    """Splits classics into those that may win, and those that are too far behind.

    Args:
        decision: what was found.
        classics: what it competes with; who has no prediction may win, and so may
            the best of them.
        reach: how many times as long as the decision a classic may take, by how much
            the compiler is told of it.
    """
    own_ms = decision.predicted_ms or float("inf")
    known = [c.predicted_ms for c in classics if c.predicted_ms is not None]
    best_ms = min(known, default=0.0)

    def is_near(classic: Decision) -> bool:
        limit = max(reach[classic.extent] * own_ms, best_ms)
        return classic.predicted_ms is None or classic.predicted_ms <= limit

    near = [c for c in classics if is_near(c)]
    return near, [c for c in classics if not is_near(c)]


def leanest_of(analysis: Analysis, problem: Problem) -> Decision:
    """What needs the least memory by prediction: who is tried if nobody else fits."""
    best = leanest(problem)
    return Decision("leanest", whole_choice(analysis, problem, best), best.cost_ms)


def nearly_fitting(
    analysis: Analysis, problem: Problem, classics: Mapping[str, Choice]
) -> dict[str, Choice]:
    """The classics that might fit after all, though none does by prediction."""
    limit = _NEARLY * (problem.budget_bytes or 0)
    picks = {name: picks_of(analysis, problem, c) for name, c in classics.items()}
    return {
        name: classics[name]
        for name, found in picks.items()
        if found is not None and problem.memory_bytes(found) <= limit
    }


def known_to_fit(
    analysis: Analysis,
    store: ProfileStore,
    environment: Parts,
    taking_part: Sequence[Decision],
    budget_bytes: int,
    count: int,
) -> list[Decision]:
    """Choices that were compiled before and fit, the fastest; or else the leanest.

    With them a plan is no worse than it was with less memory, and what an error names
    as the smallest budget does.

    Args:
        analysis: of the program.
        store: what knows them.
        environment: what measurements depend on.
        taking_part: who races anyway.
        budget_bytes: memory of one device.
        count: how many at most.
    """
    [first] = finalists(analysis, taking_part[:1], environment)
    present = {(entry.choice, entry.extent) for entry in taking_part}
    known = remembered(analysis, store, first.job)
    new = [one for one in known if (one.choice, one.extent) not in present]
    # Who raced with the plan the last time does again: then the answer is known.
    last = store.get(first.job.key.digest)
    ended = last.created if last is not None and last.ok else ""
    new.sort(key=lambda one: one.record.created != ended)
    fitting = [one for one in new if one.record.peak_bytes <= budget_bytes][:count]
    smallest = sorted(new, key=lambda one: one.record.peak_bytes)[:1]
    return [
        Decision(
            f"planned before {number}",
            one.choice,
            predicted_ms(analysis, taking_part[0].problem, one.choice),
            extent=one.extent,
        )
        for number, one in enumerate(fitting or smallest, 1)
    ]


def predicted_ms(
    analysis: Analysis, problem: Problem | None, choice: Choice
) -> float | None:
    """What the profiles say about a choice, if all of it was measured."""
    picks = None if problem is None else picks_of(analysis, problem, choice)
    return None if problem is None or picks is None else problem.cost_ms(picks)


def with_options(
    leaders: Sequence[Decision], options: Mapping[str, Mapping[str, str]]
) -> list[Decision]:
    """The leaders and, of each, variants by name; nothing if there are no variants."""
    varied = [
        replace(entry, name=f"{entry.name}, {name}", options=chosen)
        for entry in leaders
        for name, chosen in options.items()
    ]
    return [*leaders, *varied] if varied else []


def finalists(
    analysis: Analysis, decisions: Sequence[Decision], environment: Parts
) -> list[Finalist]:
    """Decisions as whole programs that take part in a race."""
    return [
        Finalist(
            name=entry.name,
            job=whole_job(
                analysis.frame,
                analysis.segments,
                entry.choice,
                environment,
                entry.name,
                entry.extent,
                entry.options,
            ),
            predicted_ms=entry.predicted_ms,
        )
        for entry in decisions
    ]


def race_row(result: RaceResult) -> RaceRow:
    """How a finalist did, as a plan keeps it."""
    record = result.record
    note = "" if record.ok else f"{record.status}: {record.reason}"
    if record.ok and not result.fits:
        note = "over the memory budget"
    return RaceRow(
        name=result.name,
        predicted_ms=result.predicted_ms,
        samples_ms=record.samples_ms,
        time_ms=record.time_ms if record.ok else None,
        peak_bytes=result.peak_bytes,
        note=note,
    )


def left_out(classic: Decision) -> RaceRow:
    """A classic that was not raced, as a plan keeps it."""
    return RaceRow(
        name=classic.name,
        predicted_ms=classic.predicted_ms,
        samples_ms=(),
        time_ms=None,
        peak_bytes=0,
        note="predicted too far behind to be raced",
    )


def compose_plan(
    analysis: Analysis,
    mesh: Mesh,
    environment: Mapping[str, str],
    winner: Decision,
    decision: Decision,
    race: Sequence[RaceRow],
    won: RaceResult | None = None,
) -> Plan:
    """The plan of what won.

    Args:
        analysis: of the program.
        mesh: the devices.
        environment: what the measurements depend on.
        winner: what is to be run.
        decision: what the search found.
        race: who took part, and how they did.
        won: how the winner did, if it was raced.
    """
    frame = analysis.frame
    program = frame.program
    layout = lay_out(frame, winner.choice)
    timed = won is not None and won.record.ok
    return Plan(
        fingerprint=program.fingerprint,
        mesh_axes=frame.mesh,
        arg_names=program.arg_names,
        arg_types=tuple(type_text(aval(program, v)) for v in program.args),
        arg_specs=tuple(layout.arg_spec(i) for i in range(len(program.args))),
        output_specs=layout.output_specs(),
        constraints=told_of(frame, analysis.segments, winner.choice, winner.extent),
        donated=tuple(a is not None for a in program.alias),
        winner=winner.name,
        predicted_ms=winner.predicted_ms,
        measured_ms=won.time_ms if won is not None and timed else None,
        peak_bytes=won.peak_bytes if won is not None else None,
        options=dict(winner.options),
        rows=plan_rows(analysis, winner.choice, decision.problem),
        race=tuple(race),
        environment=environment,
        search=dict(winner.search),
        mesh=mesh,
    )


def device_memory(device: Any) -> int | None:
    """Memory of a device that programs may use, or None where it does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def no_winner(
    analysis: Analysis, results: Sequence[RaceResult], budget_bytes: int | None
) -> CfpError:
    """The error for a race that nobody finished."""
    # Of what could not be compiled nobody knows what it needs.
    compiled = [r for r in results if r.peak_bytes]
    failed = [r for r in compiled or results if r.fits]
    if failed:
        reasons = "; ".join(f"{r.name}: {r.record.reason}" for r in failed)
        return DeviceError(f"No plan ran on the devices. {reasons}")
    smallest = min(r.peak_bytes for r in compiled)
    programs = len({r.record.key for r in compiled})
    which = f"Of {programs} compiled plans the smallest"
    return MemoryBudgetError(
        f"{which if programs > 1 else 'The plan, compiled,'} needs "
        f"{format_bytes(smallest)} on each device; the budget is "
        f"{format_bytes(budget_bytes or 0)}. {what_to_do(analysis)}",
        smallest_feasible_bytes=smallest,
        contributors=[(r.name, r.peak_bytes) for r in compiled],
    )
