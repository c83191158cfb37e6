"""Records that a plan consists of, and checks of a step against a plan.

A segment is a run of blocks; a block is an anchor op and the ops sharded with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Annotated, Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves
from pydantic import Field

from cfp.analysis.layout import SegmentKernels, Storage
from cfp.errors import OptionError, PlanMismatch
from cfp.printable import Count, Flag, Name, Time, Words, few, matching
from cfp.printable import Spec as SpecField
from cfp.program.calling import check_keywords
from cfp.program.step import FlatStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeBlocks:
    """Blocks of a segment that share a strategy.

    Attributes:
        names: the blocks' paths, shortened to their distinct ends.
        strategy: role of each mesh axis that shards these blocks.
    """

    names: tuple[Words, ...]
    strategy: tuple[AxisRole, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFigures:
    """A strategy of a kind of segment.

    Attributes:
        blocks: blocks by strategy, in the order of the first block of each.
        storage: storage of the segment's parameters; None without parameters.
        kernels: kernels that compute parts of the segment.
        rematerialized: True if the segment's forward pass is rematerialized.
    """

    blocks: tuple[AlikeBlocks, ...]
    storage: Storage | None
    kernels: SegmentKernels
    rematerialized: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFigures:
    """A measured or estimated strategy of a kind of segment; bytes are per device.

    Attributes:
        name: a preset with its shardings and storage, else ``strategy 7 (no preset)``;
            kernels and rematerialization follow in parentheses.
        segment_ms: time that one segment adds to a step.
        state_bytes: one segment's parameters and optimizer state, twice if undonated.
        residual_bytes: values that one segment keeps from forward to backward.
        temp_bytes: largest further memory while the segment runs.
        step_ms: predicted step time if all segments of the kind use this strategy, and
            others the plan's (their fastest if `Figures.picks` is empty).
        memory_bytes: predicted memory of the same step.
        taken: number of segments that use this strategy in the plan.
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
    """A kind of segment, and its measured or estimated strategies.

    Attributes:
        name: title of the kind: ``Segments 1-4: layer_0-3/up to layer_0-3/down``.
    """

    name: Words
    options: tuple[OptionFigures, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftFigures:
    """Parts of a step that no kernel computes, or that a preferred kernel cannot.

    Attributes:
        kind: kind of kernels, such as "attention".
        source: source line of the parts.
        reason: why `kernel` (if "", every kernel) does not compute these parts.
        count: number of the parts.
        kernel: a kernel that cannot compute them; "" if the parts stay as written.
    """

    kind: Words
    source: Words
    reason: Words
    count: Count
    kernel: Words = ""


# Note of a variant that there was no time to plan.
UNPLANNED = "not planned: time was over"
# An entry of `Plan.search`: seconds for all variants, with estimates and last race.
VARIANTS_SECONDS = "seconds_of_all_variants"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFigures:
    """A compared variant of the step, such as a mesh with a number of microbatches.

    Attributes:
        name: such as ``x=2,y=4``.
        step_ms: step time of its plan, predicted if no variant was measured; or None.
        estimated_ms: estimated step time of its best choice; None if planning failed.
        note: why the variant has no plan or no time, or "".
        taken: True for the plan's own variant.
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
        with_ms: time of the best step with all kinds of choices.
        without_ms: the same without this kind; None if no step without it fits.
        is_measured: True if both times are measured, False if predicted.
    """

    name: Words
    with_ms: Time
    without_ms: Time | None
    is_measured: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Numbers behind a plan's choice, which reports show.

    Attributes:
        kinds: kinds of segments by number; empty without timed or estimated strategies.
        segment_kinds: for each segment, the number of its kind.
        picks: for each segment, the number of the plan's option of its kind; empty if
            the options lack a segment's choice.
        fixed_bytes: bytes per device of arguments and results that are not state.
        budget_bytes: memory of one device that the plan may use, or None.
        left: parts that no kernel computes, or that a preferred kernel cannot compute.
        kernels: sharded custom_partitioning ops of the step, with their axes.
        variants: compared meshes and microbatches.
        variants_raced: True if plans of several variants raced against each other.
        worth: gain of each kind of choice that some candidates use.
        chosen: kinds of choices that the search could make, by the names of `choose`.
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
            raise ValueError(f"numbers of segment kinds below {len(kinds)}")
        if picks and len(picks) != len(kind_of):
            raise ValueError(f"picks for {len(kind_of)} segments, not for {len(picks)}")
        for kind, pick in zip(kind_of, picks, strict=False):
            known = len(kinds[kind].options) if kinds else 0
            if pick >= known:
                raise ValueError(f"picks below {known} for kind {kind}, not {pick}")


# A reason why a kernel with a sharding rule is whole on every device.
NOT_CHOSEN = "the plan does not shard it"

_NUMBER = re.compile(r"\d+")
# Longer numbers than Python reads are damaged.
_TYPE = r"[^\[]*\[(\d{1,15}(,\d{1,15})*)?\]"


class Role(StrEnum):
    """Kinds of an anchor's factors (named loop indices) that a mesh axis may shard."""

    BATCH = "batch"
    ROWS = "rows"
    COLUMNS = "columns"
    CONTRACTED = "contracted"
    DIM = "dim"  # of another op, or of both operands and not the batch's


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """A factor (loop index) of a block's anchor that one mesh axis shards.

    Comparison ignores `role` and `size`: roles for other batch sizes may be equal.

    Attributes:
        factor: number of the factor in the anchor's sharding rule.
        dim: dim of the anchor's result with this factor; -1 for none.
        scattered_dim: dim of the result to which a contraction's sum is scattered, or
            for which a lookup exchanges columns; None for none.
        size: size of the factor.
    """

    axis: Name
    role: Role = field(compare=False)
    factor: Count
    dim: Annotated[int, Field(strict=True, ge=-1)]
    scattered_dim: Count | None
    size: Annotated[Count, Field(ge=1)] = field(compare=False)


class Detail(Enum):
    """Detail of a text about axes; each value is an example."""

    ROLES = "x: rows"
    DIMS = "x: rows (dim 0)"
    SIZES = "x: rows (dim 0, size 8)"


def roles_text(roles: Sequence[AxisRole], detail: Detail = Detail.SIZES) -> str:
    """Describes the roles of axes in a block: ``x: rows (dim 0, size 8)``.

    Axes are joined by "; ". `Role.DIM` gives ``x: dim 0, size 8``, or ``x: dim 0`` with
    `Detail.DIMS`. A `scattered_dim` is added. Without roles the text is "replicated".
    """
    parts = []
    for one in roles:
        where = [] if one.role is Role.CONTRACTED else [f"dim {one.dim}"]
        where += [f"size {one.size}"] if detail is not Detail.DIMS else []
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
    """Storage of a parameter and its optimizer state.

    Attributes:
        argument: position of the parameter among the argument leaves.
    """

    argument: Count
    storage: Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSegment:
    """The choice for one segment of a plan, apart from its blocks' strategies.

    Attributes:
        kind: number of the kind; segments of one kind have the same options.
        parameters: the segment's parameters, each with its storage.
        rematerialized: True if the segment's forward pass is rematerialized.
        kernels: kernels that compute parts of the segment.
        time_ms: measured or estimated time; None if unknown.
    """

    kind: Count
    parameters: tuple[StoredParameter, ...]
    rematerialized: Flag
    kernels: SegmentKernels
    time_ms: Time | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFigure:
    """Collectives of one kind, axes and `turns`, of a block's ops and updates.

    Attributes:
        kind: HLO name: ``all-reduce``, ``all-gather``, ...
        turns: runs of each collective in one step, several in a loop.
        count: runs of all of these collectives in one step.
        total_bytes: bytes of all these runs, each of its group's whole tensor.
        time_ms: time of all runs one after another, by the devices' rates; None if the
            rates are unknown.
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
        segment: index of the block's segment.
        name: the block's path in the user's model.
        op: kind and shapes of the block's anchor.
        strategy: role of each mesh axis that shards the anchor.
        source: line of the anchor, ``model.py:12``, or "".
        arguments: names of the arguments that the block's ops read.
        moves: expected collectives of the block's ops and updates, most bytes first.
        repeats: number of runs of the anchor in one step, above one in a loop.
        updates: True for a block of the optimizer's update without a product, and on
            which no product depends.
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
    arguments: tuple[Words, ...] = ()


def type_text(aval: Any) -> str:
    """Writes a leaf's type: ``float32[8,16]``."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def shape_of(kind: str) -> tuple[int, ...]:
    """Reads the shape of a type's text: (8, 16) of ``float32[8,16]``."""
    return tuple(map(int, _NUMBER.findall(kind.partition("[")[2])))


def check_arguments(names: Sequence[str], types: Sequence[str], step: FlatStep) -> None:
    """Checks that a step has a plan's argument leaves.

    Types and paths inside of arguments must be equal; arguments may be renamed.

    Raises:
        PlanMismatch: leaves or the order of arguments differ.
    """
    own = [type_text(aval) for aval in step.avals]
    if own == [*types] and _may_be_renamed(names, step.arg_names):
        return
    if sorted(_arguments(names, types)) == sorted(_arguments(step.arg_names, own)):
        raise PlanMismatch(
            "The arguments seem to be in another order than the plan's. Pass them in "
            f"the order {', '.join(by_argument(names))}."
        )
    names = step.arg_names if _may_be_renamed(names, step.arg_names) else names
    found = dict(zip(step.arg_names, own, strict=True))
    planned = dict(zip(names, types, strict=True))
    both = [name for name in names if name in found]
    new = [name for name in step.arg_names if name not in planned]
    differ = {
        name: (planned.get(name, ""), found.get(name, ""))
        for name in (*both, *planned, *new)
        if found.get(name) != planned.get(name)
    }
    lines = [
        f"  {name}: {f'planned for {a}' if a else 'not in the plan'}, "
        f"{f'got {b}' if b else 'not passed'}"
        for name, (a, b) in differ.items()
    ]
    if (more := len(lines) - 5) > 0:
        passed = f"; passed: {len(both)} of the plan's {len(planned)} arrays"
        passed += f", and {len(new)} others" * bool(new)
        lines[5:] = [f"  and {more} more{passed * (planned.keys() != found.keys())}"]
    is_batch = all(
        (b := shape_of(got))
        and (*b[:1], *shape_of(want)[1:]) == b < shape_of(want)
        # A type is its dtype, then its shape.
        and want.partition("[")[0] == got.partition("[")[0]
        for want, got in differ.values()
    )
    batch = " (pad or drop a smaller last batch)" * is_batch
    remedy = f"Pass the planned arguments{batch}, or plan again."
    roots, now = by_argument(names), by_argument(step.arg_names)
    if roots.keys() != now.keys():
        name = getattr(step.fn, "__name__", "this step")
        remedy = "The plan may be for another step, with the arguments "
        remedy += f"{', '.join(roots)}; {name} has {', '.join(now)}. Apply the plan to "
        remedy += "its own step, or plan again."
    lines = ["The arguments do not fit the plan:", *lines, remedy]
    raise PlanMismatch("\n".join(lines))


def _arguments(names: Sequence[str], types: Sequence[str]) -> list[list[Any]]:
    every = by_argument(names).values()
    return [[(path, types[place]) for path, place in leaves] for leaves in every]


def _may_be_renamed(names: Sequence[str], others: Sequence[str]) -> bool:
    """True if paths differ at most in arguments' names, and no name has moved."""
    first, second = by_argument(names), by_argument(others)
    order = [*second]
    moved = any(n in order and order.index(n) != i for i, n in enumerate(first))
    return not moved and [*first.values()] == [*second.values()]


def by_argument(names: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    """Maps each argument's name to (path in it, position among all) of its leaves."""
    found: dict[str, list[tuple[str, int]]] = {}
    for place, name in enumerate(names):
        root, _, rest = name.partition("/")
        found.setdefault(root, []).append((rest, place))
    return found


# Options of `Plan.bind`, and options of planning, which a finished plan refuses.
BINDS = (
    "mesh",
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
)
_DECIDES = ("memory_budget", "pins", "preset", "cache_dir", "settings", "choose")


def check_binding(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Checks keyword arguments that `Plan.bind` passes to the step.

    Raises:
        OptionError: the step takes no such argument.
    """
    for name, value in kwargs.items():
        try:
            check_keywords(fn, {name: value}, BINDS, "plan.bind")
        except OptionError as error:
            if name not in _DECIDES:
                raise
            raise OptionError(
                f"{name} is an option of planning, and this plan is finished. "
                f"Leave {name} out, or plan again with cfp.plan(...)."
            ) from error


def check_donated(planned: Sequence[bool], step: FlatStep) -> None:
    """Checks that a step donates all arguments that its plan overwrites.

    A step that donates nothing passes. A plan may donate less than the step, since an
    argument is donated only to a result of its type.

    Args:
        planned: for each argument leaf, True if the plan overwrites it.

    Raises:
        PlanMismatch: the step donates some arguments, but not all of the plan's.
    """
    if not any(step.donated):
        return
    roots = [name.partition("/")[0] for name in step.arg_names]
    asked = {root for root, one in zip(roots, step.donated, strict=True) if one}
    there = {root for root, one in zip(roots, planned, strict=True) if one}
    if there - asked:
        raise PlanMismatch(
            f"The plan donates {', '.join(sorted(there))}, and donate_argnums "
            f"(--donate) names {', '.join(sorted(asked))}. Leave out donate_argnums to "
            "donate as planned, or plan again."
        )


def static_arguments(
    known: tuple[int | str, ...] | None, step: FlatStep | None, args: Sequence[Any]
) -> tuple[int | str, ...]:
    """Returns the static arguments of a plan's step, by position or name.

    Args:
        known: static arguments in the plan's file, or None.
        step: the step bound to the plan, or None.
        args: positional arguments of a call. Without `known` and `step`, positions of
            arguments with a leaf that is neither array nor number are returned.
    """
    if known is not None:
        return known
    if step is not None:
        return tuple(key for key, _ in step.static)
    kinds = (jax.Array, jax.ShapeDtypeStruct, int, float, complex)
    leaves = ((i, leaf) for i, arg in enumerate(args) for leaf in tree_leaves(arg))
    found = ((i, isinstance(x, kinds) or hasattr(x, "__array__")) for i, x in leaves)
    return tuple(dict.fromkeys(i for i, is_array in found if not is_array))


def places_like(result: Any, names: Sequence[str], types: Sequence[str]) -> list[int]:
    """Matches a result's leaves with those of a plan's argument, or of several.

    Args:
        result: shapes with an argument's paths and types, or a tuple of several such.
        names, types: paths and types of the plan's argument leaves.

    Returns:
        Positions of the argument leaves, one for each leaf of the result.

    Raises:
        PlanMismatch: the result, or a part of a tuple, has no argument's leaves.
    """
    found = by_argument(names)
    arguments = dict(zip(found, _arguments(names, types), strict=True))
    parts = result if isinstance(result, tuple | list) else ()
    for wanted in ([result], parts):
        leaves = [_paths(part) for part in wanted if tree_leaves(part)]
        roots = list[str]()
        for own in leaves:  # Each argument stands for one part.
            alike = (root for root, of in arguments.items() if of == own)
            roots += [root for root in alike if root not in roots][:1]
        if leaves and len(roots) == len(leaves):
            return [i for root in roots for _, i in found[root]]
    raise PlanMismatch(
        f"The initialisation's result, {leaves_text(result)}, matches no argument of "
        "the plan in paths, shapes and types. Return one of the step's arguments, or a "
        f"tuple of several: {', '.join(arguments)}."
    )


def path_text(path: Any) -> str:
    """Writes a leaf's path in an argument: ``params/0/kernel``."""
    return keystr(path, simple=True, separator="/")


def leaves_text(tree: Any) -> str:
    """Writes paths and types of a pytree's first leaves: ``a int32[8]; b int32[]``."""
    return few([" ".join(leaf).strip() for leaf in _paths(tree)], "; ") or "no leaves"


def _paths(tree: Any) -> list[tuple[str, str]]:
    leaves = tree_flatten_with_path(tree)[0]
    return [(path_text(path), type_text(leaf)) for path, leaf in leaves]


# --------------------------------------------------------------- places of constraints


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Values or operands of one source line, type and sharding that a plan constrains.

    Attributes:
        source: ``model.py:12``, or "".
        type: the values' type: ``float32[8,16]``.
        spec: for each dim, the mesh axes that shard it.
        count: number of the values and operands.
    """

    source: Words
    type: Annotated[Words, matching(_TYPE, "a type such as float32[8,16]")]
    spec: SpecField
    count: Count
