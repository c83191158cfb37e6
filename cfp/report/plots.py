"""Figures in files; matplotlib is loaded when there is one to draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cfp.errors import CfpError


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
    try:
        import matplotlib
    except ImportError as error:
        raise CfpError(
            "A plot needs matplotlib. Install it: pip install 'cfp[report]'."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, columns, figsize=figsize)
    try:
        yield axes
        drawn.tight_layout()
        try:
            drawn.savefig(file)
        except ValueError as error:  # matplotlib does not know the ending
            raise CfpError(f"Cannot draw {file}: {error}.") from error
    finally:
        pyplot.close(drawn)
