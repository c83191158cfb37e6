"""How commands hand over what they found: on the console, or in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import RenderableType

from cfp.devices.joining import is_follower
from cfp.errors import CfpError
from cfp.plan.plan import Plan
from cfp.report.console import literal_console
from cfp.report.passes import console_and_border


def show(view: Callable[[box.Box], RenderableType]) -> None:
    """Prints what a view draws with the lines that the console has."""
    console, border = console_and_border(literal_console())
    console.print(view(border))


def print_error(message: str) -> None:
    """Prints to the error stream, in red where there are colours."""
    console = literal_console(stderr=True)
    if console.is_terminal:
        console.print("error:", style="bold red", end=" ")
        console.print(message, markup=False, highlight=False)
    else:
        print(f"error: {message}", file=sys.stderr, flush=True)


def save(made: Plan, output: Path | None, *, say: bool) -> None:
    """Saves a plan, if it is to be saved.

    Raises:
        CfpError: it cannot be.
    """
    if output is None or is_follower():
        return
    try:
        made.save(output)
    except OSError as error:
        raise CfpError(f"Cannot write {output}: {error.strerror}.") from error
    if say:
        print(f"Saved {output}")


def suggest(made: Plan, output: Path | None) -> None:
    """Says how to keep a plan that was not saved, and what comes next."""
    if output is not None:
        return
    if "described" in made.environment:
        then = "on its devices, cfp verify plan.json TARGET times it"
    else:
        then = "then run it with cfp run --plan plan.json"
    print(f"Save a plan with -o plan.json; {then}")
