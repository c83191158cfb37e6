"""Text from elsewhere, made fit to be printed."""

from __future__ import annotations

_STAND_IN = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, kept: str = "") -> str:
    """Text without what a terminal would take for commands, or cannot show.

    Escape sequences may move the cursor, rename the window or write into the input;
    halves of surrogate pairs cannot be written at all.

    Args:
        text: anything.
        kept: characters that stay although they are not printable.
    """
    return "".join(c if c.isprintable() or c in kept else _STAND_IN for c in text)
