"""Draws a saved plan's tables: ``python -m cfp.report.picture plan.json plan.svg``."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from cfp.errors import CfpError
from cfp.plan.plan import Plan
from cfp.report.console import literal_console
from cfp.report.tables import plan_view

_WIDTH = 150


def picture(plan: Plan) -> str:
    """A plan's tables as an SVG picture."""
    console = literal_console(
        record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True
    )
    console.print(plan_view(plan))
    return console.export_svg(title="cfp plan", unique_id="cfp-plan")


def main(argv: list[str] | None = None) -> int:
    """Reads a plan and writes its picture."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 2:
        print("usage: python -m cfp.report.picture plan.json plan.svg", file=sys.stderr)
        return 2
    try:
        Path(words[1]).write_text(picture(Plan.load(words[0])), encoding="utf-8")
    except (CfpError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
