"""The parts of a plan, and checks of the step that uses it.

The figures that a plan was chosen by, as plain data: what a report draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import PurePath
from typing import Annotated, Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves
from pydantic import Field

from cfp.analysis.layout import SegmentKernels, Storage
from cfp.errors import OptionError, PlanMismatch
from cfp.fields import Count, Flag, Name, Time, Words, matching
from cfp.fields import Spec as SpecField
from cfp.program.calling import check_keywords
from cfp.program.step import FlatStep


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
    """Parts of a step that stay as written, though kernels may compute such parts.

    Attributes:
        kind: kind of kernels, such as "attention".
        source: source line of the parts.
        reason: reason against a kernel.
        kernel: the kernel that cannot compute them; "" for all kernels.
    """

    kind: Words
    source: Words
    reason: Words
    count: Count
    kernel: Words = ""


# A variant's note where time was over before it was planned.
UNPLANNED = "not planned: time was over"
# An entry of `Plan.search`: what all variants took, estimates and last race included.
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


# Reasons why a kernel with a rule is whole on every device; the sizes that its rule
# shards stand behind the first.
INDIVISIBLE = "divides none of"
NOT_CHOSEN = "the plan does not shard it"

_NUMBER = re.compile(r"\d+")
# Longer numbers than Python reads are damaged.
_TYPE = r"[^\[]*\[(\d{1,15}(,\d{1,15})*)?\]"


class Role(StrEnum):
    """Kinds of factors of a block's anchor that an axis may shard."""

    BATCH = "batch"
    ROWS = "rows"
    COLUMNS = "columns"
    CONTRACTED = "contracted"
    DIM = "dim"  # of an op that is neither a product nor a lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """Part of a block's anchor that one mesh axis shards.

    Two roles are equal if only sizes differ, as with another batch.

    Attributes:
        role: kind of the sharded factor.
        factor: number of the factor in the anchor's sharding rule.
        dim: dim of the anchor's result with the factor; -1 for none.
        scattered_dim: dim of the result to which a contraction's sum is scattered, or
            for which a lookup exchanges columns; None for none.
    """

    axis: Name
    role: Role = field(compare=False)
    factor: Count
    dim: Annotated[int, Field(strict=True, ge=-1)]
    scattered_dim: Count | None
    size: Annotated[Count, Field(ge=1)] = field(compare=False)


class Detail(Enum):
    """Detail in which a text says what axes shard."""

    ROLES = "x: rows"
    DIMS = "x: rows (dim 0)"
    SIZES = "x: rows (dim 0, size 8)"


def roles_text(roles: Sequence[AxisRole], detail: Detail = Detail.SIZES) -> str:
    """Describes the roles of axes in a block: ``x: rows (dim 0, size 8)``.

    A dim that is only a dim has no more words: ``x: dim 0, size 8``.
    """
    parts = []
    for one in roles:
        where = [] if one.role is Role.CONTRACTED else [f"dim {one.dim}"]
        where += [f"size {one.size}"] if detail is Detail.SIZES else []
        text = f"{one.axis}: {one.role}"
        if one.role is Role.DIM:
            text = f"{one.axis}: {', '.join(where)}"
        elif where and detail is not Detail.ROLES:
            text += f" ({', '.join(where)})"
        if one.scattered_dim is not None:
            is_sum = one.role is Role.CONTRACTED
            text += ", scattered to " if is_sum else ", exchanged for "
            text += f"dim {one.scattered_dim}"
        parts.append(text)
    return "; ".join(parts) or "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """A parameter and how it is stored, with all that is stored like it.

    Attributes:
        argument: position of the parameter among the argument leaves.
    """

    argument: Count
    storage: Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSegment:
    """The choice for one segment of a plan, apart from its blocks' strategies.

    Attributes:
        kind: segments of one kind have the same options.
        parameters: parameters that belong to the segment.
        shared: without own parameters, those of other segments that it reads, such as
            the tied table of an embedding.
        rematerialized: True if its forward pass is rematerialized.
        kernels: kernels that compute parts of it.
        time_ms: measured time; None if not measured.
    """

    kind: Count
    parameters: tuple[StoredParameter, ...]
    rematerialized: Flag
    kernels: SegmentKernels
    time_ms: Time | None
    shared: tuple[StoredParameter, ...] = ()

    @property
    def storage(self) -> Storage | None:
        """Storage of most of its own parameters; None without any."""
        return _most(self.parameters)

    @property
    def shown_storage(self) -> Storage | None:
        """Storage of most of its own parameters, or of shared ones; None of none."""
        return _most(self.parameters or self.shared)

    @property
    def alike(self) -> tuple[Any, ...]:
        """Everything that segments which are shown as one have in common."""
        return self.kind, self.shown_storage, self.rematerialized, self.kernels


def _most(parameters: Sequence[StoredParameter]) -> Storage | None:
    """Storage of most of some parameters, of the first among equals; None of none."""
    modes = [one.storage for one in parameters]
    return max(dict.fromkeys(modes), key=modes.count, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFigure:
    """Collectives of one kind over the same axes that follow a block.

    Attributes:
        kind: as in HLO: ``all-reduce``, ``all-gather``, ...
        turns: how often each runs in one step, which is more than once in a loop.
        count: how many in one step.
        total_bytes: of all of them.
        time_ms: one after another, by the devices' rates; None if these are not known.
    """

    kind: Words
    axes: tuple[Words, ...]
    turns: Annotated[int, Field(strict=True, ge=1)] = 1
    count: Count
    total_bytes: Count
    time_ms: Time | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One block of a plan.

    Attributes:
        segment: index of its segment.
        name: the block's place in the user's model.
        op: its anchor, with its shape.
        strategy: role of each mesh axis that shards the anchor.
        source: ``file:line`` of the anchor, or "".
        moves: the collectives that follow, most bytes first.
        repeats: number of runs of the anchor in one step, above one in a loop.
        updates: True for a part of the optimizer's update without products.
    """

    block: Count
    segment: Count
    name: Words
    op: Words
    strategy: tuple[AxisRole, ...]
    source: Words
    moves: tuple[MoveFigure, ...]
    repeats: Annotated[int, Field(strict=True, ge=1)]
    updates: Flag = False


