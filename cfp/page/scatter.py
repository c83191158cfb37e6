"""Strategies that were measured, time against memory, with their Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from cfp.page.svg import drawing, element, path, ticks
from cfp.plan.figures import OptionFigures
from cfp.units import format_bytes

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
