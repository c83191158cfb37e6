"""Drawings in SVG: pieces, measured strategies as points, and sharded tensors.

Every text and every attribute is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from markupsafe import Markup, escape

from cfp.plan.figures import OptionFigures, TensorFigure
from cfp.plan.words import tensor_text
from cfp.units import format_bytes

Point = tuple[float, float]


def element(tag: str, *content: str | Markup, **attributes: object) -> Markup:
    """One element.

    Args:
        tag: its name.
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
        label: what it shows, for people who do not see it.
        parts: its elements.
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


def ticks(most: float, count: int = 4) -> list[float]:
    """Round numbers from zero up to `most`, about so many."""
    if most <= 0:
        return [0.0]
    scale = 1.0
    while most / scale >= 10:
        scale *= 10
    while most / scale < 1:
        scale /= 10
    steps = (scale * f for f in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5))
    step = next((s for s in steps if most / s <= count), scale * 5)
    return [step * i for i in range(int(most / step + 1e-9) + 1)]


_WIDTH, _HEIGHT = 400.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 12.0, 40.0


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

    def x(value: float) -> float:
        share = (value - low) / (high - low)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / most)

    parts = [
        element(
            "g",
            *(
                element(
                    "g",
                    element(
                        "line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y(v), y2=y(v)
                    ),
                    element(
                        "text", f"{v:g}", x=_LEFT - 6, y=y(v) + 4, text_anchor="end"
                    ),
                )
                for v in ticks(most)
            ),
            class_="grid",
        )
    ]  # fmt: skip
    for value, anchor in ((low, "start"), (high, "end")):
        text = format_bytes(value)
        at = {"x": x(value), "y": _HEIGHT - 22}
        parts.append(element("text", text, text_anchor=anchor, **at))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts += [
        element("text", "memory", x=middle, y=_HEIGHT - 5, text_anchor="middle"),
        element("text", "ms", x=_LEFT - 6, y=_HEIGHT - 22, text_anchor="end"),
    ]
    if budget_bytes is not None and low <= budget_bytes <= high:
        at = {"x1": x(budget_bytes), "x2": x(budget_bytes)}
        line = element("line", y1=_TOP, y2=y(0), class_="limit budget", **at)
        parts.append(line)
    front = pareto(options)
    corners = [(x(o.memory_bytes), y(o.step_ms)) for o in front]
    if len(corners) > 1:
        parts.append(element("path", d=path(corners), class_="front"))
    for option in sorted(options, key=lambda o: o.taken):
        parts.append(_mark(option, x(option.memory_bytes), y(option.step_ms), front))
    return drawing(
        _WIDTH,
        _HEIGHT,
        f"{len(options)} strategies, time of the step against memory; "
        f"{len(front)} on the Pareto front.",
        parts,
        "chart",
    )


def _mark(
    option: OptionFigures, x: float, y: float, front: Sequence[OptionFigures]
) -> Markup:
    title = element(
        "title",
        f"{option.name}: {option.step_ms:.3f} ms, {format_bytes(option.memory_bytes)}",
    )
    kind = "on-front" if option in front else "behind"
    if option.taken:
        corners = [(x, y - 8), (x + 8, y), (x, y + 8), (x - 8, y)]
        return element(
            "path", title, d=path(corners, closed=True), class_=f"chosen {kind}"
        )
    return element("circle", title, cx=x, cy=y, r=4.5, class_=f"option {kind}")


def _range(values: Sequence[int]) -> tuple[float, float]:
    """A range that holds some values, with room at its ends."""
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.05 * high or 1.0
    return max(0.0, low - room), high + room


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
        tensor: the tensor.
        sizes: of the mesh's axes.
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