def type_text(aval: Any) -> str:
    """A leaf's type as text: ``float32[8,16]``."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def short_source(source: str) -> str:
    """Shortens ``file:line`` to the path's end: ``models/mlp.py:12``."""
    return "/".join(PurePath(source).parts[-2:]) if source else ""


def shape_of(kind: str) -> tuple[int, ...]:
    """The sizes in a type as text: ``float32[8,16]``."""
    return tuple(map(int, _NUMBER.findall(kind.partition("[")[2])))


def check_arguments(names: Sequence[str], types: Sequence[str], step: FlatStep) -> None:
    """Refuses a step whose argument leaves are not those of a plan.

    The arguments may have other names: paths inside them are compared.

    Raises:
        PlanMismatch: they differ; the first few differences are named.
    """
    own = [type_text(aval) for aval in step.avals]
    if own == [*types] and _may_be_renamed(names, step.arg_names):
        return
    found = dict(zip(step.arg_names, own, strict=True))
    planned = dict(zip(names, types, strict=True))
    both = [name for name in names if name in found]
    missing = [name for name in names if name not in found]
    new = [name for name in step.arg_names if name not in planned]
    lines = [
        f"  {name}: planned for {planned.get(name, 'nothing')}, "
        f"got {found.get(name, 'nothing')}"
        for name in (*both, *missing, *new)
        if found.get(name) != planned.get(name)
    ]
    more = ""
    if len(lines) > 5:
        more = f"\n  and {len(lines) - 5} more; of the plan's {len(planned)} arrays "
        more += f"{len(both)} {'is' if len(both) == 1 else 'are'} passed"
        more += f", and {len(new)} others" if new else ""
    raise PlanMismatch(
        "The arguments do not fit the plan:\n"
        + "\n".join(lines[:5])
        + f"{more}\nPass the arguments that were planned for, or plan again."
    )


def _may_be_renamed(names: Sequence[str], others: Sequence[str]) -> bool:
    """True if leaves are those of others, whose arguments may have other names.

    Arguments that have changed places are no renamed ones.
    """
    first, second = by_argument(names), by_argument(others)
    order = [*second]
    moved = any(n in order and order.index(n) != i for i, n in enumerate(first))
    return not moved and [*first.values()] == [*second.values()]


