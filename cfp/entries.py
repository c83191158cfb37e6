"""Who takes part in a race, besides the plan and the classics that were measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, lay_out
from cfp.planner_parts import Decision, finalists
from cfp.presets import CLASSICS
from cfp.profiling.key import Parts
from cfp.profiling.record import CompiledBytes, ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp.search.answers import Answer
from cfp.search.assemble import whole_choice
from cfp.search.compiler import Options
from cfp.search.dynamic import solve_dynamically
from cfp.search.explain import picks_of
from cfp.search.finalist import RaceResult
from cfp.search.ilp import leanest
from cfp.search.measure import Told, value_bytes
from cfp.search.problem import Problem
from cfp.search.remembered import Remembered, remembered
from cfp.search.spread import is_tie
from cfp.search.squeeze import MEMORY_SHARE, TURNED_OUT, Room

# Of the budget: without recomputation predictions were off by 3.2% at most on 2 H200.
_NEARLY = 1.1
# How many of those that are too large are compiled again, told of the budget.
_TOLD = 2
# It takes them as many times as long: 1.05 to 1.12 on 2 H200.
_TOLL, _TOLL_AT_LEAST = 1.1, 1.05


# What took part in a race, and how it did.
Entrant = tuple[Decision, RaceResult]


def tied_with(won: RaceResult, contest: Sequence[Entrant]) -> list[Entrant]:
    """What ran as fast as the fastest within the spread of samples, and that itself.

    Nothing where there are too few samples to tell. What was timed for a larger budget,
    and is too large for this one, ties with nothing.
    """
    return [
        (entry, result)
        for entry, result in contest
        if result.ran and is_tie(result.samples_ms, won.samples_ms)
    ]


def complexity(entrant: Entrant) -> tuple[bool, int, float]:
    """What decides a tie: presets before plans, fewer compiler options, the time."""
    entry, result = entrant
    is_preset = entry.name.partition(", ")[0] in CLASSICS
    return not is_preset, len(entry.options), result.time_ms


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
    # What is faster than the decision has to be told of the budget to fit.
    told = [_TOLL * r.predicted_ms for r in decision.rivals if r.predicted_ms]
    own_ms = min([decision.predicted_ms or float("inf"), *told])
    known = [c.predicted_ms for c in classics if c.predicted_ms is not None]
    best_ms = min(known, default=0.0)

    def is_near(classic: Decision) -> bool:
        limit = max(reach[classic.extent] * own_ms, best_ms)
        return classic.predicted_ms is None or classic.predicted_ms <= limit

    near = [c for c in classics if is_near(c)]
    return near, [c for c in classics if not is_near(c)]


def with_options(
    leaders: Sequence[Decision], options: Mapping[str, Mapping[str, str]]
) -> list[Decision]:
    """Of each leader a variant for each name: its own options, and those."""
    return [
        replace(
            entry,
            name=f"{entry.name}, {name}",
            options={**entry.options, **chosen},
        )
        for entry in leaders
        for name, chosen in options.items()
    ]


def computed_again(
    analysis: Analysis, problems: Sequence[Problem], classics: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Classics that fit with some of their segments computed again.

    Args:
        analysis: of the program.
        problems: what fits, at first by the strictest reckoning.
        classics: strategies and storage, by name.
    """
    [problem, *_] = problems
    found = {}
    for name, choice in classics.items():
        picks = picks_of(analysis, problem, choice)
        if picks is None:
            continue
        taken = dict(zip(problem.kinds, picks, strict=True))
        kept = [
            [
                place
                for place, option in enumerate(options)
                if option.candidate.key[:2] == options[taken[kind]].candidate.key[:2]
            ]
            for kind, options in enumerate(problem.options)
        ]
        alike = problem.keep(kept)
        solved = (solve_dynamically(one.keep(kept)) for one in problems)
        best = next((one for one in solved if one is not None), None)
        if best is not None:
            again = whole_choice(analysis, alike, best)
            if again.remat:
                found[f"{name}, recomputed"] = again
    return found


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


def leanest_of(analysis: Analysis, problem: Problem) -> Decision:
    """What needs the least memory by prediction: who is tried if nobody else fits."""
    best = leanest(problem)
    return Decision("leanest", whole_choice(analysis, problem, best), best.cost_ms)


