"""Writes the page of a plan, whole or small, from its templates.

`page_view` makes the view model; a template only places its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cfp.page.memory import KINDS, Moment, is_far, timeline, timeline_drawing
from cfp.page.svg import pareto, scatter_drawing, tensor_drawing
from cfp.plan.figures import (
    BlockFigures,
    KindFigures,
    MoveFigure,
    OptionFigures,
    TensorFigure,
)
from cfp.plan.parts import PlanRow
from cfp.plan.text import (
    Repeat,
    best_variants,
    collapse,
    merged_name,
    other_names,
    remarks,
    roles_text,
    span_text,
    storage_text,
    why_text,
    won_a_tie,
)
from cfp.plan.throughput import throughput, throughput_text
from cfp.plan.words import (
    elided,
    has_raced,
    known_how,
    rates_text,
    runner_up,
    scale_text,
    summary_line,
    surprise_text,
    tensor_text,
    too_large_text,
)
from cfp.printable import printable
from cfp.race.programs import RaceRow
from cfp.units import format_bytes

if TYPE_CHECKING:
    from cfp.plan.plan import Plan


_FOLDER = Path(__file__).parent


def page_html(plan: Plan) -> str:
    """A whole page that stands alone: its style is in it, and nothing else is read."""
    return _render("page.html.jinja", plan)


def small_html(plan: Plan) -> str:
    """The same, small: a part of a page, as notebooks show it."""
    return _render("small.html.jinja", plan)


def _render(template: str, plan: Plan) -> str:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        # Names in a plan are those of any program, or of any file.
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(view=page_view(plan), style=style)


def _without_controls(value: Any) -> Any:
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return printable(value) if is_text else value


_WORDS_WIDTH = 240
_RACE_TITLES = {
    ("measured", True): "Race, predicted against measured",
    ("measured", False): "Candidates, by prediction",
    ("estimated", True): "Race, predicted against measured",
    ("estimated", False): "Candidates, by estimate",
    ("one device", True): "Race, predicted against measured",
    ("one device", False): "Candidates, predicted on one device",
}
_COLOURS = 6  # as many as the style sheet has


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A tensor: its text with axes, and its drawing."""

    text: str
    drawing: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """A block of a run of segments that are alike."""

    name: str
    source: str
    op: str
    sharded: str
    collectives: str
    tensors: tuple[TensorView, ...]
    moves: tuple[MoveFigure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """Segments that are alike, shown once."""

    title: str
    count: int
    names: str
    storage: str
    segment_ms: float | None
    blocks: tuple[BlockView, ...]
    taken: OptionFigures | None
    runner_up: OptionFigures | None
    too_large: str
    surprise: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KindView:
    """A kind of segment with its strategies, the fastest first."""

    name: str
    rows: tuple[tuple[OptionFigures, bool], ...]  # with whether it is on the front
    drawing: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceView:
    """A candidate of the race; bars are shares of the longest, in percent."""

    row: RaceRow
    won: bool
    predicted_bar: float
    measured_bar: float
    same: str  # names under which the same program raced


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """The memory timeline and its peak by kind."""

    drawing: Markup
    peak: Moment
    legend: tuple[tuple[str, int], ...]
    budget_bytes: int | None
    budget_far: bool
    compiled_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """Everything on the page."""

    title: str
    mesh: str
    device: str
    why: str
    plan: Plan
    axes: tuple[tuple[str, int, str], ...]
    segments: tuple[SegmentView, ...]
    moves: tuple[tuple[str, str, int, int, float | None], ...]
    memory: MemoryView | None
    kinds: tuple[KindView, ...]
    race: tuple[RaceView, ...]
    ran: bool
    tie: bool
    race_title: str
    rates: str
    throughput: str
    off: float | None
    scale: str
    remarks: tuple[str, ...]
    costs: tuple[tuple[str, float, float], ...]
    counts: str
    how: str
    arguments: tuple[tuple[str, str, str, bool], ...]


def page_view(plan: Plan) -> PageView:
    """Works out what the page of a plan shows."""
    sizes = dict(plan.mesh_axes)
    colours = {name: f"a{i % _COLOURS}" for i, name in enumerate(sizes)}
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh_axes)
    device = plan.environment.get("device_kind", "")
    draw = _Drawer(sizes, colours)
    return PageView(
        title=f"Plan {plan.winner!r} for a mesh {mesh}",
        mesh=mesh,
        device=device,
        why=why_text(plan),
        plan=plan,
        axes=tuple((name, size, colours[name]) for name, size in plan.mesh_axes),
        segments=tuple(
            view for r in collapse(plan) for view in _segments(plan, r, draw)
        ),
        moves=_all_moves(plan),
        memory=_memory(plan),
        kinds=_kinds(plan),
        race=_race(plan),
        ran=has_raced(plan),
        tie=won_a_tie(plan),
        race_title=_RACE_TITLES[plan.rung, has_raced(plan)],
        rates=rates_text(plan),
        throughput=throughput_text(rates) if (rates := throughput(plan)) else "",
        off=_off(plan),
        scale=scale_text(plan.search, plan.measured_ms),
        remarks=tuple(remark[0].upper() + remark[1:] for remark in remarks(plan)),
        costs=_costs(plan),
        counts=_counts(plan),
        how=known_how(plan),
        arguments=tuple(
            (
                name,
                tensor_text(TensorFigure(type=kind, spec=spec)),
                ", ".join(sorted({axis for names in spec for axis in names})),
                donated,
            )
            for name, kind, spec, donated in zip(
                plan.arg_names,
                plan.arg_types,
                plan.arg_specs,
                plan.donated,
                strict=True,
            )
        ),
    )


