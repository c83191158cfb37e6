"""The figures that a plan was chosen by, as plain data: what a report draws."""

from __future__ import annotations

from dataclasses import dataclass

from cfp.analysis.layout import SegmentKernels, Storage
from cfp.fields import Count, Flag, Time, Words
from cfp.plan.parts import AxisRole


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeBlocks:
    """Blocks of a segment that have one strategy.

    Attributes:
        names: of the blocks, shortened to what tells them apart.
        strategy: what mesh axes shard in each.
    """

    names: tuple[Words, ...]
    strategy: tuple[AxisRole, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFigures:
    """A strategy of a kind of segment.

    Attributes:
        blocks: blocks by strategy, in the order of the first block of each.
        storage: storage of its parameters; None without parameters.
        kernels: kernels that compute parts of it.
        rematerialized: True if its forward pass is rematerialized.
    """

    blocks: tuple[AlikeBlocks, ...]
    storage: Storage | None
    kernels: SegmentKernels
    rematerialized: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFigures:
    """A measured strategy of a kind of segment.

    Attributes:
        name: the preset with this part, or a number: ``strategy 7 (no preset)``.
        strategy: its strategies, storage, kernels and rematerialization.
        state_bytes: parameters and optimizer state of one segment, on each device,
            twice without donation.
        residual_bytes: values that one segment keeps from forward to backward.
        temp_bytes: largest further memory while it runs.
        step_ms: predicted time of the step with all segments of the kind so, and the
            other segments unchanged.
        memory_bytes: predicted memory on each device with the same choice.
        taken: number of segments with this option in the plan.
    """

    name: Words
    strategy: StrategyFigures
    segment_ms: Time
    state_bytes: Count
    residual_bytes: Count
    temp_bytes: Count
    step_ms: Time
    memory_bytes: Count
    taken: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFigures:
    """A kind of segment and the strategies that were measured for it.

    Attributes:
        name: which segments are of it.
    """

    name: Words
    options: tuple[OptionFigures, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftFigures:
    """Attentions that stay as written, though kernels may compute them.

    Attributes:
        source: source line of the attentions.
        reason: reason against a kernel.
        kernel: the kernel that cannot compute them; "" for all kernels.
    """

    source: Words
    reason: Words
    count: Count
    kernel: Words = ""


# A variant's note where time was over before it was planned.
UNPLANNED = "not planned: time was over"
# An entry of `Plan.search`: the time that was given for all, if it was limited.
GIVEN_SECONDS = "seconds_given"
# What all variants took together, their estimates and last race included.
VARIANTS_SECONDS = "seconds_of_all_variants"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFigures:
    """A mesh, or a number of microbatches, that the plan was chosen among.

    Attributes:
        name: such as ``x=2,y=4``.
        step_ms: of its best plan, or None.
        estimated_ms: of its best plan by estimates, or None.
        note: why it has no plan, or "".
        taken: whether it is the plan's.
    """

    name: Words
    step_ms: Time | None
    estimated_ms: Time | None
    note: Words
    taken: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class WorthFigures:
    """Gain of one kind of choice in a plan.

    Attributes:
        name: kind of choice: "kernels", "storage", ...
        with_ms: the best step with all kinds of choices.
        without_ms: the best step without this kind; None if no such step fits in
            memory.
        is_measured: True if both times are measured, False if predicted.
    """

    name: Words
    with_ms: Time
    without_ms: Time | None
    is_measured: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a plan.

    Attributes:
        kinds: kinds of segments by number; empty without a search.
        segment_kinds: kind of each segment.
        picks: option of each segment in the plan; empty if part of it was not measured.
        fixed_bytes: memory that every choice needs.
        budget_bytes: memory of one device that the plan may use, or None.
        left: attentions that stay as written, and preferred kernels that cannot compute
            them.
        kernels: sharded kernels of the step, with their axes.
        variants: compared meshes and microbatches.
        variants_raced: True if their best plans ran against each other.
        worth: gain of each kind of choice.
        chosen: kinds of choices, by the names of `choose`; empty for all.
    """

    kinds: tuple[KindFigures, ...] = ()
    segment_kinds: tuple[Count, ...] = ()
    picks: tuple[Count, ...] = ()
    fixed_bytes: Count = 0
    budget_bytes: Count | None = None
    left: tuple[LeftFigures, ...] = ()
    kernels: tuple[Words, ...] = ()
    variants: tuple[VariantFigures, ...] = ()
    variants_raced: Flag = False
    worth: tuple[WorthFigures, ...] = ()
    chosen: tuple[Words, ...] = ()

    def __post_init__(self) -> None:
        kinds, kind_of, picks = self.kinds, self.segment_kinds, self.picks
        if kinds and max(kind_of, default=0) >= len(kinds):
            raise ValueError(f"there are {len(kinds)} kinds of segments")
        if picks and len(picks) != len(kind_of):
            raise ValueError(f"{len(picks)} picks for {len(kind_of)} segments")
        for kind, pick in zip(kind_of, picks, strict=False):
            if kind >= len(kinds) or pick >= len(kinds[kind].options):
                raise ValueError(f"there is no option {pick} of kind {kind}")
