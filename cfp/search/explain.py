"""Explains why a choice is the best: costs of the program under others.

An option of a kind of segment is judged by the cheapest choice of the whole program in
which all segments of that kind take it, and all others whatever goes best with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cfp.search.problem import Assignment, Problem
from cfp.search.solver import leanest, solve, solve_within

GIB = 2**30
# Less than this is a difference in how sums were rounded, in ms.
_SAME_MS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Result of all segments of a kind taking one option.

    Attributes:
        option: its index among the options of the kind.
        taken: how many segments of the kind take it in the plan.
        cost_ms: what the whole program would take; None if nothing fits.
        memory_bytes: what it would need on each device; if nothing fits, the smallest
            budget that would do.
        unlimited_ms: what the whole program would take without a budget.
    """

    option: int
    taken: int
    cost_ms: float | None
    memory_bytes: int
    unlimited_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindExplanation:
    """A kind of segment: what the plan takes, and what it could.

    Attributes:
        chosen: the options that the plan takes, the most frequent first.
        runners_up: those that would cost the whole program least, the best first.
        too_large: options that do not fit, and would be faster than the last of those
            if there were no budget; the fastest first.
        others: how many options are neither.
    """

    kind: int
    chosen: tuple[Alternative, ...]
    runners_up: tuple[Alternative, ...]
    too_large: tuple[Alternative, ...]
    others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryExplanation:
    """The role of memory in the best choice.

    Attributes:
        budget_bytes: of each device, or None for no limit. More than was asked for if
            nothing fits in that.
        peak_bytes: what the best choice is predicted to need.
        binds: whether there is a faster choice that does not fit.
        unlimited: the fastest choice without a budget.
        step_bytes: the step of the next two.
        more: the fastest choice if the budget were a step larger.
        less: the fastest choice if the budget were a step smaller; without a budget,
            if it were a step below what the best choice needs. None if nothing fits.
    """

    budget_bytes: int | None
    peak_bytes: int
    binds: bool
    unlimited: Assignment
    step_bytes: int
    more: Assignment
    less: Assignment | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of a plan.

    Attributes:
        plan: what is explained; None if that is the best.
        best: the best choice by prediction, which a race need not confirm.
        kinds: for each kind of segment what it takes, and what it could.
        memory: what memory has to do with the best choice.
    """

    plan: Assignment | None
    best: Assignment
    kinds: tuple[KindExplanation, ...]
    memory: MemoryExplanation


def explain(
    problem: Problem,
    picks: Sequence[int] | None = None,
    count: int = 5,
    step_bytes: int = GIB,
) -> Explanation:
    """Explains a choice.

    Args:
        problem: what was searched. If nothing fits in its budget, as where only the
            compiler made it fit, this is about the smallest that the choice fits in.
        picks: the choice, as an option for each segment; the best, if not given.
        count: how many runners-up to find for each kind.
        step_bytes: by how much more and less memory to ask.
    """
    plan = None if picks is None else problem.solution(picks)
    best = solve(problem)
    if best is None:
        needed = (plan or leanest(problem)).memory_bytes
        problem = replace(problem, budget_bytes=needed)
        best = solve_within(problem, needed)
    budget, free, more = problem.budget_bytes, solve_within(problem, None), best
    if budget is not None:
        more = solve_within(problem, budget + step_bytes)
    less_bytes = (best.memory_bytes if budget is None else budget) - step_bytes
    faster = free.cost_ms < best.cost_ms - _SAME_MS
    return Explanation(
        plan=plan,
        best=best,
        kinds=tuple(
            _explain_kind(problem, (plan or best).picks, kind, count)
            for kind in range(len(problem.options))
        ),
        memory=MemoryExplanation(
            budget_bytes=budget,
            peak_bytes=best.memory_bytes,
            binds=faster and not problem.fits(free.picks),
            unlimited=free,
            step_bytes=step_bytes,
            more=more,
            less=solve(replace(problem, budget_bytes=less_bytes)),
        ),
    )


def _explain_kind(
    problem: Problem, picks: Sequence[int], kind: int, count: int
) -> KindExplanation:
    pairs = zip(problem.kinds, picks, strict=True)
    taken = Counter(pick for k, pick in pairs if k == kind)
    alone = {option: _alone(problem, kind, option) for option in problem.allowed(kind)}
    free_ms = {i: solve_within(one, None).cost_ms for i, one in alone.items()}

    def alternative(option: int) -> Alternative:
        found = solve(alone[option])
        return Alternative(
            option=option,
            taken=taken[option],
            cost_ms=found.cost_ms if found else None,
            memory_bytes=(found or leanest(alone[option])).memory_bytes,
            unlimited_ms=free_ms[option],
        )

    others = [option for option in alone if option not in taken]
    fitting: list[Alternative] = []
    too_large: list[Alternative] = []
    last_ms = float("inf")  # of the runners-up, once there are so many
    for option in sorted(others, key=free_ms.__getitem__):
        # Within the budget nothing is faster than without one.
        if free_ms[option] >= last_ms:
            break
        found = alternative(option)
        (too_large if found.cost_ms is None else fitting).append(found)
        if len(fitting) >= count:
            last_ms = sorted(map(_cost_ms, fitting))[count - 1]
    runners_up = sorted(fitting, key=_cost_ms)[:count]
    too_large = [one for one in too_large if one.unlimited_ms < last_ms][:count]
    chosen = sorted(taken, key=lambda option: (-taken[option], option))
    return KindExplanation(
        kind=kind,
        chosen=tuple(map(alternative, chosen)),
        runners_up=tuple(runners_up),
        too_large=tuple(too_large),
        others=len(others) - len(runners_up) - len(too_large),
    )


def _alone(problem: Problem, kind: int, option: int) -> Problem:
    """The problem whose segments of one kind have no other option."""
    kinds = range(len(problem.options))
    return problem.among(
        [[option] if other == kind else problem.allowed(other) for other in kinds]
    )


def _cost_ms(alternative: Alternative) -> float:
    return float("inf") if alternative.cost_ms is None else alternative.cost_ms
