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
from cfp.race.enough import near_among
from cfp.race.programs import (
    TOO_FAR,
    TOO_LARGE,
    UNTRIED,
    RaceOutcome,
    RaceResult,
    RaceRow,
    as_predicted,
    left_out,
    not_run,
    programs_of,
    race_row,
    time_ms,
)
from cfp.race.remembered import keep_answer
from cfp.race.run import Run
from cfp.race.truncated import truncate
from cfp.race.turns import Ranking
from cfp.settings import SURELY_TOO_LARGE, WHOLE_TRIES, ConstraintLevel
from cfp.solution import Candidate, Solution, prediction_of

# Kept apart from the first race: what leads must not change with this one.
_ALONE: Parts = (("race", "the winner of truncated ones"),)


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
    candidates = solution.candidates
    described = context.mesh if isinstance(context.mesh, DescribedMesh) else None
    decided_by = context.decided_by(solution.interrupted)
    if decided_by is DecidedBy.RACE:
        raced = _truncated_race(run, candidates) or _whole_race(run, candidates)
        return as_predicted(raced, described.rung) if described else raced
    rows: list[RaceRow] = []
    if described:
        problem = solution.problem
        said = [prediction_of(analysis, problem, c.choice) for c in candidates]
        needs = [one.peak_bytes for one in said]
        rows = not_run(candidates, needs, context.budget_bytes)
    counts = solution.counts
    if decided_by is not DecidedBy.COMPILER:
        return RaceOutcome(winner=candidates[0], rows=tuple(rows), counts=counts)
    if described:
        counts = {**counts, "memory_compiled": 1}
    fits = _first_that_fits(run, candidates)
    return RaceOutcome(
        winner=fits.candidate,
        peak_bytes=fits.peak_bytes,
        rows=tuple(rows),
        counts=counts,
    )


# ---------------------------------------------------------------------- whole programs


def _whole_race(run: Run, candidates: Sequence[Candidate]) -> RaceOutcome:
    """Whole programs, compiled until enough fit, and timed."""
    run.built.clear()
    known, asked = run.remember(candidates)
    fitting, refused, left = [], [], []
    ranking = Ranking((), ())
    for made in run.attempts(candidates, known):
        refused += made.refused
        left = made.left
        if made.fitting:
            fitting += [one.candidate for one in made.fitting]
            ranking = run.rank(fitting)
        if ranking.best is not None:
            break
    best, results = ranking.best, [*ranking.results, *refused]
    if asked is not None:
        jobs = [one.job for one in programs_of(run.analysis, known, ())]
        samples_ms = best.samples_ms if best else ()
        keep_answer(asked, run.context.store, [job.choice for job in jobs], samples_ms)
    if best is None:
        raise run.nothing_fits(results)
    rows = [*map(race_row, results), *(left_out(one, why) for one, why in left)]
    tied = {one.samples_ms: one.time_ms for one in ranking.ties}
    counts = {}
    if len(tied) > 1:
        spread = max(tied.values()) / min(tied.values()) - 1.0
        counts = {"ties": len(tied) - 1, "tie_spread": spread}
    made = run.built.get(best.program.identity)
    return run.outcome(best, rows, made, counts, results=results)


def _first_that_fits(run: Run, candidates: Sequence[Candidate]) -> RaceResult:
    """The best by prediction whose whole program, compiled, fits in memory."""
    known, _ = run.remember(candidates)
    refused: list[RaceResult] = []
    for made in run.attempts(candidates, known, one_is_enough=True):
        if made.fitting:
            return made.fitting[0]
        refused += made.refused
    raise run.nothing_fits(refused)


# ------------------------------------------------------------------ truncated programs


def _truncated_race(run: Run, candidates: Sequence[Candidate]) -> RaceOutcome | None:
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
        one.key: prediction_of(run.analysis, problem, one.choice).peak_bytes
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
    ranking = run.rank(near, short)
    if ranking.best is None:
        return None
    if context.stand_in is not None and time.monotonic() > context.end:
        return _late_answer(run, ranking.sieved(context.budget_bytes), left)
    timed = time.perf_counter()
    ranked = [ranking.best, *sorted(ranking.results, key=time_ms)]
    won, refused = _first_whole(run, ranked, most_bytes)
    # Where the fastest by prediction do not run whole, others come within reach.
    rest = [one for one in left if (one.choice, one.level) not in refused]
    now_near = near_among(rest, (), context.rules.reach) if refused else []
    if won is None or any(one not in near for one in now_near):
        return None
    rows = [_row(one, refused) for one in ranking.results]
    far = [one for one in left if one not in near]
    raced, _ = short[won.candidate.choice]
    rows += [left_out(one, TOO_FAR) for one in far]
    rows += [left_out(one, TOO_LARGE) for one in large]
    counts = {
        "segments": len(run.analysis.segments),
        "segments_raced": len(raced.segments),
        "winner_seconds": time.perf_counter() - timed,
    }
    made = run.built.get(won.program.identity)
    return run.outcome(won, rows, made, counts, results=ranking.results)


def _late_answer(
    run: Run, ranking: Ranking, candidates: Sequence[Candidate]
) -> RaceOutcome:
    """The best of truncated programs whose whole one fits, by its scaled memory.

    There is no time to compile that one, and its time is a prediction anyway. Where
    none fits, smaller ones are compiled until one does.

    Raises:
        MemoryBudgetError: these do not fit either.
    """
    problem, kept = run.solution.problem, run.context.settings.repeats
    assert problem is not None and kept is not None, "programs were truncated"
    results, best = {one.name: one for one in ranking.results}, ranking.best
    ways = [] if best else run.smaller(ranking.results, candidates)
    shorts = [truncate(run.analysis, problem, [one.choice], kept) for one in ways]
    pairs = zip(ways, shorts, strict=True)
    for one, short in sorted(pairs, key=lambda pair: pair[1] is None):
        tried = Ranking((), run.time([one], 1, truncated=short))
        tried = tried.sieved(run.context.budget_bytes)
        results[one.name], best = tried.others[0], tried.best
        if best or short is None:  # Whole, one takes as long as all of the others.
            break
    if best is None:
        raise run.nothing_fits([*results.values()])
    every = [*results.values()]
    return run.outcome(best, [*map(race_row, every)], results=every)


# What did not run whole, by choice and level: with other options it is as large.
_Refused = Mapping[tuple[Choice, ConstraintLevel], RaceResult]


def _first_whole(
    run: Run, ranked: Sequence[RaceResult], most_bytes: float
) -> tuple[RaceResult | None, _Refused]:
    """The first of those that ran truncated whose whole program fits and runs."""
    refused: dict[tuple[Choice, ConstraintLevel], RaceResult] = {}
    tries = 0
    for short in ranked:
        one = short.candidate
        if not short.ran or (one.choice, one.level) in refused:
            continue
        if short.peak_bytes > most_bytes:
            refused[one.choice, one.level] = replace(short, fits=False)
            continue
        if tries == WHOLE_TRIES:
            break
        tries += 1
        run.built.clear()
        [whole] = run.time([one], run.context.rules.rounds, _ALONE)
        if whole.ran:
            return whole, refused
        refused[one.choice, one.level] = whole
    return None, refused


def _row(short: RaceResult, refused: _Refused) -> RaceRow:
    """Returns a candidate's table row: truncated, unless refused whole."""
    one = short.candidate
    whole = refused.get((one.choice, one.level), short)
    if whole.candidate.key != one.key:
        return left_out(one, UNTRIED)
    return replace(race_row(whole), name=one.name)
