"""What may be chosen for a segment, and how it is laid out then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Layout, Storage
from cfp.analysis.strategies import Strategy


@dataclass(frozen=True, slots=True)
class SegmentChoice:
    """A choice for a segment: one strategy per block, one storage mode for all.

    Attributes:
        strategies: one for each block.
        storage: of all its parameters.
        estimate_ms: what it is estimated to take; choices that differ in it are equal.
        remat: whether its forward pass is computed again in the backward pass.
        kernel: what computes its attentions; "" as the program has it.
    """

    strategies: tuple[Strategy, ...]
    storage: Storage
    estimate_ms: float = field(default=0.0, compare=False)
    remat: bool = False
    kernel: str = ""

    @property
    def plain(self) -> SegmentChoice:
        """The same with nothing computed again; both are laid out alike."""
        return replace(self, remat=False) if self.remat else self


def segment_candidate(analysis: Analysis, index: int, choice: Choice) -> SegmentChoice:
    """The part of a whole program's choice that concerns one segment."""
    segment = analysis.segments[index]
    modes = [choice.storage[g] for g in segment.groups]
    storage = max(set(modes), key=modes.count) if modes else Storage.USED
    strategies = tuple(choice.blocks[b] for b in segment.blocks)
    kernel = dict(choice.kernels).get(index, "")
    remat = index in choice.remat
    return SegmentChoice(strategies, storage, remat=remat, kernel=kernel)


def segment_layout(analysis: Analysis, index: int, candidate: SegmentChoice) -> Layout:
    """The layout of one segment under a candidate.

    Segments of the same kind right before and behind are laid out alike, so that
    what crosses into them is handed over as they would read it.
    """
    segments, kind = analysis.segments, analysis.segments[index].kind
    near = (i for i in (index - 1, index + 1) if 0 <= i < len(segments))
    alike = [i for i in near if segments[i].kind == kind]
    return parts_layout(
        analysis,
        {**dict.fromkeys(alike, candidate), index: candidate},
        dict.fromkeys(segments[index].groups, candidate.storage),
    )


def parts_layout(
    analysis: Analysis,
    candidates: Mapping[int, SegmentChoice],
    storage: Mapping[int, Storage],
) -> Layout:
    """The layout of some segments' blocks, and of some storage groups."""
    strategies = {
        block: strategy
        for index, candidate in candidates.items()
        for block, strategy in zip(
            analysis.segments[index].blocks, candidate.strategies, strict=True
        )
    }
    return Layout(analysis.frame, strategies, storage)