@dataclass(frozen=True)
class _Drawer:
    """Draws tensors; those that are alike once."""

    sizes: Mapping[str, int]
    colours: Mapping[str, str]

    def __call__(self, tensor: TensorFigure) -> TensorView:
        return TensorView(
            text=tensor_text(tensor),
            drawing=tensor_drawing(tensor, self.sizes, self.colours),
        )


# ---------------------------------------------------------------------------- segments


def _segments(plan: Plan, repeat: Repeat, draw: _Drawer) -> list[SegmentView]:
    first = repeat.rows[0]
    found = {b.block: b for b in plan.figures.blocks} if plan.figures else {}
    views = []
    for segment in dict.fromkeys(row.segment for row in first):
        members = [segment + i * repeat.period for i in range(repeat.count)]
        twins = [
            [part[place] for part in repeat.rows]
            for place, row in enumerate(first)
            if row.segment == segment
        ]
        views.append(_segment(plan, members, twins, found, draw))
    return views


def _segment(
    plan: Plan,
    members: list[int],
    twins: list[list[PlanRow]],
    found: Mapping[int, BlockFigures],
    draw: _Drawer,
) -> SegmentView:
    segment, figures = plan.segments[members[0]], plan.figures
    taken = figures.taken(members[0]) if figures else None
    runner, large, surprise = None, "", ""
    if figures and taken:
        options = figures.kinds[figures.segment_kinds[members[0]]].options
        if len(options) > 1:
            runner = runner_up(options, taken, figures.budget_bytes)
            large = too_large_text(runner, figures.budget_bytes)
            surprise = surprise_text(taken, runner, has_raced(plan))
    ends = [merged_name([twin.name for twin in twins[i]]) for i in (0, -1)]
    return SegmentView(
        title=f"Segment{'s' if len(members) > 1 else ''} {span_text(members)}",
        count=len(members),
        names=" to ".join(dict.fromkeys(ends)),
        storage=storage_text(segment),
        segment_ms=segment.time_ms,
        blocks=tuple(_block(column, found, draw) for column in twins),
        taken=taken,
        runner_up=runner,
        too_large=large,
        surprise=surprise,
    )


