"""Draws how a tensor is sharded: the whole of it, cut, and the first device's part."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from markupsafe import Markup

from cfp.page.svg import drawing, element
from cfp.plan.figures import TensorFigure
from cfp.plan.words import tensor_text

_WIDTH, _HEIGHT, _MARGIN = 72.0, 48.0, 2.0
_THIN = 14.0  # the height of a tensor with one dim
_MOST_CUTS = 16  # more lines than this are a grey surface


def tensor_drawing(
    tensor: TensorFigure, sizes: Mapping[str, int], colours: Mapping[str, str]
) -> Markup:
    """One tensor.

    Two of its dims are drawn: sharded ones, if there are any, and then the first and
    the last. What the first device holds is filled.

    Args:
        tensor: the tensor.
        sizes: of the mesh's axes.
        colours: a class for each axis.
    """
    rank = len(tensor.spec)
    down, across = drawn_dims(tensor)
    height = _HEIGHT if rank > 1 else _THIN
    top = _MARGIN + (_HEIGHT - height) / 2
    names = [
        name for dim in (down, across) if dim is not None for name in _axes(tensor, dim)
    ]
    rows = _ways(tensor, down, sizes)
    columns = _ways(tensor, across, sizes)
    # A part that several axes cut out has the colours of all of them, side by side.
    fills = [colours.get(name, "") for name in names] or ["whole"]
    width = _WIDTH / columns / len(fills)
    whole = {"x": _MARGIN, "y": top, "width": _WIDTH, "height": height}
    parts = [
        element("rect", class_=f"tensor {'sharded' if names else 'whole'}", **whole)
    ]
    for place, fill in enumerate(fills):
        box = {"x": _MARGIN + place * width, "y": top, "width": width}
        parts.append(
            element("rect", class_=f"part {fill}", height=height / rows, **box)
        )
    for count, vertical in ((columns, True), (rows, False)):
        if 1 < count <= _MOST_CUTS:
            for i in range(1, count):
                x = _MARGIN + _WIDTH * i / count
                y = top + height * i / count
                ends = (
                    {"x1": x, "x2": x, "y1": top, "y2": top + height}
                    if vertical
                    else {"x1": _MARGIN, "x2": _MARGIN + _WIDTH, "y1": y, "y2": y}
                )
                parts.append(element("line", class_="cut", **ends))
    return drawing(
        _WIDTH + 2 * _MARGIN,
        _HEIGHT + 2 * _MARGIN,
        tensor_text(tensor),
        parts,
        "tensor-drawing",
    )


def drawn_dims(tensor: TensorFigure) -> tuple[int | None, int | None]:
    """The dims that are drawn downwards and across."""
    rank = len(tensor.spec)
    if rank == 0:
        return None, None
    if rank == 1:
        return None, 0
    sharded = [dim for dim, names in enumerate(tensor.spec) if names][:2]
    others = [dim for dim in (rank - 1, 0, *range(1, rank)) if dim not in sharded]
    first, second = sorted([*sharded, *others][:2])
    return first, second


def _axes(tensor: TensorFigure, dim: int | None) -> tuple[str, ...]:
    return () if dim is None else tensor.spec[dim]


def _ways(tensor: TensorFigure, dim: int | None, sizes: Mapping[str, int]) -> int:
    return prod(sizes.get(name, 1) for name in _axes(tensor, dim))
