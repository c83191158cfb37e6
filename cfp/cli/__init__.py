"""The command line: the commands of ``cfp`` and the options before them."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from cfp.cli import planning, running
from cfp.cli.options import INTERRUPTED, MARKUP, PASS_ON, TRACEBACK, Option
from cfp.cli.options import command as one_message
from cfp.cli.supervise import Supervision
from cfp.cluster.doctor import main as doctor
from cfp.platform import COORDINATOR, JOIN, PROCESSES
from cfp.profiling.coordination import PROCESS_ID


class Commands(TyperGroup):
    """Group of all commands; ``--traceback`` may be anywhere in the line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Moves ``--traceback`` to the front, and parses the words."""
        if "--traceback" in args:
            args = ["--traceback", *(word for word in args if word != "--traceback")]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="cfp",
    cls=Commands,
    help="Automatic sharding for JAX, measured on your own devices.\n\n"
    "Example: cfp plan gpt --layers 2 --hidden 128 --seq 64 --vocab 512 "
    "--platform cpu --devices 4",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
)
_COMMANDS = {
    "plan": planning.plan,
    "run": running.run,
    "show": running.show,
    "verify": running.verify,
    "export": running.export,
    "analyze": planning.analyze,
    "profile": planning.profile,
    "search": planning.search,
}
for _name, _function in _COMMANDS.items():
    _settings = None if _name == "show" else PASS_ON
    app.command(_name, context_settings=_settings)(_function)


@app.command("doctor", context_settings={**PASS_ON, "help_option_names": []})
def _doctor(context: typer.Context) -> None:
    """Check this machine for planning, with a remedy for each failure."""
    # Seldom reached: `cfp.__main__` runs doctor without the imports of this module.
    raise typer.Exit(doctor(context.args))


@app.command("operators", context_settings={**PASS_ON, "help_option_names": []})
@one_message()
def _operators(context: typer.Context, _: Any) -> None:
    """Check and time implementations of the operators of models."""
    raise typer.Exit(import_module("cfp.operators.command").main(context.args))


def _print_version(wanted: bool) -> None:
    if wanted:
        from cfp import __version__

        print(f"cfp {__version__}")
        raise typer.Exit


@app.callback()
@one_message(
    version=Option(bool, "Print the version.", callback=_print_version, is_eager=True),
    traceback=Option(
        bool,
        "Also print the whole traceback of an error. May be given anywhere in the "
        "command.",
    ),
    coordinator=Option(
        str,
        "Run as one of several processes, on all of their devices: address of process "
        "0. Give the command to every process.",
        metavar="HOST:PORT",
    ),
    processes=Option(int, "Number of processes.", metavar="N"),
    process_id=Option(int, "This process's number, from 0 to N - 1.", metavar="I"),
    join=Option(
        bool,
        "Run as one of several processes that JAX detects: under Slurm, Open MPI, "
        "Kubernetes.",
    ),
)
def _common(_: typer.Context, given: Any) -> None:
    # Commands that use devices, and cfp.join(), read these variables.
    variables = {
        COORDINATOR: given.coordinator,
        PROCESSES: given.processes,
        PROCESS_ID: given.process_id,
        JOIN: "1" if given.join else None,
        TRACEBACK: "1" if given.traceback else None,
    }
    os.environ.update({k: str(v) for k, v in variables.items() if v is not None})


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
