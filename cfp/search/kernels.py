"""Kernels for the attentions of a segment, as one more choice for it.

A candidate with a kernel is another candidate: measured, estimated and chosen as any
other. What axes do in the attention follows from how its strategies shard the scores:
sequences, heads, or queries; where queries are sharded, a ring is a candidate, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import AS_WRITTEN, QuerySpread, SegmentKernels
from cfp.attention.matching.graft import Way
from cfp.attention.matching.matches import among, cannot, way_of
from cfp.cost.choice import SegmentChoice, layout_of
from cfp.patterns.sites import among as patterns_among
from cfp.patterns.sites import in_parts

_SPREADS: tuple[QuerySpread, ...] = ("", "ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels that may compute parts of a program.

    Attributes:
        names: of kernels, the preferred first: of each candidate the first that can.
        parts: over so many parts of the vocabulary a cross-entropy may be computed;
            0 leaves it as it is.
        platform: of the devices.
    """

    names: Sequence[str] = ()
    parts: int = 0
    platform: str = "cpu"

    def variants(
        self, analysis: Analysis, kind: int, candidate: SegmentChoice
    ) -> list[SegmentChoice]:
        """A candidate with kernels in place, in each way that is worth a look."""
        if candidate.kernels:
            return []
        index = analysis.representatives[kind]
        frame, ops = analysis.frame, analysis.segments[index].ops
        matches = among(frame.program, ops) if self.names else []
        losses = patterns_among(frame.program, ops) if self.parts else []
        if not matches and not losses:
            return []
        layout, sizes = layout_of(analysis, {index: candidate}), dict(frame.mesh)

        def can(kernels: SegmentKernels) -> bool:
            """True if they can compute all attentions that they apply to."""
            ways = [
                (m, way_of(frame.program, m, kernels, layout.axes)) for m in matches
            ]
            able = [(match, way) for match, way in ways if isinstance(way, Way)]
            return bool(able) and not any(
                cannot(match, way, sizes, self.platform) for match, way in able
            )

        kernels = []
        for spread in _SPREADS:
            every = [SegmentKernels(attention=n, spread=spread) for n in self.names]
            kernels += [*islice(filter(can, every), 1)]
        if losses and in_parts(layout, ops, self.parts):
            alone, *both = (
                replace(one, vocabulary_parts=self.parts)
                for one in (AS_WRITTEN, *kernels)
            )
            kernels = [alone, *kernels, *both]
        return [replace(candidate, kernels=one) for one in kernels]

    def preferred(
        self, analysis: Analysis, kind: int, candidate: SegmentChoice
    ) -> SegmentChoice:
        """A candidate with the kernels that it most likely has in a plan, if any.

        Where cross-entropies may be computed in parts it is as written: there memory
        decides.
        """
        variants = [] if self.parts else self.variants(analysis, kind, candidate)
        return [*variants, candidate][0]
