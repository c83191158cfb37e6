"""Pieces of SVG, written out: every text and every attribute is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

Point = tuple[float, float]


def element(tag: str, *content: str | Markup, **attributes: object) -> Markup:
    """One element.

    Args:
        tag: its name.
        content: texts, which are escaped, and elements, which are not again.
        attributes: by name; ``_`` stands for ``-``, and is left out at the end, as in
            ``class_``. None leaves one out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    inside = "".join(str(escape(part)) for part in content)
    return Markup(f"<{tag}{written}>{inside}</{tag}>")


def drawing(
    width: float, height: float, label: str, parts: Iterable[Markup], class_: str = ""
) -> Markup:
    """A whole drawing, which scales with the space that there is.

    Args:
        width, height: in the drawing's own units.
        label: what it shows, for people who do not see it.
        parts: its elements.
        class_: for its style.
    """
    return element(
        "svg",
        element("title", label),
        *parts,
        viewBox=f"0 0 {_text(width)} {_text(height)}",
        role="img",
        class_=class_ or None,
    )


def path(points: Sequence[Point], *, closed: bool = False) -> str:
    """The ``d`` of a path through some points."""
    start, *rest = (f"{_text(x)} {_text(y)}" for x, y in points)
    return f"M{start}" + "".join(f"L{p}" for p in rest) + ("Z" if closed else "")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


def ticks(most: float, count: int = 4) -> list[float]:
    """Round numbers from zero up to `most`, about so many."""
    if most <= 0:
        return [0.0]
    scale = 1.0
    while most / scale >= 10:
        scale *= 10
    while most / scale < 1:
        scale /= 10
    steps = (scale * f for f in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5))
    step = next((s for s in steps if most / s <= count), scale * 5)
    return [step * i for i in range(int(most / step + 1e-9) + 1)]
