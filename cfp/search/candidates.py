"""Which choices for a segment are worth measuring: the best by estimate, varied."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Storage
from cfp.search.estimate import SegmentEstimate
from cfp.search.problem import Candidate


def segment_candidate(analysis: Analysis, index: int, choice: Choice) -> Candidate:
    """The part of a whole program's choice that concerns one segment."""
    segment = analysis.segments[index]
    modes = [choice.storage[g] for g in segment.groups]
    storage = max(set(modes), key=modes.count) if modes else Storage.USED
    strategies = tuple(choice.blocks[b] for b in segment.blocks)
    kernel = dict(choice.kernels).get(index, "")
    remat = index in choice.remat
    return Candidate(strategies, storage, remat=remat, kernel=kernel)


def storage_modes(estimate: SegmentEstimate) -> list[Storage]:
    """The ways to store a segment's parameters; one if it has none."""
    return list(Storage) if estimate.segment.groups else [Storage.USED]


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
    before: dict[int, list[tuple[int, np.ndarray]]] = {}
    for (a, b), matrix in estimate.edge_ms.items():
        before.setdefault(b, []).append((a, matrix))
    costs, picks = np.zeros(1), np.zeros((1, 0), int)
    for place, options in enumerate(estimate.node_ms[storage]):
        grown = costs[:, None] + options[None, :]
        for a, matrix in before.get(place, ()):
            grown = grown + (np.diag(matrix) if a == place else matrix[picks[:, a]])
        best = np.argsort(grown, axis=None, kind="stable")[:beam_width]
        rows, strategies = np.unravel_index(best, grown.shape)
        costs = grown[rows, strategies]
        picks = np.concatenate([picks[rows], strategies[:, None]], axis=1)
    return [
        Candidate(
            tuple(estimate.strategies[b][s] for b, s in enumerate(row)),
            storage,
            float(cost),
        )
        for cost, row in zip(costs[:count], picks[:count], strict=True)
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
    ranked = [
        best_candidates(estimate, mode, count) for mode in storage_modes(estimate)
    ]
    merged = heapq.merge(*ranked, key=lambda c: c.estimate_ms)
    leaders = [mode[0] for mode in ranked if mode]
    for candidate in (*leaders, *merged):
        if len(found) >= max(count, len(required)):
            break
        found.setdefault(candidate.key, candidate)
    return list(found.values())
