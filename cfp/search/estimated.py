"""Choices by estimates alone: nothing is compiled or run to find them.

For virtual devices, whose times say nothing about those of GPUs, and wherever there is
no device to measure on. What an option costs is what measured rates, or assumed ones,
say of its floating-point operations, bytes and collectives, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cfp.analysis.layout import Choice
from cfp.search.candidates import choose_candidates, segment_candidate
from cfp.search.costs import Costs, build_problem
from cfp.search.dynamic import solve_dynamically
from cfp.search.effort import Explored
from cfp.search.kernels import Kernels, with_kernels
from cfp.search.outlook import Outlook
from cfp.search.problem import Candidate
from cfp.search.shortlist import Estimates
from cfp.settings import SAFE_ESTIMATED_MEMORY_SHARE


def estimate_options(
    estimates: Estimates,
    presets: Mapping[str, Choice],
    costs: Costs,
    *,
    per_kind: int,
    budget_bytes: int | None,
    kernels: Kernels | None = None,
) -> Explored:
    """The parts of the presets and the best others, with estimated costs.

    Args:
        estimates: of every kind of segment.
        presets: choices for the whole program whose parts are options in any case.
        costs: of the program's segments.
        per_kind: how many others of each kind, at most.
        budget_bytes: memory of one device, or None.
        kernels: what may compute attentions.
    """
    analysis = costs.analysis
    required: list[dict[tuple, Candidate]] = [{} for _ in analysis.representatives]
    for choice in presets.values():
        for segment in analysis.segments:
            member = segment_candidate(analysis, segment.index, choice)
            required[segment.kind].setdefault(member.key, member)
    options = []
    for kind, estimate in enumerate(estimates.kinds):
        own = list(required[kind].values())
        expected = Outlook(costs, kind, (), estimate.without_twin())
        candidates = choose_candidates(estimate, own, len(own) + per_kind)
        candidates = with_kernels(kernels, kind, candidates)
        options.append([expected.expect(candidate) for candidate in candidates])
    problem = build_problem(costs, options, None)
    fastest = solve_dynamically(problem)
    assert fastest is not None, "without a budget everything fits"
    tight = budget_bytes is not None and (
        fastest.memory_bytes > SAFE_ESTIMATED_MEMORY_SHARE * budget_bytes
    )
    if tight:
        for kind, found in enumerate(options):
            if costs.can_rematerialize(kind):
                estimate = estimates.kinds[kind].without_twin()
                expected = Outlook(costs, kind, (), estimate)
                again = [replace(o.candidate, remat=True) for o in found]
                found.extend(expected.expect(candidate) for candidate in again)
    return Explored(
        wanted=[],
        records={},
        required=0,
        rounds=0,
        gap=1.0,
        tight=tight,
        estimated=tuple(map(tuple, options)),
    )
