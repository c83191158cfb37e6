"""The command line: parses, calls the passes, prints."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cfp.cli import planning, running
from cfp.cli.options import PASS_ON

app = typer.Typer(
    name="cfp",
    help="Automatic sharding for JAX, measured on your own devices.\n\n"
    "Example: cfp plan gpt --layers 4 --hidden 256 --platform cpu --devices 4",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if not sys.stdout.isatty() else "rich",
)
for _name, _function in planning.COMMANDS.items():
    app.command(_name, context_settings=PASS_ON)(_function)
app.command("run", context_settings=PASS_ON)(running.run)
app.command("show")(running.show)


def _print_version(wanted: bool) -> None:
    if wanted:
        from cfp import __version__

        print(f"cfp {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of the ``cfp`` command."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
