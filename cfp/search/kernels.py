"""Kernels for the attentions of a segment, as one more choice for it.

A candidate with a kernel is another candidate: measured, estimated and chosen as any
other. What axes do in the attention follows from how its strategies shard the scores:
sequences, heads, or queries; where queries are sharded, a ring is a candidate, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cfp.analysis.analyze import Analysis
from cfp.attention.matching.graft import refused
from cfp.attention.matching.matches import Match, among, way_of
from cfp.cost.choice import SegmentChoice, layout_of
from cfp.patterns.build import joined, name_of
from cfp.patterns.sites import among as patterns_among
from cfp.patterns.sites import in_parts


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which kernels may compute the attentions of a program.

    Attributes:
        analysis: of the program.
        names: of kernels, the preferred first: of each candidate the first that can.
        parts: over so many parts of the vocabulary a cross-entropy may be computed;
            0 leaves it as it is.
        platform: of the devices.
    """

    analysis: Analysis
    names: Sequence[str] = ()
    parts: int = 0
    platform: str = "cpu"

    def variants(self, kind: int, candidate: SegmentChoice) -> list[SegmentChoice]:
        """A candidate with kernels in place, in each way that is worth a look."""
        if candidate.kernel:
            return []
        analysis = self.analysis
        index = analysis.representatives[kind]
        program = analysis.frame.program
        ops = analysis.segments[index].ops
        matches = among(program, ops) if self.names else []
        losses = patterns_among(program, ops) if self.parts else []
        if not matches and not losses:
            return []
        layout = layout_of(analysis, {index: candidate})
        name = name_of(self.parts)
        parts = [name] if losses and in_parts(layout, ops, name) else []
        kernels = []
        for spread in ("", " ring"):
            for kernel in (name + spread for name in self.names):
                if any(self._can(match, kernel, layout.axes) for match in matches):
                    kernels.append(kernel)
                    break
        both = [joined(kernel, part) for kernel in kernels for part in parts]
        every = (*parts, *kernels, *both)
        return [replace(candidate, kernel=kernel) for kernel in every]

    def _can(
        self,
        match: Match,
        kernel: str,
        axes: Mapping[int, Sequence[Sequence[str]]],
    ) -> bool:
        way = way_of(self.analysis.frame.program, match, kernel, axes)
        if isinstance(way, str):
            return False
        sizes = dict(self.analysis.frame.mesh)
        return refused(match.problem, way, sizes, self.platform) is None


def with_kernels(
    kernels: Kernels | None, kind: int, candidates: Sequence[SegmentChoice]
) -> list[SegmentChoice]:
    """Candidates, and those with kernels."""
    if kernels is None:
        return [*candidates]
    return [
        *candidates,
        *(v for one in candidates for v in kernels.variants(kind, one)),
    ]
