"""Kernels for the attentions of a segment, as one more choice for it.

A candidate with a kernel is another candidate: measured, estimated and chosen as any
other. What axes do in the attention follows from how its strategies shard the scores:
sequences, heads, or queries; where queries are sharded, a ring is a candidate, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cfp.analysis.analyze import Analysis
from cfp.attention.matching.graft import Way, refused
from cfp.attention.matching.matches import among, way_of
from cfp.cost.choice import SegmentChoice, layout_of
from cfp.patterns.build import joined, name_of
from cfp.patterns.sites import among as patterns_among
from cfp.patterns.sites import in_parts


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
        if candidate.kernel:
            return []
        index = analysis.representatives[kind]
        frame, ops = analysis.frame, analysis.segments[index].ops
        matches = among(frame.program, ops) if self.names else []
        losses = patterns_among(frame.program, ops) if self.parts else []
        if not matches and not losses:
            return []
        layout, sizes = layout_of(analysis, {index: candidate}), dict(frame.mesh)

        def can(kernel: str) -> bool:
            """True if it can compute all attentions that it applies to."""
            ways = [(m, way_of(frame.program, m, kernel, layout.axes)) for m in matches]
            able = [(match, way) for match, way in ways if isinstance(way, Way)]
            return bool(able) and not any(
                refused(match.problem, way, sizes, self.platform) for match, way in able
            )

        part = name_of(self.parts)
        parts = [part] if losses and in_parts(layout, ops, part) else []
        kernels = []
        for spread in ("", " ring"):
            for kernel in (name + spread for name in self.names):
                if can(kernel):
                    kernels.append(kernel)
                    break
        both = [joined(kernel, part) for kernel in kernels for part in parts]
        every = (*parts, *kernels, *both)
        return [replace(candidate, kernel=kernel) for kernel in every]
