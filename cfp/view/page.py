"""Renders a plan as a page of HTML, whole or small, from its templates.

The templates place the values of the plan's view; only drawings, and what stands on no
other view of a plan, are made here.

Drawings are SVG: memory over a step, strategies as points, and sharded tensors.
Every text and every attribute is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import floor, log10, prod
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from cfp.plan.figures import Figures, OptionFigures
from cfp.plan.parts import TensorFigure
from cfp.plan.plan import Plan
from cfp.printable import counted, one_line
from cfp.units import format_bytes
from cfp.view import words
from cfp.view.model import strategy_text, view_of
from cfp.view.words import STRATEGIES, tensor_text

Point = tuple[float, float]


def element(tag: str, *content: str | Markup, **attributes: object) -> Markup:
    """One element.

    Args:
        content: texts, which are escaped, and elements, which are not again.
        attributes: by name; ``_`` stands for ``-``, and is left out at the end, as in
            ``class_``. None leaves one out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    inside = "".join(str(escape(part)) for part in content)
    return Markup(f"<{tag}{written}>{inside}</{tag}>")


def drawing(
    width: float, height: float, label: str, parts: Iterable[Markup], class_: str = ""
) -> Markup:
    """A whole drawing, which scales with the space that there is.

    Args:
        width, height: in the drawing's own units.
        class_: for its style.
    """
    return element(
        "svg",
        element("title", label),
        *parts,
        viewBox=f"0 0 {_text(width)} {_text(height)}",
        role="img",
        class_=class_ or None,
    )


def path(points: Sequence[Point], *, closed: bool = False) -> str:
    """The ``d`` of a path through some points."""
    start, *rest = (f"{_text(x)} {_text(y)}" for x, y in points)
    return f"M{start}" + "".join(f"L{p}" for p in rest) + ("Z" if closed else "")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


def ticks(most: float) -> list[float]:
    """Round numbers from zero up to `most`, about four."""
    if most <= 0:
        return [0.0]
    scale = 10.0 ** floor(log10(most))
    steps = (scale * f for f in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5))
    step = next((s for s in steps if most / s <= 4), scale * 5)
    return [step * i for i in range(int(most / step + 1e-9) + 1)]


_WIDTH, _HEIGHT, _TOP = 400.0, 220.0, 12.0


@dataclass(frozen=True, slots=True)
class _Chart:
    """Axes of a chart, which begin at zero.

    Attributes:
        left, right, bottom: margins.
        most: the largest value upwards.
    """

    left: float
    right: float
    bottom: float
    most: float

    def x(self, share: float) -> float:
        return self.left + (_WIDTH - self.left - self.right) * share

    def y(self, value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - self.bottom) * (1 - value / self.most)

    def across(self, value: float, *content: Markup, **attributes: object) -> Markup:
        """A line at a value."""
        y = self.y(value)
        ends = {"x1": self.x(0), "x2": self.x(1), "y1": y, "y2": y}
        return element("line", *content, **ends, **attributes)

    def upright(self, share: float, class_: str) -> Markup:
        """A line at a share of the width."""
        x = self.x(share)
        return element("line", x1=x, x2=x, y1=_TOP, y2=self.y(0), class_=class_)

    def grid(self, labels: Mapping[float, str]) -> Markup:
        """Lines at values, with their labels."""
        lines = []
        for value, label in labels.items():
            at = {"x": self.left - 6, "y": self.y(value) + 4}
            text = element("text", label, text_anchor="end", **at)
            lines.append(element("g", self.across(value), text))
        return element("g", *lines, class_="grid")


def _text_at(text: str, x: float, up: float, anchor: str = "middle") -> Markup:
    return element("text", text, x=x, y=_HEIGHT - up, text_anchor=anchor)


def _chart(label: str, parts: Iterable[Markup]) -> Markup:
    return drawing(_WIDTH, _HEIGHT, label, parts, "chart")


# ------------------------------------------------------------------------- memory

