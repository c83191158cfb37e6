"""The console that tables are printed on: it shows text as it is."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def literal_console(**options: Any) -> Console:
    """A console that takes no text for markup.

    Names come from the user's model, or from a file: ``experts[i]`` is no tag to be
    left out, ``[/]`` closes nothing, and ``:warning:`` is no picture.

    Args:
        options: as of ``rich.console.Console``.
    """
    return Console(markup=False, emoji=False, **options)
