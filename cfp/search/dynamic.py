"""The search by dynamic programming along the chain of segments, as in CFP.

Segments are decided from first to last. What later segments need to know of earlier
ones is the last pick (for the resharding behind it), the cost so far, and under a
budget the memory kept so far and the peak so far. Of partial choices with the
same last pick those stay that no other beats in all of these (arXiv 2504.00598 keeps
the cost alone, and has no budget). Exact; without a budget the time is linear in the
number of segments, with one the number of partial choices that stay may grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cfp.search.problem import Option, Problem, Solution, solution


@dataclass(frozen=True, slots=True)
class _Partial:
    """A choice for the first few segments.

    Attributes:
        cost_ms: its time, resharding included.
        kept_bytes: state and residuals of all.
        peak_bytes: state of all, and the most that any needs besides while it runs.
        pick: the last pick.
        before: the choice without the last pick, or None.
    """

    cost_ms: float
    kept_bytes: int
    peak_bytes: int
    pick: int
    before: _Partial | None


def solve_dynamically(problem: Problem) -> Solution | None:
    """The cheapest choice that fits, or None if none does."""
    partials: list[_Partial] = []
    for place, kind in enumerate(problem.kinds):
        matrix = None
        if place:
            matrix = problem.edge_ms.get((problem.kinds[place - 1], kind))
        grown: list[_Partial] = []
        for pick, option in enumerate(problem.options[kind]):
            if place == 0:
                ways: Iterable[_Partial] = [_extend(None, pick, option, 0.0)]
            else:
                ways = (
                    _extend(p, pick, option, matrix[p.pick][pick] if matrix else 0.0)
                    for p in partials
                )
            grown.extend(_best(problem, ways))
        partials = grown
    if not problem.kinds:
        return solution(problem, ())
    if not partials:
        return None
    step: _Partial | None = min(partials, key=lambda p: p.cost_ms)
    picks = []
    while step is not None:
        picks.append(step.pick)
        step = step.before
    return solution(problem, picks[::-1])


def _extend(
    before: _Partial | None, pick: int, option: Option, edge_ms: float
) -> _Partial:
    kept, peak = (before.kept_bytes, before.peak_bytes) if before else (0, 0)
    kept += option.state_bytes + option.residual_bytes
    return _Partial(
        cost_ms=(before.cost_ms if before else 0.0) + edge_ms + option.time_ms,
        kept_bytes=kept,
        peak_bytes=max(peak + option.state_bytes, kept + option.temp_bytes),
        pick=pick,
        before=before,
    )


def _best(problem: Problem, partials: Iterable[_Partial]) -> list[_Partial]:
    """Those that fit so far, and that no other beats in everything that counts."""
    if problem.budget_bytes is None:
        return [min(partials, key=lambda p: p.cost_ms)]
    room = problem.budget_bytes - problem.fixed_bytes
    kept: list[_Partial] = []
    for p in sorted(partials, key=lambda p: (p.cost_ms, p.kept_bytes, p.peak_bytes)):
        if p.peak_bytes <= room and not any(
            q.kept_bytes <= p.kept_bytes and q.peak_bytes <= p.peak_bytes for q in kept
        ):
            kept.append(p)
    return kept