KINDS = ("fixed", "state", "residuals", "temporaries")
# A budget so many times the peak would leave a flat line of what is used.
_FAR = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Memory of one device while one segment runs, as the search predicts it.

    Attributes:
        forward: whether in the forward pass.
        state_bytes: parameters and optimizer state of all segments.
        residual_bytes: what forward passes keep for backward passes at this moment.
        temp_bytes: what the segment needs besides.
    """

    segment: int
    forward: bool
    fixed_bytes: int
    state_bytes: int
    residual_bytes: int
    temp_bytes: int

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Bytes in the order of :data:`KINDS`."""
        state = self.fixed_bytes, self.state_bytes
        return (*state, self.residual_bytes, self.temp_bytes)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.parts)


def timeline(figures: Figures) -> list[Moment]:
    """Forward through the segments, and back; empty if the plan was not measured.

    As the search reckons: residuals of a segment are there from its forward pass to
    the end of its backward pass.
    """
    taken = [figures.taken(i) for i in range(len(figures.picks))]
    options = [option for option in taken if option is not None]
    kept, forward = 0, []
    for segment, option in enumerate(options):
        kept += option.residual_bytes
        forward.append(
            Moment(
                segment=segment,
                forward=True,
                fixed_bytes=figures.fixed_bytes,
                state_bytes=sum(option.state_bytes for option in options),
                residual_bytes=kept,
                temp_bytes=option.temp_bytes,
            )
        )
    return forward + [replace(one, forward=False) for one in reversed(forward)]


def is_far(
    moments: Sequence[Moment], budget_bytes: int, compiled_bytes: int | None
) -> bool:
    """Returns True if a budget lies far above all memory that is used."""
    peak = max(moment.total_bytes for moment in moments)
    return budget_bytes > _FAR * max(peak, compiled_bytes or 0)


def timeline_drawing(
    moments: Sequence[Moment], budget_bytes: int | None, compiled_bytes: int | None
) -> Markup:
    """Stacked surfaces, and lines for the budget and the compiled program.

    Args:
        moments: at least one.
    """
    peak = max(moment.total_bytes for moment in moments)
    lines = {"compiled": compiled_bytes or 0}
    if budget_bytes is not None and not is_far(moments, budget_bytes, compiled_bytes):
        lines["budget"] = budget_bytes
    most = max(peak, *lines.values()) * 1.05 or 1.0
    chart = _Chart(62.0, 8.0, 30.0, most)
    scale = next(s for s in (2**30, 2**20, 2**10, 1) if most >= s or s == 1)
    marks = [scale * tick for tick in ticks(most / scale)]
    parts = [chart.grid({value: _short_bytes(value) for value in marks})]
    # Each moment is as wide as the others, so that surfaces have steps.
    edges = [i / len(moments) for i in range(len(moments) + 1)]
    floor = [0] * len(moments)
    for place, kind in enumerate(KINDS):
        roof = [low + m.parts[place] for low, m in zip(floor, moments, strict=True)]
        outline = [*_steps(chart, edges, roof)]
        outline += reversed([*_steps(chart, edges, floor)])
        surface = {"d": path(outline, closed=True), "class_": f"area {kind}"}
        parts.append(element("path", element("title", kind), **surface))
        floor = roof
    parts.append(chart.upright(0.5, "turn"))
    for name, value in lines.items():
        if value:
            label = element("title", f"{name}: {format_bytes(value)}")
            parts.append(chart.across(value, label, class_=f"limit {name}"))
    for label, share in (("forward", 0.25), ("backward", 0.75)):
        parts.append(_text_at(label, chart.x(share), 10))
    text = f"Memory of one device over the step; the peak is {format_bytes(peak)}."
    return _chart(text, parts)


def _steps(
    chart: _Chart, edges: Sequence[float], values: Sequence[int]
) -> Iterator[Point]:
    for place, value in enumerate(values):
        for edge in edges[place : place + 2]:
            yield chart.x(edge), chart.y(value)


def _short_bytes(value: float) -> str:
    """Bytes without digits that say nothing: ``1.5 GiB``, ``512 KiB``."""
    number, _, unit = format_bytes(value).partition(" ")
    return f"{float(number):g} {unit}"


# --------------------------------------------------------------------- strategies


