"""Which classics are worth measuring.

Each axis of a mesh may play each role, which makes dozens of classics on three axes.
Those in which all axes play one role stay, and of the mixed ones the best by estimate;
unless they are estimated to take far longer than the best of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.presets.classics import CLASSICS
from cfp.profiling.collectives import Rates
from cfp.search.candidates import segment_candidate
from cfp.search.estimate import Estimator, SegmentEstimate
from cfp.settings import MIXED_PRESETS


@dataclass(frozen=True)
class Estimates:
    """Estimated costs of every kind of segment.

    Attributes:
        estimator: what made them.
        kinds: the estimate of each kind's representative.
    """

    estimator: Estimator
    kinds: tuple[SegmentEstimate, ...]


def estimate_kinds(analysis: Analysis, rates: Rates) -> Estimates:
    """Estimates the representative of every kind of segment."""
    estimator = Estimator(analysis.frame, rates)
    segments = analysis.segments
    found = []
    for kind, index in enumerate(analysis.representatives):
        behind = segments[index + 1] if index + 1 < len(segments) else None
        twin = behind if behind is not None and behind.kind == kind else None
        found.append(estimator.segment(segments[index], twin))
    return Estimates(estimator, tuple(found))


def leading_classics(
    analysis: Analysis,
    estimates: Estimates,
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


def _total_ms(analysis: Analysis, estimates: Estimates, choice: Choice) -> float:
    """The estimated time of a whole program, what moves between kinds left out."""
    kinds = [segment.kind for segment in analysis.segments]
    return sum(
        kinds.count(kind)
        * estimates.kinds[kind].total_ms(segment_candidate(analysis, index, choice))
        for kind, index in enumerate(analysis.representatives)
    )
