"""Draws a saved plan's tables as a picture, such as docs/pictures/plan.svg.

python -m cfp_test.scripts.plan_picture plan.json plan.svg
"""

import argparse
import io
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


def main() -> None:
    """Draws the plan of one file to another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, help="a saved plan")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    given = parser.parse_args()
    given.picture.write_text(picture(cfp.Plan.load(given.plan)), encoding="utf-8")


if __name__ == "__main__":
    main()
