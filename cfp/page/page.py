"""Writes the page of a plan, whole or small, from its templates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cfp.page.view import FILTERS, page_view
from cfp.printable import printable

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