def by_argument(names: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    """Groups leaves by argument: for each its path in the argument, and position."""
    found: dict[str, list[tuple[str, int]]] = {}
    for place, name in enumerate(names):
        root, _, rest = name.partition("/")
        found.setdefault(root, []).append((rest, place))
    return found


# Options of `Plan.bind`; and what decides a plan, and nothing of one that is there.
BINDS = (
    "mesh",
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
)
_DECIDES = ("memory_budget", "pins", "preset", "cache_dir", "settings", "choose")


def check_binding(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses keywords that belong to planning, or to nothing.

    Args:
        fn: the step, which may have arguments of these names.

    Raises:
        OptionError: the step has no such argument.
    """
    for name, value in kwargs.items():
        try:
            check_keywords(fn, {name: value}, BINDS, "plan.bind")
        except OptionError as error:
            if name not in _DECIDES:
                raise
            raise OptionError(
                f"{name} decides how a step is planned, and this plan is made. "
                f"Leave {name} out; or cfp.plan(...) plans again."
            ) from error


def check_donated(planned: Sequence[bool], step: FlatStep) -> None:
    """Refuses a step that keeps an argument which the plan overwrites.

    A plan may donate less than the step: an argument needs a result that takes its
    place.

    Args:
        planned: for each argument leaf whether the plan overwrites it.
        step: with its donated arguments; none if not given.

    Raises:
        PlanMismatch: the step donates something, but not all that the plan overwrites.
    """
    if not any(step.donated):
        return
    roots = [name.partition("/")[0] for name in step.arg_names]
    asked = {root for root, one in zip(roots, step.donated, strict=True) if one}
    there = {root for root, one in zip(roots, planned, strict=True) if one}
    if there - asked:
        raise PlanMismatch(
            f"The plan donates {', '.join(sorted(there))}, and is asked to donate "
            f"{', '.join(sorted(asked))}. Leave out donate_argnums (--donate), "
            "since the plan knows, or plan again."
        )


def static_arguments(
    known: tuple[int | str, ...] | None, step: FlatStep | None, args: Sequence[Any]
) -> tuple[int | str, ...]:
    """Returns the static arguments, by position or name.

    Args:
        known: the static arguments in a plan, or None.
        step: the plan's step, or None.
        args: arguments of the step; without the others, those that are no arrays.
    """
    if known is not None:
        return known
    if step is not None:
        return tuple(key for key, _ in step.static)
    return tuple(i for i, arg in enumerate(args) if not _is_array_tree(arg))


def _is_array_tree(arg: Any) -> bool:
    kinds = (jax.Array, jax.ShapeDtypeStruct, int, float, complex, bool)
    return all(
        isinstance(leaf, kinds) or hasattr(leaf, "__array__")
        for leaf in tree_leaves(arg)
    )


def places_like(result: Any, names: Sequence[str], types: Sequence[str]) -> list[int]:
    """Finds the leaves of a plan's argument, or of several, for what looks like them.

    Args:
        result: shapes that look like an argument, or a tuple of such.
        names, types: the plan's arguments, leaf by leaf.

    Raises:
        PlanMismatch: it looks like none.
    """
    found = by_argument(names)
    arguments = {
        root: [(rest, types[place]) for rest, place in leaves]
        for root, leaves in found.items()
    }
    parts = result if isinstance(result, tuple | list) else ()
    for wanted in ([result], parts):
        left = dict(arguments)  # each argument stands for one part
        roots = [_take(left, part) for part in wanted if tree_leaves(part)]
        if roots and None not in roots:
            return [i for root in roots if root is not None for _, i in found[root]]
    leaves = _paths(result)
    raise PlanMismatch(
        "The initialisation's result does not look like any argument of the plan "
        f"({', '.join(arguments)}), nor like several in a tuple: it has {len(leaves)} "
        f"leaves, the first of them {leaves[:3]}."
    )


def _take(arguments: dict[str, list[tuple[str, str]]], part: Any) -> str | None:
    """Takes the first argument that has a part's leaves out of some."""
    leaves = _paths(part)
    for root, wanted in arguments.items():
        if wanted == leaves:
            del arguments[root]
            return root
    return None


def path_text(path: Any) -> str:
    """A leaf's path in an argument as plans have it."""
    return keystr(path, simple=True, separator="/")


def _paths(tree: Any) -> list[tuple[str, str]]:
    return [
        (path_text(path), type_text(leaf))
        for path, leaf in tree_flatten_with_path(tree)[0]
    ]


# --------------------------------------------------------------- places of constraints


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Values of one type at one line that are sharded alike.

    Attributes:
        source: ``file:line``, or "".
        type: of the values: ``float32[8,16]``.
        spec: for each dim the mesh axes that it is sharded over.
        count: how many values these are.
    """

    source: Words
    type: Annotated[Words, matching(_TYPE, "a type such as f32[8,16]")]
    spec: SpecField
    count: Count
