"""Figures in files: matplotlib is loaded when there is one to draw.

A saved plan's tables as a picture: ``python -m cfp.report.plots plan.json plan.svg``.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cfp.errors import CfpError
from cfp.plan.plan import Plan
from cfp.report.console import literal_console
from cfp.report.tables import plan_view


def check_can_draw(file: Path) -> None:
    """Says before there is anything to draw that it could not be.

    Args:
        file: an image; its ending says which kind.

    Raises:
        CfpError: matplotlib is not installed, or does not know the kind of image.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise CfpError(
            "A plot needs matplotlib. Install it: pip install 'cfp[report]'."
        ) from error
    endings = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lower().removeprefix(".") not in endings:
        known = ", ".join(f".{ending}" for ending in sorted(endings))
        raise CfpError(
            f"Cannot draw {file}: its ending says no kind of image. Name a file that "
            f"ends in one of {known}."
        )


@contextmanager
def figure(
    file: Path, columns: int = 1, figsize: tuple[float, float] = (7, 4.2)
) -> Iterator[Any]:
    """The axes of a figure; it is saved when all is drawn.

    Args:
        file: an image; its ending says which kind.
        columns: how many plots stand side by side.
        figsize: in inches.

    Raises:
        CfpError: matplotlib is not installed, or does not know the kind of image.
    """
    check_can_draw(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, columns, figsize=figsize)
    try:
        yield axes
        drawn.tight_layout()
        drawn.savefig(file)
    finally:
        pyplot.close(drawn)


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
        print("usage: python -m cfp.report.plots plan.json plan.svg", file=sys.stderr)
        return 2
    try:
        Path(words[1]).write_text(picture(Plan.load(words[0])), encoding="utf-8")
    except (CfpError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
