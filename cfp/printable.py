"""Text made fit to be printed: what is from elsewhere, and names of many things."""

from __future__ import annotations

import re
from collections.abc import Sequence

_STAND_IN = "\N{REPLACEMENT CHARACTER}"
_NUMBER = re.compile(r"\d+")


def printable(text: str, kept: str = "") -> str:
    """Text without what a terminal would take for commands, or cannot show.

    Escape sequences may move the cursor, rename the window or write into the input;
    halves of surrogate pairs cannot be written at all.

    Args:
        text: anything.
        kept: characters that stay although they are not printable.
    """
    return "".join(c if c.isprintable() or c in kept else _STAND_IN for c in text)


def merged_name(names: Sequence[str]) -> str:
    """One name for the same block of several segments: ``layer_0-3/mlp/up``."""
    shapes = {_NUMBER.sub("#", name) for name in names}
    if len(shapes) > 1:
        return f"{names[0]} ... {names[-1]}"
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    spans = iter([span_text(list(column)) for column in columns])
    return _NUMBER.sub(lambda _: next(spans), names[0])


def span_text(numbers: list[int]) -> str:
    """Numbers in short: ``0-3``, or ``0,2..6`` where they are evenly spaced."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return str(distinct[0])
    step = distinct[1] - distinct[0]
    if distinct == list(range(distinct[0], distinct[-1] + 1, step)):
        if step == 1:
            return f"{distinct[0]}-{distinct[-1]}"
        if len(distinct) > 3:
            return f"{distinct[0]},{distinct[1]}..{distinct[-1]}"
    return ",".join(map(str, distinct))
