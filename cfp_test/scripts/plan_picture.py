"""Draws a saved plan's tables as a picture, such as docs/pictures/plan.svg.

python -m cfp_test.scripts.plan_picture plan.json plan.svg
"""

import io
import sys
from pathlib import Path

import cfp
from cfp.view.console import literal_console
from cfp.view.text import plan_view

_WIDTH = 150


def picture(plan: cfp.Plan) -> str:
    """A plan's tables as an SVG picture."""
    console = literal_console(
        record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True
    )
    console.print(plan_view(plan))
    return console.export_svg(title="cfp plan", unique_id="cfp-plan")


if __name__ == "__main__":
    saved, file = sys.argv[1:]
    Path(file).write_text(picture(cfp.Plan.load(saved)), encoding="utf-8")
