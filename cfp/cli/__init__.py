"""The command line: parses, calls the passes, prints."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cfp.cli import (
    adapting,
    bench,
    planning,
    reading,
    records,
    running,
    tradeoff,
    verifying,
)
from cfp.cli.options import INTERRUPTED, PASS_ON, TRACEBACK
from cfp.cli.supervise import Supervision
from cfp.cluster.doctor.command import main as doctor
from cfp.devices.joining import COORDINATOR, JOIN, PROCESS_ID, PROCESSES


class Commands(TyperGroup):
    """Commands of one word, or of two where the second is not a target."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses words; ``--traceback`` counts wherever it stands."""
        if "--traceback" in args:
            args = ["--traceback", *(word for word in args if word != "--traceback")]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command that some words begin with."""
        name = " ".join(args[:2])
        if name in records.COMMANDS:
            args = [name, *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="cfp",
    cls=Commands,
    help="Automatic sharding for JAX, measured on your own devices.\n\n"
    "Example: cfp plan gpt --layers 2 --hidden 128 --seq 64 --vocab 512 "
    "--platform cpu --devices 4",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if not sys.stdout.isatty() else "rich",
)
for _name, _function in planning.COMMANDS.items():
    app.command(_name, context_settings=PASS_ON)(_function)
for _name, _function in records.COMMANDS.items():
    app.command(_name)(_function)
app.command("tradeoff", context_settings=PASS_ON)(tradeoff.tradeoff)
app.command("run", context_settings=PASS_ON)(running.run)
app.command("show")(running.show)
app.command("adapt", context_settings=PASS_ON)(adapting.adapt)
app.command("verify", context_settings=PASS_ON)(verifying.verify)
app.command("explain")(reading.explain)
app.command("diff")(reading.diff)
app.command("report")(reading.report)
app.command("export", context_settings=PASS_ON)(reading.export)
app.command("inspect", context_settings=PASS_ON)(reading.inspect)
app.command("bench", context_settings=PASS_ON)(bench.bench)


@app.command("doctor", context_settings={**PASS_ON, "help_option_names": []})
def _doctor(context: typer.Context) -> None:
    """Say what works on this machine, and what to do about the rest."""
    # Seldom reached: `python -m cfp doctor` does not wait for what this room imports.
    raise typer.Exit(doctor(context.args))


@app.command("operators", context_settings={**PASS_ON, "help_option_names": []})
def _operators(context: typer.Context) -> None:
    """Check and time the implementations of the operators that models are made of."""
    from cfp.operators.command import main as operators

    raise typer.Exit(operators(context.args))


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
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback",
            help="Where a command fails, print the whole traceback, too. It may stand "
            "anywhere in the command.",
        ),
    ] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Run as one of several processes, on all of their devices: where "
            "process 0 is reached. Give the command to every process.",
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", help="How many processes there are.")
    ] = None,
    process_id: Annotated[
        int | None,
        typer.Option(metavar="I", help="The number of this one, from 0 to N - 1."),
    ] = None,
    join: Annotated[
        bool,
        typer.Option(
            "--join",
            help="The same, where JAX finds the others by itself: under Slurm, Open "
            "MPI, Kubernetes.",
        ),
    ] = False,
) -> None:
    # Commands that use devices read them there; so do programs that call cfp.join().
    given = {
        COORDINATOR: coordinator,
        PROCESSES: processes,
        PROCESS_ID: process_id,
        JOIN: "1" if join else None,
        TRACEBACK: "1" if traceback else None,
    }
    os.environ.update({k: str(v) for k, v in given.items() if v is not None})


def main() -> None:
    """The entry point of the ``cfp`` command."""
    try:
        app(obj=Supervision())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            # Python would wait for threads, and a compile cannot be interrupted.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        raise
