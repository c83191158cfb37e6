"""Renders a plan as a page of HTML, whole or small, from its templates.

The templates place the values of the plan's view. Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cfp.plan.figures import Figures, OptionFigures
from cfp.plan.parts import TensorFigure
from cfp.plan.plan import Plan
from cfp.printable import counted, one_line
from cfp.units import format_bytes
from cfp.view import words
from cfp.view.model import strategy_text, view_of
from cfp.view.words import STRATEGIES, tensor_text

KINDS = (
    "needed by every choice",
    "parameters and optimizer state",
    "residuals, kept for backward",
    "temporaries",
)


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


def pareto(options: Sequence[OptionFigures]) -> list[OptionFigures]:
    """Options that no other beats in memory without being slower; leanest first."""
    front: list[OptionFigures] = []
    for option in sorted(options, key=lambda o: (o.memory_bytes, o.step_ms)):
        if not front or option.step_ms < front[-1].step_ms:
            front.append(option)
    return front


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
    environment.filters.update(
        ms=_format_ms,
        bytes=format_bytes,
        counted=counted,
        tensor=tensor_text,
        strategy=strategy_text,
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
        how=words.known_how(plan),
        budget_bytes=figures and figures.budget_bytes,
        memory=_memory(plan),
        kinds=[
            {
                "name": kind.name,
                "options": sorted(kind.options, key=lambda option: option.step_ms),
                "front": pareto(kind.options),
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
    """The moment of most memory, by kind; None if it was not predicted."""
    moments = timeline(plan.figures) if plan.figures else []
    if not moments:
        return None
    peak = max(moments, key=lambda moment: moment.total_bytes)
    return {"peak": peak, "rows": dict(zip(KINDS, peak.parts, strict=True))}


def _format_ms(value: float | None) -> str:
    """Milliseconds with three digits, or a dash."""
    return "-" if value is None else f"{value:.3f} ms"
