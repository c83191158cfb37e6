"""Admits candidates to the race: compiles them until enough fit.

:func:`compile_until_enough_fit` takes candidates, sorted by predicted time, and a
memory budget:

- A candidate that cannot fit, whatever the compiler does, is skipped.
- One whose predicted memory times `COMPILED_TO_PREDICTED` is more than the budget is
  compiled with the compiler's memory limit only.
- Any other is compiled as it is, and if it does not fit, with the limit, the loosest
  first. Rematerialized programs are candidates of their own.

It ends when the best preset and every candidate within `reach` of the fastest that fits
are compiled; or after `MOST_REFUSED` that do not fit. The plan, and programs that are
known to fit, are compiled in any case, unless time is over: then nothing else is
compiled after the first. Candidates are made in :mod:`cfp.race.candidates`; without a
budget all are compiled as they are.

*Memory limit* here is an option of XLA, not the budget: XLA schedules to hide latency,
and keeps what that needs, as far as the device's memory allows. With a limit it
rematerializes what exceeds it, less of it and cheaper than a whole segment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cfp.analysis.layout import Choice
from cfp.context import MemoryBudget
from cfp.profiling.record import CompiledBytes
from cfp.race.candidates import with_options
from cfp.race.programs import (
    LIMITED_ONCE,
    MANY_REFUSED,
    TOO_FAR,
    TOO_LARGE,
    TOO_LATE,
    RaceResult,
)
from cfp.settings import (
    COMPILED_TO_PREDICTED,
    LIMITED_MEMORY_AT_LEAST,
    LIMITED_TIME,
    MOST_REFUSED,
    NO_LATENCY_HIDING,
    ConstraintLevel,
)
from cfp.solution import Candidate

# The percentage of what arguments leave of a device's memory that others may take.
MEMORY_SHARE = "xla_gpu_memory_limit_slop_factor"


def may_fit(memory: MemoryBudget, size: CompiledBytes) -> bool:
    """True if a program may fit, if the compiler saves what it can.

    Args:
        memory: what it has to fit into.
        size: what it needs otherwise; a failure to compile needs nothing.
    """
    least = size.peak_bytes - (1.0 - LIMITED_MEMORY_AT_LEAST) * size.temp_bytes
    return 0 < least <= memory.budget_bytes


def limit_options(
    memory: MemoryBudget, size: CompiledBytes
) -> Mapping[str, Mapping[str, str]]:
    """Compiler options with which a program may fit, by name, the fastest first.

    Args:
        memory: what it has to fit into.
        size: what it needs without them.

    Returns:
        Nothing where the compiler takes no limit.
    """
    fixed = size.peak_bytes - size.temp_bytes
    most = memory.device_bytes or 0
    if most <= max(fixed, memory.budget_bytes):
        return {}
    percent_bytes = (most - fixed) / 100
    asked = (memory.budget_bytes - fixed) / percent_bytes
    # It is a whole number, more than a gigabyte, and the compiler misses it by some
    # percent, to either side: with a little less more programs fit.
    shares = dict.fromkeys(max(1, n) for n in (round(asked), int(0.9 * asked)))
    limits: list[Mapping[str, str]] = [{MEMORY_SHARE: str(n)} for n in shares]
    if min(shares) * percent_bytes >= size.temp_bytes:
        limits = [{}]  # So much is what it needs anyway.
    names = ("within the budget", "well within the budget")
    found = {name: o for name, o in zip(names, limits, strict=False) if o}
    return found | {
        "within the budget, no latency hiding": {**limits[-1], **NO_LATENCY_HIDING}
    }


Compile = Callable[[Sequence[Candidate]], Sequence[RaceResult]]


def expected_ms(candidate: Candidate) -> float:
    """Predicted step time, `LIMITED_TIME` times with the limit; infinity if unknown."""
    if candidate.predicted_ms is None:
        return float("inf")
    limited = MEMORY_SHARE in candidate.options
    return candidate.predicted_ms * (LIMITED_TIME if limited else 1.0)


def within_reach(
    candidates: Sequence[Candidate],
    anyway: Collection[Any],
    reach: Mapping[ConstraintLevel, float],
    fitting: Sequence[Candidate] = (),
) -> list[Candidate]:
    """Finds candidates that may be faster than the best, or race anyway.

    Args:
        candidates: what there is; without a prediction each may be faster.
        anyway: keys of those that race however slow they are.
        reach: how many times as long as the best a candidate may take.
        fitting: what is known to fit; the best is of these, or of the candidates.
    """
    best_ms = min(map(expected_ms, fitting or candidates), default=float("inf"))

    def is_near(one: Candidate) -> bool:
        time_ms = expected_ms(one)
        return time_ms <= best_ms or time_ms <= reach[one.level] * best_ms

    return [
        one
        for one in candidates
        if one.key in anyway or one.predicted_ms is None or is_near(one)
    ]


def always_raced(candidates: Sequence[Candidate]) -> set[Any]:
    """Keys of candidates that race however slow they are: the plan, the best preset."""
    known = [one for one in candidates if one.is_preset and one.predicted_ms]
    best = sorted(known, key=expected_ms)[:1]
    return {one.key for one in (*candidates[:1], *best)}


@dataclass(frozen=True, slots=True)
class Admitted:
    """Compiled and skipped candidates.

    Attributes:
        fitting: compiled, and they fit.
        refused: compiled, and they do not fit or fail, with the reasons.
        left: not compiled, with the reasons.
    """

    fitting: list[RaceResult] = field(default_factory=list)
    refused: list[RaceResult] = field(default_factory=list)
    left: list[tuple[Candidate, str]] = field(default_factory=list)


def compile_until_enough_fit(
    candidates: Sequence[Candidate],
    compile_all: Compile,
    *,
    memory: MemoryBudget | None,
    size_of: Callable[[Candidate], CompiledBytes | None],
    reach: Mapping[ConstraintLevel, float] | None,
    known: Collection[Any] = (),
    is_over: Callable[[], bool] = lambda: False,
) -> Admitted:
    """Compiles candidates until enough of them fit.

    Args:
        candidates: the plan first.
        compile_all: says of some what they need, or why they cannot race.
        memory: what they have to fit into, if a budget was asked for.
        size_of: what a candidate needs by prediction, if that is known.
        reach: how many times as long as the fastest that fits one may take; None if
            one that fits is enough, without a race.
        known: keys of what was compiled before and fits.
        is_over: whether what was compiled by now must do, even if nothing fits.
    """
    found = Admitted()
    # Ways to compile a candidate: the next, and tighter limits, should that not fit.
    queue = list[list[Candidate]]()
    limited = set[Choice]()  # Choices that are compiled with the memory limit.
    always = {*known, *(one.key for one in candidates[:1])}
    for one in candidates:
        # The plan is compiled as it is, and what is known to fit needs no prediction.
        is_sure = one.options or one.key in always
        size = None if memory is None or is_sure else size_of(one)
        ways = [one]
        if memory is not None and size is not None:
            is_large = size.peak_bytes * COMPILED_TO_PREDICTED > memory.budget_bytes
            if not may_fit(memory, size):
                found.left.append((one, TOO_LARGE))
                continue
            if is_large and (limits := limit_options(memory, size)):
                if one.choice in limited:
                    # At another constraint level a choice needs as much.
                    found.left.append((one, LIMITED_ONCE))
                    continue
                ways = with_options(one, limits)
                limited.add(one.choice)
        queue.append(ways)
    anyway = always_raced([*candidates[:1], *(ways[0] for ways in queue)])
    refused: set[Any] = set()
    is_late = False
    while queue:
        queue.sort(key=lambda ways: expected_ms(ways[0]))
        fitting = [made.candidate for made in found.fitting]
        # What was refused as it is, and fits with the memory limit, fits.
        failed = refused - {(one.choice, one.level) for one in fitting}
        allowed = len(queue) if memory is None else max(0, MOST_REFUSED - len(failed))
        first = [ways[0] for ways in queue]
        near = _next(first, fitting, always, anyway, allowed, reach)
        is_late = bool(near and (fitting or refused)) and is_over()
        if not near or is_late:
            break
        # The best preset comes second: there may be no time for all of them.
        tried = [ways for one in near for ways in queue if ways[0] is one]
        queue = [ways for ways in queue if ways[0] not in near]
        sizes = compile_all([one for one, *_ in tried])
        for (one, *ways), compiled in zip(tried, sizes, strict=True):
            if compiled.may_race:
                found.fitting.append(compiled)
                continue
            found.refused.append(compiled)
            refused.add((one.choice, one.level))
            if (
                memory is not None
                and not (compiled.fits or one.choice in limited)
                and MEMORY_SHARE not in one.options
                and may_fit(memory, compiled.size)
            ):
                ways = with_options(one, limit_options(memory, compiled.size))
            if ways:
                queue.append(ways)
                limited.add(one.choice)
    rest = [one for one, *_ in queue]
    fitting = [made.candidate for made in found.fitting]
    if is_late and not fitting:
        near = rest
    else:
        near = [] if reach is None else within_reach(rest, (), reach, fitting)
    why = TOO_LATE if is_late else MANY_REFUSED
    found.left.extend((one, why if one in near else TOO_FAR) for one in rest)
    return found


def _next(
    rest: Sequence[Candidate],
    fitting: Sequence[Candidate],
    always: Collection[Any],
    anyway: Collection[Any],
    allowed: int,
    reach: Mapping[ConstraintLevel, float] | None,
) -> list[Candidate]:
    """Selects the next candidates to compile.

    Args:
        rest: what is not compiled yet, the fastest first.
        fitting: what is compiled and fits.
        always: keys of what is compiled in any case: the plan, and what is known to
            fit.
        anyway: keys of what is compiled however slow it is, as far as is allowed.
        allowed: how many may be compiled; what is always compiled counts, and is even
            if it is more.
        reach: as for :func:`compile_until_enough_fit`.
    """
    first = [one for one in rest if one.key in always]
    if reach is None:
        return [] if fitting else [*(rest if allowed else first)][:1]
    near = within_reach(rest, anyway, reach, fitting)
    others = [one for one in near if one not in first]
    others.sort(key=lambda one: one.key not in anyway)
    return [*first, *others][: max(allowed, len(first))]