def _block(
    column: Sequence[PlanRow], found: Mapping[int, BlockFigures], draw: _Drawer
) -> BlockView:
    row = column[len(column) // 2]
    figures = found.get(row.block)
    tensors = (*figures.operands, figures.result) if figures else ()
    return BlockView(
        name=merged_name([twin.name for twin in column]),
        source=figures.source if figures else "",
        op=row.op.partition(" ")[0],
        sharded=roles_text(row.strategy),
        collectives=row.collectives,
        tensors=tuple(map(draw, tensors)),
        moves=figures.moves if figures else (),
    )


def _sum_ms(moves: Sequence[MoveFigure]) -> float | None:
    times = [move.time_ms for move in moves if move.time_ms is not None]
    return sum(times) if len(times) == len(moves) else None


def _all_moves(plan: Plan) -> tuple[tuple[str, str, int, int, float | None], ...]:
    """(kind, axes, count, bytes, ms) of all blocks together, most bytes first."""
    groups: dict[tuple[str, str], list[MoveFigure]] = {}
    for block in plan.figures.blocks if plan.figures else ():
        for move in block.moves:
            groups.setdefault((move.kind, ", ".join(move.axes)), []).append(move)
    rows = [
        (
            kind,
            axes,
            sum(move.count for move in moves),
            sum(move.total_bytes for move in moves),
            _sum_ms(moves),
        )
        for (kind, axes), moves in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row[3]))


# ------------------------------------------------------------------ memory, strategies


def _memory(plan: Plan) -> MemoryView | None:
    moments = timeline(plan.figures) if plan.figures else []
    if not moments or plan.figures is None:
        return None
    peak = max(moments, key=lambda moment: moment.total_bytes)
    budget = plan.figures.budget_bytes
    return MemoryView(
        drawing=timeline_drawing(moments, budget, plan.peak_bytes),
        peak=peak,
        legend=tuple(zip(KINDS, peak.parts, strict=True)),
        budget_bytes=budget,
        budget_far=budget is not None and is_far(moments, budget),
        compiled_bytes=plan.peak_bytes,
    )


def _kinds(plan: Plan) -> tuple[KindView, ...]:
    figures = plan.figures
    if figures is None:
        return ()
    return tuple(
        _kind(kind, figures.budget_bytes) for kind in figures.kinds if kind.options
    )


def _kind(kind: KindFigures, budget_bytes: int | None) -> KindView:
    front = pareto(kind.options)
    ranked = sorted(kind.options, key=lambda option: option.step_ms)
    return KindView(
        name=kind.name,
        rows=tuple((option, option in front) for option in ranked),
        drawing=scatter_drawing(kind.options, budget_bytes),
    )


# ------------------------------------------------------------------------ race, costs


def _race(plan: Plan) -> tuple[RaceView, ...]:
    rows = best_variants(plan)
    times = [t for row in rows for t in (row.predicted_ms, row.time_ms) if t]
    longest = max(times, default=1.0)
    return tuple(
        RaceView(
            row=row,
            won=row.name == plan.winner,
            same=", ".join(other_names(plan, row)),
            predicted_bar=100 * (row.predicted_ms or 0.0) / longest,
            measured_bar=100 * (row.time_ms or 0.0) / longest,
        )
        for row in rows
    )


def _off(plan: Plan) -> float | None:
    """By which share of the measured time the prediction was off."""
    if not plan.measured_ms or plan.predicted_ms is None:
        return None
    return plan.predicted_ms / plan.measured_ms - 1.0


def _costs(plan: Plan) -> tuple[tuple[str, float, float], ...]:
    """(pass, seconds, percent of the longest)."""
    seconds = {
        "in all" if name == "planning_seconds" else name.removesuffix("_seconds"): value
        for name, value in plan.search.items()
        if name.endswith("_seconds")
    }
    longest = max(seconds.values(), default=0.0) or 1.0
    return tuple((name, s, 100 * s / longest) for name, s in seconds.items())


def _counts(plan: Plan) -> str:
    if "strategies_estimated" in plan.search:
        return f"{plan.search['strategies_estimated']:.0f} strategies estimated"
    if "strategies_measured" in plan.search:
        return summary_line(plan).partition(";")[0]
    return ""


def format_ms(value: float | None) -> str:
    """Milliseconds with three digits, or a dash."""
    return "-" if value is None else f"{value:.3f} ms"


def short(text: str) -> str:
    """A text without its middle if it is very long, as names of 300 letters make it."""
    return elided(text, _WORDS_WIDTH)


FILTERS = {"ms": format_ms, "bytes": format_bytes, "short": short}
