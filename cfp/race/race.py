"""The last pass: the plan and its rivals, compiled and timed; the fastest is the plan.

What races was sieved before. Presets: which are measured, or estimated
(:mod:`cfp.passes.profile`); choices of the whole program: the best by each way to
predict, and presets (:mod:`cfp.passes.search`). Then here, in this order:

candidates  those, by name and constraint level :mod:`cfp.race.candidates`
remembered  what was compiled before and fits   :mod:`cfp.race.remembered`
enough      compiled until enough fit           :mod:`cfp.race.enough`
turns       those, timed in turn                :mod:`cfp.race.turns`
again       the leaders, with other compiler options
ties        the simplest of the fastest wins

Of a deep program truncated ones race, and the winner whole (:mod:`cfp.race.truncated`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.context import DecidedBy, PlanContext
from cfp.devices.described import DescribedMesh
from cfp.profiling.key import Parts
from cfp.race.candidates import candidates_of
from cfp.race.enough import Admitted
from cfp.race.programs import (
    TOO_FAR,
    TOO_LARGE,
    UNTRIED,
    RaceOutcome,
    RaceRow,
    TimedCandidate,
    as_predicted,
    left_out,
    not_run,
    programs_of,
    race_row,
)
from cfp.race.remembered import keep_answer
from cfp.race.run import Run, time_ms
from cfp.race.truncated import truncate
from cfp.race.turns import complexity, tied_with
from cfp.settings import (
    SURELY_TOO_LARGE,
    WHOLE_TRIES,
    ConstraintLevel,
)
from cfp.solution import Candidate, Solution, predicted_bytes

# Kept apart from the first race: what leads must not change with this one.
_ALONE: Parts = (("race", "the winner of shortened ones"),)


def race(context: PlanContext, analysis: Analysis, solution: Solution) -> RaceOutcome:
    """The fastest of the best by prediction, its rivals and the presets.

    Without a race that is the best by prediction; or, where a memory budget was asked
    for, or one device plays those that are described, the best by prediction that fits
    when compiled.

    Raises:
        MemoryBudgetError: none of them fits in memory.
        DeviceError: none of them runs.
    """
    run = Run(context, analysis, solution)
    candidates = candidates_of(context, analysis, solution)
    described = context.mesh if isinstance(context.mesh, DescribedMesh) else None
    decided_by = context.decided_by(solution.interrupted)
    if decided_by is DecidedBy.RACE:
        raced = _truncated_race(run, candidates) or _whole_race(run, candidates)
        return as_predicted(raced, described.rung) if described else raced
    found = RaceOutcome(winner=solution.best, counts=solution.counts)
    if decided_by is DecidedBy.COMPILER:
        found = _first_that_fits(run, candidates)
        if described:
            found = replace(found, counts={**found.counts, "memory_compiled": 1})
    return replace(found, rows=tuple(not_run(candidates))) if described else found


# ---------------------------------------------------------------------- whole programs


def _whole_race(run: Run, candidates: list[Candidate]) -> RaceOutcome:
    """Whole programs, compiled until enough fit, and timed."""
    run.built.clear()
    known, asked = run.remember(candidates)
    keys = {one.key for one in known}
    new = [one for one in candidates if one.key not in keys]
    admitted = run.admit([*new, *known], keys)
    refused, far = admitted.refused, admitted.far
    fitting = [one for one, _ in admitted.fitting]
    raced = run.time(fitting, run.rounds) if fitting else []
    if not any(result.ran for _, result in raced):
        # What is far behind is better than nothing.
        behind = run.admit(far) if run.context.memory is None and far else Admitted()
        last = run.last_resort(Admitted(refused=[*refused, *behind.refused]))
        refused, far = last.refused, behind.far
        more = [one for one, _ in (*behind.fitting, *last.fitting)]
        if more:
            raced = run.time([*fitting, *more], run.rounds)
    again, others = run.leaders_again(raced, None)
    # What was not among the leaders has lost already, at another time.
    able = [one for one in again if one[1].ran] or others
    results = [result for _, result in (*again, *others)]
    results += [made for _, made in refused]
    best = min(able, key=time_ms, default=None)
    if asked is not None:
        ended = best[1].samples_ms if best is not None and best[1].ran else ()
        jobs = [one.job for one in programs_of(run.analysis, known, ())]
        keep_answer(asked, run.context.store, [job.choice for job in jobs], ended)
    if best is None or not best[1].ran:
        raise run.nothing_fits(results)
    ties = tied_with(best[1], able)
    best = min(ties, key=complexity, default=best)
    rows = [race_row(result) for result in results]
    rows += [*left_out(far, TOO_FAR), *left_out(admitted.too_large, TOO_LARGE)]
    return run.outcome(best, rows, ties, run.built.get(best[0].name))


def _first_that_fits(run: Run, candidates: list[Candidate]) -> RaceOutcome:
    """The best by prediction whose whole program, compiled, fits in memory."""
    known, _ = run.remember(candidates)
    keys = {one.key for one in known}
    new = [one for one in candidates if one.key not in keys]
    admitted = run.admit([*new, *known], keys, one_is_enough=True)
    if not admitted.fitting:
        admitted = run.last_resort(admitted)
    if not admitted.fitting:
        raise run.nothing_fits([made for _, made in admitted.refused])
    winner, made = admitted.fitting[0]
    return RaceOutcome(
        winner=winner, peak_bytes=made.peak_bytes, counts=run.solution.counts
    )


# ------------------------------------------------------------------ truncated programs


def _truncated_race(run: Run, candidates: list[Candidate]) -> RaceOutcome | None:
    """Truncated programs, and after them whole the first that runs of the fastest.

    None under a budget: only whole programs say what they need. Whether one fits into
    a device is found out where it wins. None, too, where the program cannot be
    truncated, or what is fastest does not run whole: then whole programs race.
    """
    context, problem = run.context, run.solution.problem
    kept = context.settings.repeats
    if context.memory is not None or problem is None or kept is None:
        return None
    most_bytes = SURELY_TOO_LARGE * (context.device_bytes or float("inf"))
    needs = {
        one.key: predicted_bytes(run.analysis, problem, one.choice)
        for one in (candidates if context.device_bytes else ())
    }
    if None in needs.values():
        return None
    large = [one for one in candidates if (needs.get(one.key) or 0) > most_bytes]
    left = [one for one in candidates if one not in large]
    near = run.near_among(left)
    short = truncate(run.analysis, problem, [one.choice for one in near], kept)
    if short is None:
        return None
    run.built.clear()
    again, others = run.leaders_again(
        run.time(near, run.rounds, truncated=short), short
    )
    best = _best_that_ran(again, others)
    if best is None:
        return None
    if context.stand_in is not None and time.monotonic() > context.end:
        return _late_answer(run, again, others, left)
    ranked = sorted((*again, *others), key=time_ms)
    timed = time.perf_counter()
    won, refused = _first_whole(run, [best, *ranked], most_bytes)
    # What kept others out of reach may not run: then these may be the fastest.
    rest = [one for one in left if (one.choice, one.level) not in refused]
    missed = refused and rest and any(c not in near for c in run.near_among(rest))
    if won is None or missed:
        return None
    rows = [_row(one, refused) for one in (*again, *others)]
    far = [one for one in left if one not in near]
    rows += [*left_out(far, TOO_FAR), *left_out(large, TOO_LARGE)]
    counts = {
        "segments": len(run.analysis.segments),
        "segments_raced": len(short.programs[won[0].choice].segments),
        "winner_seconds": time.perf_counter() - timed,
    }
    return run.outcome(won, rows, built=run.built.get(won[0].name), counts=counts)


def _best_that_ran(
    again: Sequence[TimedCandidate], others: Sequence[TimedCandidate]
) -> TimedCandidate | None:
    """The simplest of the fastest, of the leaders if any of them ran."""
    able = [one for one in again if one[1].ran] or [one for one in others if one[1].ran]
    if not able:
        return None
    fastest = min(able, key=time_ms)
    return min(tied_with(fastest[1], able), key=complexity, default=fastest)


def _late_answer(
    run: Run,
    again: Sequence[TimedCandidate],
    others: Sequence[TimedCandidate],
    candidates: Sequence[Candidate],
) -> RaceOutcome:
    """The best of truncated programs whose whole one fits, by its scaled memory.

    There is no time to compile that one, and its time is a prediction anyway. Where
    none fits, smaller ones are compiled until one does.

    Raises:
        MemoryBudgetError: these do not fit either.
    """
    problem, kept = run.solution.problem, run.context.settings.repeats
    assert problem is not None and kept is not None, "programs were truncated"
    again, others = map(run.sieve, (again, others))
    best = _best_that_ran(again, others)
    results = {one.name: result for one, result in (*again, *others)}
    ways = [] if best else run.smaller([*again, *others], candidates)
    shorts = [truncate(run.analysis, problem, [one.choice], kept) for one in ways]
    for one, short in sorted(
        zip(ways, shorts, strict=True), key=lambda pair: pair[1] is None
    ):
        [made] = run.sieve(run.time([one], run.rounds, truncated=short))
        results[one.name] = made[1]
        best = made if made[1].ran else None
        if best or short is None:  # Whole, one takes as long as all of the others.
            break
    if best is None:
        raise run.nothing_fits([*results.values()])
    return run.outcome(best, [race_row(result) for result in results.values()])


# What did not run whole, by choice and level: with other options it is as large.
_Refused = Mapping[tuple[Choice, ConstraintLevel], TimedCandidate]


def _first_whole(
    run: Run, ranked: Sequence[TimedCandidate], most_bytes: float
) -> tuple[TimedCandidate | None, _Refused]:
    """The first of those that ran truncated whose whole program fits and runs."""
    refused: dict[tuple[Choice, ConstraintLevel], TimedCandidate] = {}
    tries = 0
    for one, short in ranked:
        if not short.ran or (one.choice, one.level) in refused:
            continue
        if short.peak_bytes > most_bytes:
            refused[one.choice, one.level] = one, replace(short, fits=False)
            continue
        if tries == WHOLE_TRIES:
            break
        tries += 1
        run.built.clear()
        [(_, whole)] = run.time([one], run.context.rules.rounds, _ALONE)
        if whole.ran:
            return (one, whole), refused
        refused[one.choice, one.level] = one, whole
    return None, refused


def _row(timed: TimedCandidate, refused: _Refused) -> RaceRow:
    """How a candidate did, as a plan keeps it: truncated, unless refused whole."""
    one, short = timed
    other, whole = refused.get((one.choice, one.level), (one, short))
    if other.key != one.key:
        return left_out([one], UNTRIED)[0]
    return race_row(replace(whole, name=one.name))