def pareto(options: Sequence[OptionFigures]) -> list[OptionFigures]:
    """Options that no other beats in memory without being slower; leanest first."""
    front: list[OptionFigures] = []
    for option in sorted(options, key=lambda o: (o.memory_bytes, o.step_ms)):
        if not front or option.step_ms < front[-1].step_ms:
            front.append(option)
    return front


def scatter_drawing(
    options: Sequence[OptionFigures], budget_bytes: int | None
) -> Markup:
    """The options of one kind of segment.

    Args:
        options: one at least.
        budget_bytes: drawn as a line where it lies among them.
    """
    low, high = _range([o.memory_bytes for o in options])
    most = max(option.step_ms for option in options) * 1.08 or 1.0
    chart = _Chart(52.0, 14.0, 40.0, most)

    def place(option: OptionFigures) -> Point:
        share = (option.memory_bytes - low) / (high - low)
        return chart.x(share), chart.y(option.step_ms)

    parts = [
        chart.grid({value: f"{value:g}" for value in ticks(most)}),
        _text_at(format_bytes(low), chart.x(0), 22, "start"),
        _text_at(format_bytes(high), chart.x(1), 22, "end"),
        _text_at("memory", chart.x(0.5), 5),
        _text_at("ms", chart.left - 6, 22, "end"),
    ]
    if budget_bytes is not None and low <= budget_bytes <= high:
        parts.append(chart.upright((budget_bytes - low) / (high - low), "limit budget"))
    front = pareto(options)
    if len(front) > 1:
        parts.append(element("path", d=path([*map(place, front)]), class_="front"))
    for option in sorted(options, key=lambda o: o.taken):
        x, y = place(option)
        size = format_bytes(option.memory_bytes)
        title = element("title", f"{option.name}: {option.step_ms:.3f} ms, {size}")
        kind = "on-front" if option in front else "behind"
        if option.taken:
            corners = [(x, y - 8), (x + 8, y), (x, y + 8), (x - 8, y)]
            shape = {"d": path(corners, closed=True), "class_": f"chosen {kind}"}
            parts.append(element("path", title, **shape))
        else:
            dot = {"cx": x, "cy": y, "r": 4.5, "class_": f"option {kind}"}
            parts.append(element("circle", title, **dot))
    return _chart(
        f"{counted(len(options), *STRATEGIES)}, time of the step against memory; "
        f"{len(front)} on the Pareto front.",
        parts,
    )


def _range(values: Sequence[int]) -> tuple[float, float]:
    """A range that holds some values, with room at its ends."""
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.05 * high or 1.0
    return max(0.0, low - room), high + room


# ------------------------------------------------------------------------ tensors

_TENSOR_WIDTH, _TENSOR_HEIGHT, _MARGIN = 72.0, 48.0, 2.0
_THIN = 14.0  # the height of a tensor with one dim
_MOST_CUTS = 16  # more lines than this are a grey surface


def tensor_drawing(
    tensor: TensorFigure, sizes: Mapping[str, int], colours: Mapping[str, str]
) -> Markup:
    """One tensor.

    Two of its dims are drawn: sharded ones, if there are any, and then the first and
    the last. What the first device holds is filled.

    Args:
        colours: a class for each axis.
    """
    rank = len(tensor.spec)
    down, across = drawn_dims(tensor)
    height = _TENSOR_HEIGHT if rank > 1 else _THIN
    top = _MARGIN + (_TENSOR_HEIGHT - height) / 2
    names = [
        name for dim in (down, across) if dim is not None for name in _axes(tensor, dim)
    ]
    rows = _ways(tensor, down, sizes)
    columns = _ways(tensor, across, sizes)
    # A part that several axes cut out has the colours of all of them, side by side.
    fills = [colours.get(name, "") for name in names] or ["whole"]
    width = _TENSOR_WIDTH / columns / len(fills)
    right = _MARGIN + _TENSOR_WIDTH
    whole = {"x": _MARGIN, "y": top, "width": _TENSOR_WIDTH, "height": height}
    parts = [
        element("rect", class_=f"tensor {'sharded' if names else 'whole'}", **whole)
    ]
    for place, fill in enumerate(fills):
        box = {"x": _MARGIN + place * width, "y": top, "width": width}
        parts.append(
            element("rect", class_=f"part {fill}", height=height / rows, **box)
        )
    for count, vertical in ((columns, True), (rows, False)):
        if 1 < count <= _MOST_CUTS:
            for i in range(1, count):
                x = _MARGIN + _TENSOR_WIDTH * i / count
                y = top + height * i / count
                ends = (
                    {"x1": x, "x2": x, "y1": top, "y2": top + height}
                    if vertical
                    else {"x1": _MARGIN, "x2": right, "y1": y, "y2": y}
                )
                parts.append(element("line", class_="cut", **ends))
    return drawing(
        _TENSOR_WIDTH + 2 * _MARGIN,
        _TENSOR_HEIGHT + 2 * _MARGIN,
        tensor_text(tensor),
        parts,
        "tensor-drawing",
    )


