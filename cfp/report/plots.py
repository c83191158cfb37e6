"""Figures in files; matplotlib is loaded when there is one to draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cfp.errors import CfpError


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
