"""The memory of one device over a step, as the search predicts it, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from cfp.page.svg import drawing, element, path, ticks
from cfp.plan.figures import Figures, OptionFigures
from cfp.units import format_bytes

KINDS = ("fixed", "state", "residuals", "temporaries")
_WIDTH, _HEIGHT = 400.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 8.0, 12.0, 30.0
# A budget so many times the peak would leave a flat line of what is used.
_FAR = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Memory while one segment runs.

    Attributes:
        segment: its index.
        forward: whether in the forward pass.
        fixed_bytes: what every choice needs.
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
        return (
            self.fixed_bytes,
            self.state_bytes,
            self.residual_bytes,
            self.temp_bytes,
        )

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
    state = sum(option.state_bytes for option in options)
    kept, forward = 0, []
    for segment, option in enumerate(options):
        kept += option.residual_bytes
        forward.append(_moment(figures, segment, option, state, kept))
    back = [
        Moment(
            segment=m.segment,
            forward=False,
            fixed_bytes=m.fixed_bytes,
            state_bytes=m.state_bytes,
            residual_bytes=m.residual_bytes,
            temp_bytes=m.temp_bytes,
        )
        for m in reversed(forward)
    ]
    return [*forward, *back]


def _moment(
    figures: Figures, segment: int, option: OptionFigures, state: int, kept: int
) -> Moment:
    return Moment(
        segment=segment,
        forward=True,
        fixed_bytes=figures.fixed_bytes,
        state_bytes=state,
        residual_bytes=kept,
        temp_bytes=option.temp_bytes,
    )


def timeline_drawing(
    moments: Sequence[Moment], budget_bytes: int | None, compiled_bytes: int | None
) -> Markup:
    """Stacked surfaces, and lines for the budget and the compiled program.

    Args:
        moments: at least one.
        budget_bytes: memory that the plan may use, if there is a limit.
        compiled_bytes: what the compiled program needs, if it was compiled.
    """
    peak = max(moment.total_bytes for moment in moments)
    lines = {"compiled": compiled_bytes}
    if budget_bytes is not None and not is_far(moments, budget_bytes):
        lines["budget"] = budget_bytes
    most = max([peak, *(value for value in lines.values() if value)]) * 1.05 or 1.0
    width = (_WIDTH - _LEFT - _RIGHT) / len(moments)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / most)

    parts = [_grid(y, most)]
    floor = [0] * len(moments)
    for place, kind in enumerate(KINDS):
        roof = [
            low + moment.parts[place]
            for low, moment in zip(floor, moments, strict=True)
        ]
        outline = [
            *((x, y(v)) for i, v in enumerate(roof) for x in _ends(i, width)),
            *(
                (x, y(floor[i]))
                for i in reversed(range(len(floor)))
                for x in reversed(_ends(i, width))
            ),
        ]
        parts.append(
            element(
                "path",
                element("title", kind),
                d=path(outline, closed=True),
                class_=f"area {kind}",
            )
        )
        floor = roof
    middle = _LEFT + width * len(moments) / 2
    parts.append(element("line", x1=middle, x2=middle, y1=_TOP, y2=y(0), class_="turn"))
    for name, value in lines.items():
        if value:
            ends = {"y1": y(value), "y2": y(value), "x1": _LEFT, "x2": _WIDTH - _RIGHT}
            parts.append(
                element(
                    "line",
                    element("title", f"{name}: {format_bytes(value)}"),
                    class_=f"limit {name}",
                    **ends,
                )
            )
    for label, at in (("forward", 0.25), ("backward", 0.75)):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * at
        parts.append(element("text", label, x=x, y=_HEIGHT - 10, text_anchor="middle"))
    return drawing(
        _WIDTH,
        _HEIGHT,
        f"Memory of one device over the step; the peak is {format_bytes(peak)}.",
        parts,
        "chart",
    )


def is_far(moments: Sequence[Moment], budget_bytes: int) -> bool:
    """Returns True if a budget lies far above all memory that is used."""
    return budget_bytes > _FAR * max(moment.total_bytes for moment in moments)


def short_bytes(value: float) -> str:
    """Bytes without digits that say nothing: ``1.5 GiB``, ``512 KiB``."""
    number, _, unit = format_bytes(value).partition(" ")
    return f"{float(number):g} {unit}"


def _ends(index: int, width: float) -> tuple[float, float]:
    return _LEFT + width * index, _LEFT + width * (index + 1)


def _grid(y, most: float) -> Markup:
    scale = next(s for s in (2**30, 2**20, 2**10, 1) if most >= s or s == 1)
    lines = [
        element(
            "g",
            element(
                "line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y(value), y2=y(value)
            ),
            element(
                "text", short_bytes(value), x=_LEFT - 6, y=y(value) + 4,
                text_anchor="end",
            ),
        )
        for value in (scale * tick for tick in ticks(most / scale))
    ]  # fmt: skip
    return element("g", *lines, class_="grid")