def drawn_dims(tensor: TensorFigure) -> tuple[int | None, int | None]:
    """The dims that are drawn downwards and across."""
    rank = len(tensor.spec)
    if rank == 0:
        return None, None
    if rank == 1:
        return None, 0
    sharded = [dim for dim, names in enumerate(tensor.spec) if names][:2]
    others = [dim for dim in (rank - 1, 0, *range(1, rank)) if dim not in sharded]
    first, second = sorted([*sharded, *others][:2])
    return first, second


def _axes(tensor: TensorFigure, dim: int | None) -> tuple[str, ...]:
    return () if dim is None else tensor.spec[dim]


def _ways(tensor: TensorFigure, dim: int | None, sizes: Mapping[str, int]) -> int:
    return prod(sizes.get(name, 1) for name in _axes(tensor, dim))


_FOLDER = Path(__file__).parent
_COLOURS = 6  # as many as the style sheet has


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
    sizes = dict(plan.mesh_axes)
    colours = {name: f"a{i % _COLOURS}" for i, name in enumerate(sizes)}
    environment.filters.update(
        ms=_format_ms,
        bytes=format_bytes,
        counted=counted,
        tensor=tensor_text,
        strategy=strategy_text,
        drawing=partial(tensor_drawing, sizes=sizes, colours=colours),
    )
    style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    figures = plan.figures
    search = plan.search
    estimated = search.get("strategies_estimated")
    return environment.get_template(template).render(
        view=view_of(plan),
        words=words,
        plan=plan,
        style=style,
        colours=colours,
        how=words.known_how(plan),
        budget_bytes=figures and figures.budget_bytes,
        memory=_memory(plan),
        kinds=[
            {
                "name": kind.name,
                "options": sorted(kind.options, key=lambda option: option.step_ms),
                "front": pareto(kind.options),
                "drawing": scatter_drawing(kind.options, figures.budget_bytes),
            }
            for kind in (figures.kinds if figures else ())
            if figures and kind.options
        ],
        seconds=[*words.pass_seconds(plan)],
        counts=words.counts_text(search)
        if estimated is None
        else f"{counted(estimated, *STRATEGIES)} estimated",
        arguments=[
            {
                "path": name,
                "tensor": TensorFigure(type=kind, spec=spec),
                "axes": sorted({axis for names in spec for axis in names}),
                "donated": donated,
            }
            for name, kind, spec, donated in zip(
                *(plan.arg_names, plan.arg_types, plan.arg_specs, plan.donated),
                strict=True,
            )
        ],
    )


def _without_controls(value: Any) -> Any:
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return one_line(value) if is_text else value


def _memory(plan: Plan) -> dict[str, Any] | None:
    """The memory timeline and its peak by kind; None if it was not predicted."""
    moments = timeline(plan.figures) if plan.figures else []
    if not moments or plan.figures is None:
        return None
    peak = max(moments, key=lambda moment: moment.total_bytes)
    budget = plan.figures.budget_bytes
    return {
        "drawing": timeline_drawing(moments, budget, plan.peak_bytes),
        "peak": peak,
        "legend": dict(zip(KINDS, peak.parts, strict=True)),
        "is_far": budget is not None and is_far(moments, budget, plan.peak_bytes),
    }


def _format_ms(value: float | None) -> str:
    """Milliseconds with three digits, or a dash."""
    return "-" if value is None else f"{value:.3f} ms"
