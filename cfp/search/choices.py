"""Choices of segments: parts of whole choices, and which are worth measuring.

These are the best by estimate, and the presets' parts.

Each axis of a mesh may play each role, which makes dozens of presets on three axes.
Those in which all axes play one role stay, and of the mixed ones the best by estimate;
unless they are estimated to take far longer than the best of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.strategies import Strategy
from cfp.cost.choice import SegmentChoice, segment_candidate
from cfp.cost.estimate import SegmentEstimate, estimate_segment
from cfp.cost.terms import Terms
from cfp.presets.classics import CLASSICS
from cfp.profiling.collectives import Rates
from cfp.search.problem import Problem, Solved
from cfp.settings import MIXED_PRESETS


def whole_choice(analysis: Analysis, problem: Problem, found: Solved) -> Choice:
    """The whole program's choice that a solution stands for."""
    frame = analysis.frame
    strategies: dict[int, Strategy] = {}
    storage = [Storage.USED] * len(frame.groups)
    remat, kernels = [], []
    for segment, pick in zip(analysis.segments, found.picks, strict=True):
        candidate = problem.options[segment.kind][pick].candidate
        for block, strategy in zip(segment.blocks, candidate.strategies, strict=True):
            strategies[block] = strategy
        for group in segment.groups:
            storage[group] = candidate.storage
        if candidate.remat:
            remat.append(segment.index)
        if candidate.kernel:
            kernels.append((segment.index, candidate.kernel))
    return Choice(
        tuple(strategies[block.index] for block in frame.blocks),
        tuple(storage),
        tuple(remat),
        tuple(kernels),
    )


def picks_of(analysis: Analysis, problem: Problem, choice: Choice) -> list[int] | None:
    """A whole program's choice as options of a problem; None if it has not all."""
    picks = []
    for segment in analysis.segments:
        wanted = segment_candidate(analysis, segment.index, choice)
        known = [option.candidate for option in problem.options[segment.kind]]
        if wanted not in known:
            return None
        picks.append(known.index(wanted))
    return picks


def preset_parts(
    analysis: Analysis, choices: Iterable[Choice]
) -> list[list[SegmentChoice]]:
    """For each kind of segment the parts of choices that concern it, each once.

    Equal segments may differ in a preset: the last layer hands over to something else
    than to a layer.
    """
    found: list[dict[SegmentChoice, None]] = [{} for _ in analysis.representatives]
    for choice in choices:
        for segment in analysis.segments:
            part = segment_candidate(analysis, segment.index, choice)
            found[segment.kind][part] = None
    return [list(parts) for parts in found]


def best_candidates(
    estimate: SegmentEstimate,
    storage: Storage,
    count: int,
    beam_width: int = 256,
) -> list[SegmentChoice]:
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
        SegmentChoice(
            tuple(estimate.strategies[b][s] for b, s in enumerate(row)),
            storage,
            float(cost),
        )
        for cost, row in zip(costs[:count], picks[:count], strict=True)
    ]


def ranked_candidates(estimate: SegmentEstimate, count: int) -> list[SegmentChoice]:
    """The cheapest choices of a segment by estimate.

    So many for each way to store its parameters.
    """
    modes = list(Storage) if estimate.segment.groups else [Storage.USED]
    found = [c for mode in modes for c in best_candidates(estimate, mode, count)]
    return sorted(found, key=lambda c: c.estimate_ms)


def choose_candidates(
    estimate: SegmentEstimate,
    required: Sequence[SegmentChoice],
    count: int,
) -> list[SegmentChoice]:
    """What to measure of a segment: the required ones, and the best by estimate.

    The best of every storage mode come first, so that each mode is represented.
    """
    found = dict.fromkeys(required)
    ranked = ranked_candidates(estimate, count)
    leaders = {c.storage: c for c in reversed(ranked)}
    first = [leaders[mode] for mode in Storage if mode in leaders]
    for candidate in (*first, *ranked):
        if len(found) >= max(count, len(required)):
            break
        found.setdefault(candidate)
    return list(found)


def estimate_kinds(analysis: Analysis, rates: Rates) -> tuple[SegmentEstimate, ...]:
    """Estimates the representative of every kind of segment."""
    terms = Terms(analysis.frame, rates)
    segments = analysis.segments
    found = []
    for kind, index in enumerate(analysis.representatives):
        behind = segments[index + 1] if index + 1 < len(segments) else None
        twin = behind if behind is not None and behind.kind == kind else None
        found.append(estimate_segment(terms, segments[index], twin))
    return tuple(found)


def leading_classics(
    analysis: Analysis,
    estimates: Sequence[SegmentEstimate],
    classics: Mapping[str, Choice],
    reach: float = float("inf"),
) -> dict[str, Choice]:
    """The classics that are worth measuring, in their order.

    Args:
        analysis: of the program.
        estimates: of its kinds of segments.
        classics: all of them, by name.
        reach: how many times as long as the best of them one may be estimated to take.
    """
    total_ms = {
        name: _total_ms(analysis, estimates, choice)
        for name, choice in classics.items()
    }
    # Of a program that only hands on what it got there is nothing to estimate.
    best_ms = min(total_ms.values(), default=0.0)
    limit_ms = reach * best_ms if best_ms else float("inf")
    mixed = sorted(classics.keys() - set(CLASSICS), key=total_ms.__getitem__)
    leading = {*CLASSICS, *mixed[:MIXED_PRESETS]}
    return {
        name: choice
        for name, choice in classics.items()
        if name in leading and total_ms[name] <= limit_ms
    }


def _total_ms(
    analysis: Analysis, estimates: Sequence[SegmentEstimate], choice: Choice
) -> float:
    """The estimated time of a whole program, what moves between kinds left out."""
    kinds = [segment.kind for segment in analysis.segments]
    return sum(
        kinds.count(kind)
        * estimates[kind].total_ms(segment_candidate(analysis, index, choice))
        for kind, index in enumerate(analysis.representatives)
    )
