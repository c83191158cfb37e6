"""The last pass: the plan and its rivals, compiled and timed; the fastest is the plan.

candidates  what may race                       :mod:`cfp.race.candidates`
enough      compiled until enough fit           :mod:`cfp.race.enough`
turns       those, timed in turn                :mod:`cfp.race.turns`
ties        the simplest of the fastest wins    :mod:`cfp.race.ties`

Of a deep program truncated ones race, and the winner whole.
"""

from __future__ import annotations

import time

from cfp.analysis.analyze import Analysis
from cfp.context import PlanContext
from cfp.profiling.builder import Built
from cfp.profiling.key import Parts
from cfp.race.cache import keep_answer
from cfp.race.candidates import (
    candidates_of,
)
from cfp.race.enough import (
    Admitted,
)
from cfp.race.outcome import (
    TOO_FAR,
    TOO_LARGE,
    RaceOutcome,
    RaceRow,
    left_out,
    not_run,
    race_row,
)
from cfp.race.programs import RaceResult, programs_of
from cfp.race.run import Run, time_ms
from cfp.race.ties import complexity, tied_with
from cfp.race.truncated import truncate
from cfp.race.whole import first_whole
from cfp.settings import (
    SURELY_TOO_LARGE,
)
from cfp.solution import Candidate, Solution, predicted_bytes

_ALONE: Parts = (("race", "the winner of shortened ones"),)


def race(context: PlanContext, analysis: Analysis, solution: Solution) -> RaceOutcome:
    """The fastest of the best by prediction, its rivals and the presets.

    Without a race that is the best by prediction; or, where a memory budget was asked
    for, the best by prediction that fits when compiled.

    Raises:
        MemoryBudgetError: none of them fits in memory.
        DeviceError: none of them runs.
    """
    run = Run(context, analysis, solution)
    candidates = candidates_of(context, analysis, solution)
    if context.described is not None:
        rows = tuple(not_run(candidates))
        return RaceOutcome(winner=solution.best, rows=rows, counts=solution.counts)
    if context.races and not solution.interrupted:
        return _truncated_race(run, candidates) or _whole_race(run, candidates)
    if context.memory is not None:
        return _first_that_fits(run, candidates)
    return RaceOutcome(winner=solution.best, counts=solution.counts)


# --------------------------------------------------------------------------- inside


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
    results += [made.refused for _, made in refused if made.refused]
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
    rows += [left_out(c.name, c.predicted_ms, TOO_FAR) for c in far]
    rows += [left_out(c.name, c.predicted_ms, TOO_LARGE) for c in admitted.too_large]
    return run.outcome(best, rows, ties, run.built.get(best[0].name))


def _truncated_race(run: Run, candidates: list[Candidate]) -> RaceOutcome | None:
    """Truncated programs, and the winner's whole program after them.

    None under a budget: only whole programs say what they need. Whether one fits into
    a device is found out where it wins. None, too, where the program cannot be
    truncated, or none of the winners runs whole.
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
    gone: list[RaceRow] = []

    def alone(candidate: Candidate) -> RaceResult:
        whole.clear()
        [(_, won)] = run.time([candidate], context.defaults.rounds, _ALONE, built=whole)
        return won

    whole: dict[str, Built] = {}
    while True:
        near = run.near_among(left)
        short = truncate(run.analysis, problem, [one.choice for one in near], kept)
        if short is None:
            return None
        run.built.clear()
        raced = run.time(near, run.rounds, truncated=short)
        if not any(result.ran for _, result in raced):
            return None
        again, others = run.leaders_again(raced, short)
        able = [one for one in again if one[1].ran] or others
        field = [*again, *others]
        best = min(able, key=time_ms)
        if not best[1].ran:
            return None
        best = min(tied_with(best[1], able), key=complexity, default=best)
        timed = time.perf_counter()
        ranked = [best, *sorted(field, key=time_ms)]
        found, refused = first_whole(ranked, most_bytes, alone)
        left = [one for one in left if one not in refused]
        missed = (
            [one for one in run.near_among(left) if one not in near] if left else []
        )
        if missed and refused.found:
            # What kept others out of reach does not run: these may be the fastest.
            gone += [race_row(result) for _, result in refused.found.values()]
            continue
        if found is None:
            return None
        rows = [refused.row(*one) for one in field] + gone
        far = [one for one in left if one not in near]
        rows += [left_out(c.name, c.predicted_ms, TOO_FAR) for c in far]
        rows += [left_out(c.name, c.predicted_ms, TOO_LARGE) for c in large]
        counts = {
            "segments": len(run.analysis.segments),
            "segments_raced": len(short.programs[found[0].choice].segments),
            "winner_seconds": time.perf_counter() - timed,
        }
        return run.outcome(found, rows, built=whole.get(found[0].name), counts=counts)


def _first_that_fits(run: Run, candidates: list[Candidate]) -> RaceOutcome:
    """The best by prediction whose whole program, compiled, fits in a budget."""
    known, _ = run.remember(candidates)
    keys = {one.key for one in known}
    new = [one for one in candidates if one.key not in keys]
    admitted = run.admit([*new, *known], keys, one_is_enough=True)
    if not admitted.fitting:
        admitted = run.last_resort(admitted)
    if not admitted.fitting:
        results = [made.refused for _, made in admitted.refused if made.refused]
        raise run.nothing_fits(results)
    winner, made = admitted.fitting[0]
    return RaceOutcome(
        winner=winner, peak_bytes=made.peak_bytes, counts=run.solution.counts
    )
