"""Text made fit to be printed: what is from elsewhere, and names of many things."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence

_STAND_IN = "\N{REPLACEMENT CHARACTER}"
_NUMBER = re.compile(r"\d+")

# How wide text is where nothing says it, and what it is never narrower than.
USUAL_COLUMNS = 100
LEAST_COLUMNS = 60


def columns() -> int:
    """Returns the width of text: $COLUMNS, the terminal's, or 100 columns."""
    return max(shutil.get_terminal_size((USUAL_COLUMNS, 24)).columns, LEAST_COLUMNS)


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


def merged_alike(names: Sequence[str]) -> list[str]:
    """Names, those that differ in numbers alone as one: ``layer_0-3/up``."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("#", name), []).append(name)
    return [merged_name(group) for group in alike.values()]


def distinct_ends(names: Sequence[str]) -> list[str]:
    """Shortens paths to the ends that distinguish them.

    ``a/q/kernel`` and ``a/k/kernel`` give ``q/kernel`` and ``k/kernel``; paths that are
    equal are numbered.
    """
    ends: Counter[str] = Counter()
    for name in set(names):
        parts = name.split("/")
        ends.update("/".join(parts[start:]) for start in range(len(parts)))
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        parts = name.split("/")
        starts = range(len(parts) - 1, -1, -1)
        tails = ["/".join(parts[start:]) for start in starts]
        short = next((tail for tail in tails if ends[tail] == 1), name)
        found.append(f"{short} ({seen[name]})" if seen[name] > 1 else short)
    return found


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
