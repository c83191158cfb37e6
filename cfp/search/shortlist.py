"""Which classics are worth measuring, where a mesh has more than one axis.

Each axis may play each role, which makes dozens of classics on three axes. Those in
which all axes play one role always stay; of the mixed ones the best by estimate do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.presets import CLASSICS
from cfp.profiling.collectives import Rates
from cfp.search.candidates import segment_candidate
from cfp.search.estimate import Estimator, SegmentEstimate

_MOST_MIXED = 6


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
    analysis: Analysis, estimates: Estimates, classics: Mapping[str, Choice]
) -> dict[str, Choice]:
    """The classics that are worth measuring, in their order."""
    mixed = {
        name: _total_ms(analysis, estimates, choice)
        for name, choice in classics.items()
        if name not in CLASSICS
    }
    best = sorted(mixed, key=mixed.__getitem__)[:_MOST_MIXED]
    return {n: c for n, c in classics.items() if n in CLASSICS or n in best}


def _total_ms(analysis: Analysis, estimates: Estimates, choice: Choice) -> float:
    """The estimated time of a whole program, what moves between kinds left out."""
    kinds = [segment.kind for segment in analysis.segments]
    return sum(
        kinds.count(kind)
        * estimates.kinds[kind].total_ms(segment_candidate(analysis, index, choice))
        for kind, index in enumerate(analysis.representatives)
    )
