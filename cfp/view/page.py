"""A plan as a page of HTML, whole or small: the rows of the text, with bars.

Every text is escaped.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cfp.plan.plan import Plan
from cfp.printable import one_line
from cfp.view import words
from cfp.view.explain import explained, facts
from cfp.view.rows import blocks_rows, more_rows, race_rows, segments_of, variants_rows
from cfp.view.throughput import throughput

_FOLDER = Path(__file__).parent


def page_html(plan: Plan, is_small: bool = False) -> str:
    """Renders a page with its own style; it loads nothing else.

    Args:
        is_small: True for a part of a page, without the last tables, for notebooks.
    """
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        # Names in a plan are those of any program, or of any file.
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["zip"] = partial(zip, strict=True)
    tables = [blocks_rows(segments_of(plan)), variants_rows(plan), race_rows(plan)]
    tables += [] if is_small else more_rows(plan)
    rates = throughput(plan)
    return environment.get_template("page.html.jinja").render(
        is_small=is_small,
        title=words.title(plan),
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        figures=[*words.figure_texts(plan), *([str(rates)] if rates else [])],
        remarks=[*facts(plan)],
        summary=words.summary_line(plan),
        tables=[one for one in tables if one.rows],
        segments=[*explained(plan)],
    )


def _without_controls(value: Any) -> Any:
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return one_line(value) if is_text else value
