"""Renders a plan as a page of HTML, whole or small, from its templates.

The templates place the values of the plan's view; only drawings, and what stands on no
other view of a plan, are made here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cfp.plan.figures import TensorFigure
from cfp.plan.plan import Plan
from cfp.printable import counted, printable
from cfp.units import format_bytes
from cfp.view.drawings import (
    KINDS,
    is_far,
    pareto,
    scatter_drawing,
    tensor_drawing,
    timeline,
    timeline_drawing,
)
from cfp.view.model import view_of
from cfp.view.strategy import strategy_text
from cfp.view.words import (
    STRATEGIES,
    counts_text,
    known_how,
    pass_seconds,
    tensor_text,
)

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
        plan=plan,
        style=style,
        colours=colours,
        how=known_how(plan),
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
        seconds=[*pass_seconds(plan)],
        counts=counts_text(search)
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
    return printable(value) if is_text else value


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
        "is_far": budget is not None and is_far(moments, budget),
    }


def _format_ms(value: float | None) -> str:
    """Milliseconds with three digits, or a dash."""
    return "-" if value is None else f"{value:.3f} ms"
