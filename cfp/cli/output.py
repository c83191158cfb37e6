"""Output of commands: on the console, as JSON, or in a file."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType

from cfp.devices.joining import is_follower
from cfp.errors import CfpError
from cfp.plan.plan import Plan
from cfp.view.console import console_and_border, literal_console
from cfp.view.words import throughput


def show(view: Callable[[box.Box], RenderableType]) -> None:
    """Prints a view with the lines that the console can draw."""
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
    """Saves a plan, if a file was named.

    Raises:
        CfpError: the file cannot be written.
    """
    if output is None or is_follower():
        return
    try:
        made.save(output)
    except OSError as error:
        raise CfpError(f"Cannot write {output}: {error.strerror}.") from error
    if say:
        print(f"Saved {output}")


def plan_json(plan: Plan, more: Mapping[str, Any] | None = None) -> str:
    """Writes a plan as JSON that `Plan.load` reads, with more entries."""
    rates = throughput(plan)
    found = {**json.loads(plan.to_json()), "throughput": rates and asdict(rates)}
    return json.dumps({**found, **(more or {})}, indent=1)


def suggest(made: Plan, output: Path | None) -> None:
    """Prints how to save a plan that was not saved, and the next command."""
    if output is not None:
        return
    if "described" in made.environment:
        then = "on its devices, cfp verify plan.json TARGET times it"
    else:
        then = "then run it with cfp run --plan plan.json"
    print(f"Save a plan with -o plan.json; {then}")


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[Callable[[str], None]]:
    """Keeps stdout for one document: all other output goes to stderr."""
    stdout = sys.stdout

    def print_json(text: str) -> None:
        if not is_follower():
            print(text, file=stdout)

    with contextlib.redirect_stdout(sys.stderr if wanted else stdout):
        yield print_json


def leave_printing_to_process_0() -> None:
    """Silences all processes but the first of several, except for errors."""
    if is_follower():
        sys.stdout = io.StringIO()