def known_to_fit(
    analysis: Analysis,
    store: ProfileStore,
    environment: Parts,
    taking_part: Sequence[Decision],
    count: int,
    options: Collection[Options],
    room: Room,
    answer: Answer | None,
) -> list[Decision]:
    """Choices that were compiled before and fit, the fastest; or else the leanest.

    With them a plan is no worse than it was with less memory, and what an error names
    as the smallest budget does.

    Args:
        analysis: of the program.
        store: what knows them.
        environment: what measurements depend on.
        taking_part: who races anyway.
        count: how many at most.
        options: of the compiler that leaders are raced with anyway.
        room: what they have to fit into.
        answer: how the race ended the last time. Who took part then does so again, and
            then the answer is known; unless somebody else has been faster since.
    """
    [first] = finalists(analysis, taking_part[:1], environment)
    known = remembered(analysis, store, first.job)
    made = [_remembered_decision(analysis, taking_part[0].problem, k) for k in known]
    present = {entry.key for entry in taking_part}
    alike = {(e.choice, e.extent) for e in taking_part if not e.options}
    # Who is too large as it is leads nobody, to be raced with other options then.
    large = {
        (one.choice, one.extent)
        for one in known
        if not one.options and one.record.peak_bytes > room.budget_bytes
    }

    def is_raced_anyway(one: Remembered) -> bool:
        leads = (one.choice, one.extent) in alike - large
        return leads and one.options in options

    new = {
        decision.key: (one.record, decision)
        # Of those that are the same the fastest stays.
        for one, decision in reversed([*zip(known, made, strict=True)])
        if decision.key not in present and not is_raced_anyway(one)
    }
    ranked = sorted(new.values(), key=lambda pair: pair[0].time_ms)
    fitting = [pair for pair in ranked if pair[0].peak_bytes <= room.budget_bytes]
    if answer is not None and not answer.is_old(record for record, _ in fitting):
        there = {pair[0].choice: pair for pair in ranked}
        chosen = [there[choice] for choice in answer.known if choice in there]
    elif fitting:
        limit_ms = _TOLL * fitting[0][0].time_ms
        chosen = [pair for pair in fitting[:count] if pair[0].time_ms <= limit_ms]
    else:
        chosen = sorted(new.values(), key=lambda pair: pair[0].peak_bytes)[:1]
    return [
        replace(decision, name=f"planned before {number}")
        for number, (_, decision) in enumerate(chosen, 1)
    ]


def by_size(
    analysis: Analysis, problem: Problem, entries: Sequence[Decision], room: Room
) -> tuple[list[Decision], list[Decision], list[Decision]]:
    """Splits entries by the memory that they will probably need, the fastest first.

    Who is too large whatever happens would be compiled only to be refused, and who is
    unless the compiler is told of the budget would be compiled twice.

    Args:
        analysis: of the program.
        problem: what was measured.
        entries: who wants to take part.
        room: what they have to fit into.

    Returns:
        Those that may fit; variants, told of the budget, of the fastest of those that
        otherwise do not; and all others.
    """
    near, large = [], []
    most = room.budget_bytes / TURNED_OUT
    hopeful: dict[Choice, tuple[Decision, CompiledBytes]] = {}
    for entry in sorted(entries, key=_predicted_ms):
        size = _predicted_size(analysis, problem, entry.choice)
        if size is None or entry.options:
            near.append(entry)
        elif not room.may_do(size):
            large.append(entry)
        elif size.peak_bytes <= most or not room.options(size):
            near.append(entry)
        elif len(hopeful) < _TOLD and entry.choice not in hopeful:
            hopeful[entry.choice] = (entry, size)
        else:
            large.append(entry)
    told = [one for pair in hopeful.values() for one in _variants(*pair, room)]
    return near, told, large


