"""The figures that a plan was chosen by, as plain data: what a report draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from cfp.analysis.strategies import Spec
from cfp.printable import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFigure:
    """A tensor that a block's anchor reads or makes.

    Attributes:
        type: element type and dims of the whole tensor: ``f32[8,16]``.
        spec: for each dim the mesh axes that it is sharded over.
    """

    type: str
    spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFigure:
    """The collectives of one kind over the same axes that follow a block.

    Attributes:
        kind: as in HLO: ``all-reduce``, ``all-gather``, ...
        axes: of the mesh.
        count: how many in one step.
        total_bytes: of the groups' whole tensors, all together.
        time_ms: one after another, by measured rates; None if there are none.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    total_bytes: int
    time_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFigures:
    """Numbers about one block of a plan.

    Attributes:
        block: index of the block.
        source: ``file:line`` of its anchor, or "".
        operands: the tensors that the anchor reads, two at most.
        result: the tensor that the anchor makes.
        moves: the collectives that follow.
    """

    block: int
    source: str
    operands: tuple[TensorFigure, ...]
    result: TensorFigure
    moves: tuple[MoveFigure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFigures:
    """A strategy of a kind of segment, as it was measured.

    Attributes:
        name: of the preset whose part it is, or a number: ``#7``.
        words: what it shards.
        segment_ms: measured time of one segment.
        state_bytes: parameters and optimizer state of one segment, on each device;
            twice what is not donated.
        residual_bytes: values that one segment keeps from forward to backward.
        temp_bytes: the most that it needs besides, while it runs.
        step_ms: predicted time of the step if all segments of the kind took it and
            all others stayed as they are.
        memory_bytes: predicted memory on each device then.
        taken: how many segments take it.
    """

    name: str
    words: str
    segment_ms: float
    state_bytes: int
    residual_bytes: int
    temp_bytes: int
    step_ms: float
    memory_bytes: int
    taken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFigures:
    """A kind of segment and the strategies that were measured for it.

    Attributes:
        kind: the kind.
        name: which segments are of it.
        options: its strategies.
    """

    kind: int
    name: str
    options: tuple[OptionFigures, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftFigures:
    """Attentions or cross-entropies that stay as written, though others may be.

    Attributes:
        source: where they are from.
        reason: why they are as they are written.
        count: how many.
        name: "attention" or "cross-entropy".
    """

    source: str
    reason: str
    count: int
    name: str = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedFigures:
    """A kernel that was asked for and cannot compute some attentions.

    Attributes:
        kernel: which.
        source: where the attentions are from.
        reason: why it cannot.
        count: how many.
    """

    kernel: str
    source: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFigures:
    """A mesh, or a number of microbatches, that the plan was chosen among.

    Attributes:
        name: such as ``x=2,y=4``.
        step_ms: of its best plan, or None.
        estimated_ms: of its best plan by estimates, or None.
        memory_bytes: of its best plan on each device, or None.
        note: why it has no plan, or "".
        taken: whether it is the plan's.
    """

    name: str
    step_ms: float | None
    estimated_ms: float | None
    memory_bytes: int | None
    note: str
    taken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorthFigures:
    """Gain of one kind of choice in a plan.

    Attributes:
        name: of what is chosen: "kernels", "storage", ...
        with_ms: the best step with all there is to choose from.
        without_ms: the best step without this; None if nothing fits in memory then.
        is_measured: whether both are measured; otherwise they are predicted.
    """

    name: str
    with_ms: float
    without_ms: float | None
    is_measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a plan.

    Attributes:
        blocks: in the order of the plan's rows.
        kinds: by number; none where nothing was searched.
        segment_kinds: for each segment its kind.
        picks: for each segment the option that the plan takes; empty if part of the
            plan was not measured.
        reshard_ms: for each segment but the last what resharding to the next takes,
            in the same order as `picks`.
        fixed_bytes: memory that every choice needs.
        budget_bytes: memory of one device that the plan may use, or None.
        left: attentions and cross-entropies that are as they are written.
        refused: kernels that cannot compute attentions, of those that were preferred
            to what does.
        variants: meshes and microbatches that the plan was chosen among.
        worth: what each kind of choice is worth.
        chosen: what was chosen among, by the names of `choose`; empty for all.
    """

    blocks: tuple[BlockFigures, ...] = ()
    kinds: tuple[KindFigures, ...] = ()
    segment_kinds: tuple[int, ...] = ()
    picks: tuple[int, ...] = ()
    reshard_ms: tuple[float, ...] = ()
    fixed_bytes: int = 0
    budget_bytes: int | None = None
    left: tuple[LeftFigures, ...] = ()
    refused: tuple[RefusedFigures, ...] = ()
    variants: tuple[VariantFigures, ...] = ()
    worth: tuple[WorthFigures, ...] = ()
    chosen: tuple[str, ...] = ()

    def taken(self, segment: int) -> OptionFigures | None:
        """The option that the plan takes for a segment, if that was measured."""
        if not self.picks:
            return None
        return self.kinds[self.segment_kinds[segment]].options[self.picks[segment]]


def figures_to_json(figures: Figures) -> dict[str, Any]:
    """Figures as plain data; a tensor is its type and its sharding."""
    data = asdict(figures)
    # Repeated layers have the same tensors and collectives: each is written once.
    shapes: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    for block in data["blocks"]:
        shape = {key: block.pop(key) for key in ("operands", "result", "moves")}
        place = places.setdefault(repr(shape), len(shapes))
        if place == len(shapes):
            shapes.append(shape)
        block["drawn"] = place
    data["drawn"] = shapes
    return data


def figures_from_json(data: Mapping[str, Any]) -> Figures:
    """Figures from parsed JSON.

    Raises:
        KeyError, TypeError, ValueError, IndexError: the data are damaged.
    """
    drawn = [
        {
            "operands": tuple(_tensor(t) for t in shape["operands"]),
            "result": _tensor(shape["result"]),
            "moves": tuple(_move(move) for move in shape["moves"]),
        }
        for shape in data["drawn"]
    ]
    kinds = tuple(
        KindFigures(
            kind=_count(kind["kind"]),
            name=_words(kind["name"]),
            options=tuple(_option(option) for option in kind["options"]),
        )
        for kind in data["kinds"]
    )
    segment_kinds = tuple(map(_count, data["segment_kinds"]))
    if any(kind >= len(kinds) for kind in segment_kinds) and kinds:
        raise ValueError(f"there are {len(kinds)} kinds of segments")
    picks = tuple(map(_count, data["picks"]))
    if picks and len(picks) != len(segment_kinds):
        raise ValueError(f"{len(picks)} picks for {len(segment_kinds)} segments")
    for kind, pick in zip(segment_kinds, picks, strict=False):
        if kind >= len(kinds) or pick >= len(kinds[kind].options):
            raise ValueError(f"there is no option {pick} of kind {kind}")
    budget = data["budget_bytes"]
    return Figures(
        blocks=tuple(
            BlockFigures(
                block=_count(block["block"]),
                source=_words(block["source"]),
                **drawn[_count(block["drawn"])],
            )
            for block in data["blocks"]
        ),
        kinds=kinds,
        segment_kinds=segment_kinds,
        picks=picks,
        reshard_ms=tuple(map(_milliseconds, data["reshard_ms"])),
        fixed_bytes=_count(data["fixed_bytes"]),
        budget_bytes=None if budget is None else _count(budget),
        left=tuple(
            LeftFigures(
                source=_words(one["source"]),
                reason=_words(one["reason"]),
                count=_count(one["count"]),
                name=_words(one.get("name", "attention")),
            )
            for one in data.get("left", ())
        ),
        refused=tuple(
            RefusedFigures(
                kernel=_words(one["kernel"]),
                source=_words(one["source"]),
                reason=_words(one["reason"]),
                count=_count(one["count"]),
            )
            for one in data.get("refused", ())
        ),
        variants=tuple(map(_variant, data.get("variants", ()))),
        worth=tuple(
            WorthFigures(
                name=_words(one["name"]),
                with_ms=_milliseconds(one["with_ms"]),
                without_ms=_or_none(_milliseconds, one["without_ms"]),
                is_measured=one["is_measured"] is True,
            )
            for one in data.get("worth", ())
        ),
        chosen=tuple(map(_words, data.get("chosen", ()))),
    )


def _variant(data: Mapping[str, Any]) -> VariantFigures:
    return VariantFigures(
        name=_words(data["name"]),
        step_ms=_or_none(_milliseconds, data["step_ms"]),
        estimated_ms=_or_none(_milliseconds, data["estimated_ms"]),
        memory_bytes=_or_none(_count, data["memory_bytes"]),
        note=_words(data["note"]),
        taken=data["taken"] is True,
    )


def _or_none(read: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else read(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a number from 0, got {value!r}")
    return value


def _milliseconds(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not isfinite(value) or value < 0:
        raise ValueError(f"expected milliseconds, got {value!r}")
    return float(value)


def _words(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return printable(value)


def _tensor(data: Mapping[str, Any]) -> TensorFigure:
    return TensorFigure(type=_words(data["type"]), spec=_spec(data["spec"]))


def _spec(data: Sequence[Sequence[str]]) -> Spec:
    return tuple(tuple(_words(name) for name in names) for names in data)


def _move(data: Mapping[str, Any]) -> MoveFigure:
    time_ms = data["time_ms"]
    return MoveFigure(
        kind=_words(data["kind"]),
        axes=tuple(map(_words, data["axes"])),
        count=_count(data["count"]),
        total_bytes=_count(data["total_bytes"]),
        time_ms=None if time_ms is None else _milliseconds(time_ms),
    )


def _option(data: Mapping[str, Any]) -> OptionFigures:
    return OptionFigures(
        name=_words(data["name"]),
        words=_words(data["words"]),
        **{name: _milliseconds(data[name]) for name in ("segment_ms", "step_ms")},
        **{
            name: _count(data[name])
            for name in (
                "state_bytes",
                "residual_bytes",
                "temp_bytes",
                "memory_bytes",
                "taken",
            )
        },
    )
