"""Which choices for a segment are worth measuring: the best by estimate, varied."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from cfp.analysis.layout import Storage
from cfp.search.estimate import SegmentEstimate
from cfp.search.problem import Candidate


def best_candidates(
    estimate: SegmentEstimate,
    storage: Storage,
    count: int,
    beam_width: int = 256,
) -> list[Candidate]:
    """The ``count`` cheapest choices of a segment by estimate, cheapest first.

    A beam search over the blocks in order: exact where the beam holds every partial
    choice, and a good approximation otherwise.
    """
    nodes = estimate.node_ms[storage]
    before: list[list[tuple[int, tuple[tuple[float, ...], ...]]]] = [[] for _ in nodes]
    for (a, b), matrix in estimate.edge_ms.items():
        before[b].append((a, matrix))
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for place, options in enumerate(nodes):
        grown = []
        for cost, picks in beam:
            for s, node in enumerate(options):
                total = cost + node
                for a, matrix in before[place]:
                    total += matrix[s if a == place else picks[a]][s]
                grown.append((total, (*picks, s)))
        beam = heapq.nsmallest(beam_width, grown)
    return [
        Candidate(
            tuple(estimate.strategies[b][s] for b, s in enumerate(picks)), storage, cost
        )
        for cost, picks in beam[:count]
    ]


def choose_candidates(
    estimate: SegmentEstimate,
    required: Sequence[Candidate],
    count: int,
) -> list[Candidate]:
    """What to measure of a segment: the required ones, and the best by estimate.

    The best of every storage mode take turns, so that each mode is represented.
    """
    found = {c.key: c for c in required}
    ranked = [best_candidates(estimate, mode, count) for mode in Storage]
    merged = heapq.merge(*ranked, key=lambda c: c.estimate_ms)
    leaders = [mode[0] for mode in ranked if mode]
    for candidate in (*leaders, *merged):
        if len(found) >= max(count, len(required)):
            break
        found.setdefault(candidate.key, candidate)
    return list(found.values())
