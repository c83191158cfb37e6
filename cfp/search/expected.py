"""Expected costs of candidates that are not measured, and problems made of them.

Estimates leave out hidden communication, temporaries, and the cost of rematerializing.
Each is corrected by the median of the kind's measured candidates. On virtual and
described devices nothing is measured, and estimates alone decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from statistics import median

from cfp.analysis.layout import Choice
from cfp.cost.costs import Costs, SegmentChoice
from cfp.cost.estimate import SegmentEstimate
from cfp.search.choices import first_candidates, preset_parts
from cfp.search.problem import Option, Problem
from cfp.search.requests import Profiles
from cfp.search.solver import solve_within
from cfp.settings import (
    REMATERIALIZED_TIME_EXPECTED,
    SAFE_ESTIMATED_MEMORY_SHARE,
    Replacing,
)


def expect(
    costs: Costs,
    kind: int,
    estimate: SegmentEstimate,
    measured: Sequence[Option],
    candidates: Iterable[SegmentChoice],
) -> list[Option]:
    """Predicts the costs of candidates for a kind of segment.

    Args:
        estimate: of the times of all its candidates.
        measured: its options that were measured.
    """
    plain = {o.candidate: o for o in measured if not o.candidate.remat}
    again = [o for o in measured if o.candidate.remat]
    both = [(o, plain[o.candidate.plain]) for o in again if o.candidate.plain in plain]
    as_is = [o for o in plain.values() if not o.candidate.kernels]

    def least(candidate: SegmentChoice) -> int:
        return costs.least_bytes(kind, candidate).residual_bytes

    def residual(candidate: SegmentChoice, among: Iterable[Option]) -> int:
        more = _median((o.residual_bytes - least(o.candidate) for o in among), 0)
        return max(0, round(least(candidate) + more))

    def estimated_ms(candidate: SegmentChoice) -> float:
        saved_ms = costs.saved_by_kernel_ms(kind, candidate)
        return max(0.0, estimate.total_ms(candidate) - saved_ms)

    slower = _ratio(((o.time_ms, estimated_ms(o.candidate)) for o in as_is), 1.0)
    times_ms = ((o.time_ms, base.time_ms) for o, base in both)
    again_slower = _ratio(times_ms, REMATERIALIZED_TIME_EXPECTED)
    # The backward pass needs as much, if not from the forward pass on.
    needed_again = _ratio(((_needed(o), _needed(base)) for o, base in both), 1.0)
    temps = [o.temp_bytes for o in plain.values()]

    def unmeasured(candidate: SegmentChoice) -> Option:
        temp = round(median(temps)) if temps else costs.temp_bytes(kind, candidate)
        return Option(
            candidate=candidate,
            time_ms=slower * estimated_ms(candidate),
            state_bytes=costs.least_bytes(kind, candidate).state_bytes,
            residual_bytes=residual(candidate, plain.values()),
            temp_bytes=temp,
        )

    def rematerialized(option: Option) -> Option:
        candidate = replace(option.candidate, remat=True)
        needed = round(needed_again * _needed(option))
        kept = min(needed, residual(candidate, again))
        return replace(
            option,
            candidate=candidate,
            time_ms=again_slower * option.time_ms,
            residual_bytes=kept,
            temp_bytes=needed - kept,
        )

    known = ((c, plain.get(c.plain) or unmeasured(c.plain)) for c in candidates)
    return [rematerialized(o) if c.remat else o for c, o in known]


def _needed(option: Option) -> int:
    return option.residual_bytes + option.temp_bytes


def _ratio(pairs: Iterable[tuple[float, float]], otherwise: float) -> float:
    return _median((value / of for value, of in pairs if of > 0.0), otherwise)


def _median(values: Iterable[float], otherwise: float) -> float:
    found = [*values]
    return median(found) if found else otherwise


def estimate_options(
    estimates: Sequence[SegmentEstimate],
    presets: Mapping[str, Choice],
    costs: Costs,
    *,
    per_kind: int,
    budget_bytes: int | None,
    replacing: Replacing,
    for_memory: Replacing | None = None,
) -> Profiles:
    """The parts of the presets and the best others, with estimated costs.

    Args:
        presets: choices for the whole program whose parts are options in any case.
        per_kind: how many others of each kind, at most.
        replacing, for_memory: what may be replaced, and the same where memory decides.
    """
    parts = preset_parts(costs.analysis, presets.values())

    def expected(kind: int, remat: bool) -> list[Option]:
        mine = [replace(c, remat=remat) for c in candidates[kind]]
        own = replace(estimates[kind], edge_ms=estimates[kind].own_edge_ms)
        return expect(costs, kind, own, (), mine)

    most = inf if budget_bytes is None else SAFE_ESTIMATED_MEMORY_SHARE * budget_bytes
    for one in dict.fromkeys((replacing, for_memory or replacing)):
        candidates = first_candidates(
            costs.analysis, estimates, parts, one, others=per_kind
        )
        options = [expected(kind, False) for kind in range(len(estimates))]
        problem = build_problem(costs, options, budget_bytes)
        tight = solve_within(problem, None).memory_bytes > most
        if not tight:
            break
    if tight:
        for kind, found in enumerate(options):
            if costs.can_rematerialize(kind):
                found += expected(kind, True)
        problem = build_problem(costs, options, budget_bytes)
    return Profiles(
        presets=presets,
        costs=costs,
        memory_bound=tight,
        problem=problem,
        replacing=one,
    )


# ------------------------------------------------------- the problem over some options


def build_problem(
    costs: Costs,
    options: Sequence[Sequence[Option]],
    budget_bytes: int | None,
) -> Problem:
    """The search problem over some options of every kind of segment.

    Args:
        options: for each kind what may be chosen.
    """
    analysis = costs.analysis
    segments, kinds = analysis.segments, [s.kind for s in analysis.segments]
    candidates = [[option.candidate for option in row] for row in options]
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    for left, right in pairwise(segments):
        pairs.setdefault((left.kind, right.kind), (left.index, right.index))
    far = {
        (a, b): costs.reshardings_ms(a, b, candidates[kinds[a]], candidates[kinds[b]])
        for a, b in sorted({(min(pair), max(pair)) for pair in analysis.passing})
        if b > a + 1
    }
    return Problem(
        kinds=tuple(kinds),
        options=tuple(map(tuple, options)),
        edge_ms={
            (a, b): costs.reshardings_ms(*pair, candidates[a], candidates[b])
            for (a, b), pair in pairs.items()
        },
        far_ms={pair: rows for pair, rows in far.items() if any(map(any, rows))},
        fixed_ms=costs.fixed_ms,
        fixed_bytes=costs.fixed_bytes,
        budget_bytes=budget_bytes,
    )
