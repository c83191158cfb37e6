"""Choices of a segment, and their layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import AS_WRITTEN, Choice, Layout, SegmentKernels, Storage
from cfp.analysis.strategies import Strategy


@dataclass(frozen=True, slots=True)
class SegmentChoice:
    """A choice for a segment: one strategy per block, one storage mode for all.

    Attributes:
        estimate_ms: what it is estimated to take; choices that differ in it are equal.
    """

    strategies: tuple[Strategy, ...]
    storage: Storage
    estimate_ms: float = field(default=0.0, compare=False)
    remat: bool = False
    kernels: SegmentKernels = AS_WRITTEN

    @property
    def plain(self) -> SegmentChoice:
        """The choice without rematerialization; both have one layout."""
        return replace(self, remat=False) if self.remat else self

    @property
    def as_written(self) -> SegmentChoice:
        """The choice without kernels."""
        return replace(self, kernels=AS_WRITTEN) if self.kernels else self


def segment_candidate(analysis: Analysis, index: int, choice: Choice) -> SegmentChoice:
    """The part of a whole program's choice that concerns one segment."""
    segment = analysis.segments[index]
    modes = [choice.storage[g] for g in segment.groups]
    storage = max(dict.fromkeys(modes), key=modes.count) if modes else Storage.USED
    strategies = tuple(choice.blocks[b] for b in segment.blocks)
    kernels = choice.kernels_of(index)
    remat = index in choice.remat
    return SegmentChoice(strategies, storage, remat=remat, kernels=kernels)


def layout_of(analysis: Analysis, candidates: Mapping[int, SegmentChoice]) -> Layout:
    """Makes the layout of some segments.

    A segment by itself is laid out with equal neighbours, so that values which cross
    are sharded as the neighbours read them.
    """
    segments, laid_out = analysis.segments, dict[int, SegmentChoice]()
    if len(candidates) == 1:
        [(index, candidate)] = candidates.items()
        kind, near = segments[index].kind, {index - 1, index + 1}
        alike = (s.index for s in segments if s.index in near and s.kind == kind)
        laid_out = dict.fromkeys(alike, candidate)
    laid_out.update(candidates)
    strategies = {
        block: strategy
        for index, candidate in laid_out.items()
        for block, strategy in zip(
            segments[index].blocks, candidate.strategies, strict=True
        )
    }
    storage = {
        group: candidate.storage
        for index, candidate in candidates.items()
        for group in segments[index].groups
    }
    return Layout(analysis.frame, strategies, storage)
