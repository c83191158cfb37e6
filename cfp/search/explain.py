"""Why a choice is the best: what others would cost the whole program.

An option of a kind of segment is judged by the cheapest choice of the whole program in
which all segments of that kind take it, and all others whatever goes best with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cfp.search.bounds import least_cost_ms, memory_price, unlimited
from cfp.search.dynamic import can_fit, smallest_budget, solve_dynamically
from cfp.search.problem import Problem, Solved, solution

GIB = 2**30
# Less than this is a difference in how sums were rounded, in ms.
_SAME_MS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What comes of it if all segments of a kind take one option.

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
        kind: the kind.
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
    """What memory has to do with the best choice.

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
    unlimited: Solved
    step_bytes: int
    more: Solved
    less: Solved | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a plan.

    Attributes:
        plan: what is explained; None if that is the best.
        best: the best choice by prediction, which a race need not confirm.
        kinds: for each kind of segment what it takes, and what it could.
        memory: what memory has to do with the best choice.
    """

    plan: Solved | None
    best: Solved
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
    plan = None if picks is None else solution(problem, picks)
    if not can_fit(problem):
        needed = plan.memory_bytes if plan else smallest_budget(problem)
        problem = replace(problem, budget_bytes=needed)
    best = solve_dynamically(problem)
    assert best is not None, "something fits"
    price = memory_price(problem)
    return Explanation(
        plan=plan,
        best=best,
        kinds=tuple(
            _explain_kind(problem, (plan or best).picks, kind, count, price)
            for kind in range(len(problem.options))
        ),
        memory=_explain_memory(problem, best, step_bytes),
    )


def _explain_kind(
    problem: Problem, picks: Sequence[int], kind: int, count: int, price: float
) -> KindExplanation:
    taken = [pick for k, pick in zip(problem.kinds, picks, strict=True) if k == kind]
    chosen = sorted(set(taken), key=lambda option: (-taken.count(option), option))
    others = [i for i in range(len(problem.options[kind])) if i not in chosen]
    forced = {option: _forced(problem, kind, option) for option in others}
    fitting = [option for option in others if can_fit(forced[option])]
    bounds = {i: least_cost_ms(forced[i], price) for i in fitting}
    runners_up: list[Alternative] = []
    for option in sorted(fitting, key=bounds.__getitem__):
        if len(runners_up) == count and bounds[option] >= _cost(runners_up[-1]):
            break
        runners_up.append(_alternative(problem, kind, option, 0))
        runners_up = sorted(runners_up, key=_cost)[:count]
    last = _cost(runners_up[-1]) if len(runners_up) == count else float("inf")
    faster = {
        i: cost
        for i in others
        if i not in bounds and (cost := unlimited(forced[i]).cost_ms) < last
    }
    too_large = sorted(faster, key=faster.__getitem__)[:count]
    return KindExplanation(
        kind=kind,
        chosen=tuple(
            _alternative(problem, kind, option, taken.count(option))
            for option in chosen
        ),
        runners_up=tuple(runners_up),
        too_large=tuple(_alternative(problem, kind, i, 0) for i in too_large),
        others=len(others) - len(runners_up) - len(too_large),
    )


def _alternative(problem: Problem, kind: int, option: int, taken: int) -> Alternative:
    forced = _forced(problem, kind, option)
    found = _within(forced, problem.budget_bytes)
    return Alternative(
        option=option,
        taken=taken,
        cost_ms=found.cost_ms if found else None,
        memory_bytes=found.memory_bytes if found else smallest_budget(forced),
        unlimited_ms=unlimited(forced).cost_ms,
    )


def _within(problem: Problem, budget_bytes: int | None) -> Solved | None:
    """The cheapest choice that fits in a budget, or None if none does."""
    limited = replace(problem, budget_bytes=budget_bytes)
    return solve_dynamically(limited)


def _cost(alternative: Alternative) -> float:
    return float("inf") if alternative.cost_ms is None else alternative.cost_ms


def _forced(problem: Problem, kind: int, option: int) -> Problem:
    """The problem whose segments of one kind have no other option."""
    return problem.keep(
        [
            [option] if other == kind else range(len(options))
            for other, options in enumerate(problem.options)
        ]
    )


def _explain_memory(
    problem: Problem, best: Solved, step_bytes: int
) -> MemoryExplanation:
    budget, peak = problem.budget_bytes, best.memory_bytes
    free = unlimited(problem)
    more = best
    if budget is not None:
        wider = _within(problem, budget + step_bytes)
        assert wider is not None, "what fits in less fits"
        more = wider
    less = (peak if budget is None else budget) - step_bytes
    return MemoryExplanation(
        budget_bytes=budget,
        peak_bytes=peak,
        binds=not problem.fits(free.picks) and free.cost_ms < best.cost_ms - _SAME_MS,
        unlimited=free,
        step_bytes=step_bytes,
        more=more,
        less=_within(problem, less),
    )