def told_of_budget(
    entries: Sequence[Decision], results: Sequence[RaceResult], room: Room
) -> list[Decision]:
    """Who is too large, but told of the budget may fit and win: variants of them.

    Args:
        entries: who took part.
        results: how they did. Where nobody fits the leanest is worth a try, too.
        room: what they have to fit into.
    """
    best_ms = min(result.time_ms for result in results)
    large: dict[tuple[Any, ...], tuple[Decision, ProfileRecord]] = {}
    for entry, result in zip(entries, results, strict=True):
        is_told = MEMORY_SHARE in entry.options
        if result.peak_bytes and not result.fits and not is_told:
            # The plan may be the leanest, or a classic.
            large.setdefault(entry.key, (entry, result.record))
    hopeful = [
        key
        for key, (entry, record) in large.items()
        if room.may_do(record)
        and _TOLL_AT_LEAST * (entry.predicted_ms or 0.0) < best_ms
    ]
    hopeful.sort(key=lambda key: _predicted_ms(large[key][0]))
    chosen = hopeful[:_TOLD]
    if large and best_ms == float("inf"):
        leanest = min(large, key=lambda key: large[key][1].peak_bytes)
        chosen = list(dict.fromkeys([*chosen, leanest]))
    return [one for key in chosen for one in _variants(*large[key], room)]


def let_down(
    decision: Decision,
    ahead: Sequence[Decision],
    told: Sequence[Decision],
    ran: Sequence[Decision],
) -> Decision | None:
    """The decision without those that left others out of reach, if none of them ran.

    Args:
        decision: with rivals that are faster, but fit only if the compiler makes them.
        ahead: variants that were told of the budget from the first, fast or slow.
        told: variants of those that were faster, but too large.
        ran: who fitted, and ran.

    Returns:
        The decision with its other rivals; None if there are no such, or one ran.
    """
    own_ms = decision.predicted_ms or 0.0

    def is_faster(entry: Decision) -> bool:
        return (entry.predicted_ms or own_ms) < own_ms

    slower = tuple(rival for rival in decision.rivals if not is_faster(rival))
    hoped = [*told, *filter(is_faster, (*ahead, *decision.rivals))]
    if len(slower) == len(decision.rivals):
        return None
    if not {entry.key for entry in hoped}.isdisjoint(entry.key for entry in ran):
        return None
    return replace(decision, rivals=slower)


def one_by_one(
    entries: Sequence[Decision],
    lean: Decision | None,
    record_of: Callable[[Decision], ProfileRecord | None],
    room: Room,
) -> Iterator[Decision]:
    """Whom to compile in turn until somebody fits: entries, and variants of them.

    Args:
        entries: the best first.
        lean: who comes last.
        record_of: what is known of an entry that was compiled.
        room: what they have to fit into.
    """
    for entry in (*entries, *([lean] if lean else [])):
        yield entry
        # It is too large, since the next is asked for.
        record = record_of(entry)
        if record is not None and (entry is lean or room.may_do(record)):
            yield from _variants(entry, record, room)


def predicted_ms(
    analysis: Analysis, problem: Problem | None, choice: Choice
) -> float | None:
    """What the profiles say about a choice, if all of it was measured."""
    picks = None if problem is None else picks_of(analysis, problem, choice)
    return None if problem is None or picks is None else problem.cost_ms(picks)


def predicted_bytes(analysis: Analysis, problem: Problem, choice: Choice) -> int | None:
    """The memory that a choice needs by the profiles, if all of it was measured."""
    picks = picks_of(analysis, problem, choice)
    return None if picks is None else problem.memory_bytes(picks)


def _predicted_ms(entry: Decision) -> float:
    return entry.predicted_ms or float("inf")


def _predicted_size(
    analysis: Analysis, problem: Problem, choice: Choice
) -> CompiledBytes | None:
    """What a program will need, if all of it was measured: what is there from the
    first to the last is known exactly, results that take no argument's place included.
    """
    picks = picks_of(analysis, problem, choice)
    if picks is None:
        return None
    frame = analysis.frame
    layout, program = lay_out(frame, choice), frame.program
    results = sum(
        value_bytes(layout, value)
        for place, value in enumerate(program.outputs)
        if place not in program.alias
    )
    options = [problem.options[k][p] for k, p in zip(problem.kinds, picks, strict=True)]
    state = problem.fixed_bytes + sum(option.state_bytes for option in options)
    rest = problem.memory_bytes(picks) - state
    return CompiledBytes(argument_bytes=state, output_bytes=results, temp_bytes=rest)


def _remembered_decision(
    analysis: Analysis, problem: Problem | None, one: Remembered
) -> Decision:
    return Decision(
        "planned before",
        one.choice,
        predicted_ms(analysis, problem, one.choice),
        extent=one.extent,
        options=one.options,
    )


def _variants(entry: Decision, size: CompiledBytes, room: Room) -> list[Decision]:
    return with_options([entry], room.options(size))
