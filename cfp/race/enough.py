"""The one rule of which candidates are compiled, and how far down their list.

What may be a candidate was decided before (:mod:`cfp.race.race`). Here all are sorted
by predicted time, and the plan takes part in any case. Each is compiled as it is; or
with the memory limit, where by prediction, or as compiled, it does not fit as it is,
and the loosest with which it does; rematerialized ones are candidates of their own.
That goes on until enough fit: all that are predicted to be within reach of the fastest
that fits, and one preset. What cannot fit whatever the compiler does is not compiled.

The memory limit: XLA schedules what hides latency, and keeps what that makes, as far as
a device's memory allows; what does not fit it rematerializes by itself, less of it and
cheaper than a whole segment. It goes by the device's memory, unless it gets a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cfp.analysis.layout import Choice
from cfp.context import MemoryBudget
from cfp.profiling.record import CompiledBytes
from cfp.race.candidates import with_options
from cfp.race.programs import RaceResult, TimedCandidate
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
    """Whether a program may fit, if the compiler saves what it can.

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
    if not memory.limits_memory or most <= max(fixed, memory.budget_bytes):
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
    """What a candidate should take, the memory limit reckoned with; else infinity."""
    if candidate.predicted_ms is None:
        return float("inf")
    limited = MEMORY_SHARE in candidate.options
    return candidate.predicted_ms * (LIMITED_TIME if limited else 1.0)


def in_reach(
    candidate: Candidate, best_ms: float, reach: Mapping[ConstraintLevel, float]
) -> bool:
    """Whether a candidate may be faster than the best; what is unknown may be."""
    limit_ms = reach[candidate.level] * best_ms
    return candidate.predicted_ms is None or expected_ms(candidate) <= limit_ms


def near_among(
    candidates: Sequence[Candidate],
    best_ms: float,
    anyway: Collection[Any],
    reach: Mapping[ConstraintLevel, float],
) -> list[Candidate]:
    """Those that take part by their keys, or may be faster than the best."""
    return [
        one for one in candidates if one.key in anyway or in_reach(one, best_ms, reach)
    ]


def best_of(candidates: Sequence[Candidate]) -> float:
    """The least time that any of them should take; infinite if none is known."""
    return min(map(expected_ms, candidates), default=float("inf"))


def raced_anyway(
    candidates: Sequence[Candidate], presets: Collection[Choice]
) -> set[Any]:
    """Keys of what takes part however slow it is: the plan, and the best preset."""
    known = [one for one in candidates if one.choice in presets and one.predicted_ms]
    best = sorted(known, key=expected_ms)[:1]
    return {one.key for one in (*candidates[:1], *best)}


@dataclass(frozen=True, slots=True)
class Admitted:
    """What became of candidates.

    Attributes:
        fitting: compiled, and they fit.
        refused: compiled, and they do not fit or fail, with the reasons.
        far: too far behind, so that they were not compiled.
        too_large: predicted not to fit, so that they were not compiled.
    """

    fitting: list[TimedCandidate] = field(default_factory=list)
    refused: list[TimedCandidate] = field(default_factory=list)
    far: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)


def enough_that_fit(
    candidates: Sequence[Candidate],
    compile_all: Compile,
    *,
    memory: MemoryBudget | None,
    size_of: Callable[[Candidate], CompiledBytes | None],
    reach: Mapping[ConstraintLevel, float] | None,
    presets: Collection[Choice] = (),
    known: Collection[Any] = (),
) -> Admitted:
    """Compiles candidates until enough of them fit.

    Args:
        candidates: the plan first.
        compile_all: says of some what they need, or why they cannot race.
        memory: what they have to fit into, if a budget was asked for.
        size_of: what a candidate needs by prediction, if that is known.
        reach: how many times as long as the fastest that fits one may take; None if
            one that fits is enough, without a race.
        presets: choices of which the fastest is compiled however slow it is.
        known: keys of what was compiled before and fits: it is tried in any case.
    """
    found, queue = Admitted(), list[Candidate]()
    limited = set[Choice]()  # With fewer constraints each needs no less.
    tighter = dict[Any, list[Candidate]]()  # Limits to be tried next, by key.

    def loosest(ways: list[Candidate]) -> None:
        if ways:
            queue.append(ways[0])
            limited.add(ways[0].choice)
            tighter[ways[0].key] = ways[1:]

    for place, one in enumerate(candidates):
        # The plan is compiled as it is, and what is known to fit needs no prediction.
        is_sure = not place or one.options or one.key in known
        size = None if memory is None or is_sure else size_of(one)
        if memory is None or size is None:
            queue.append(one)
        elif not may_fit(memory, size):
            found.too_large.append(one)
        elif size.peak_bytes * COMPILED_TO_PREDICTED <= memory.budget_bytes:
            queue.append(one)
        elif not (variants := with_options([one], limit_options(memory, size))):
            queue.append(one)
        elif one.choice in limited:
            found.too_large.append(one)
        else:
            loosest(variants)
    refused: set[Any] = set()
    anyway = {*known, *raced_anyway([*candidates[:1], *queue], presets)}
    while queue:
        queue.sort(key=expected_ms)
        if len(refused) >= MOST_REFUSED:
            near = [] if found.fitting else [c for c in queue if c.key in known][:1]
        elif reach is None:
            near = [] if found.fitting else queue[:1]
        else:
            best_ms = best_of([one for one, _ in found.fitting] or queue)
            near = near_among(queue, best_ms, anyway, reach)
            near = near or ([] if found.fitting else queue[:1])
            if memory is not None:
                near = near[: MOST_REFUSED - len(refused)]
        if not near:
            break
        queue = [one for one in queue if one not in near]
        for one, compiled in zip(near, compile_all(near), strict=True):
            if compiled.may_race:
                found.fitting.append((one, compiled))
                continue
            found.refused.append((one, compiled))
            refused.add((one.choice, one.level))
            if one.key in tighter:
                loosest(tighter[one.key])
            elif (
                memory is not None
                and not (compiled.fits or one.choice in limited)
                and MEMORY_SHARE not in one.options
                and may_fit(memory, compiled.record)
            ):
                loosest(with_options([one], limit_options(memory, compiled.record)))
        refused -= {(one.choice, one.level) for one, _ in found.fitting}
    found.far.extend(queue)
    return found
