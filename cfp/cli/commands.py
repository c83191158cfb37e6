"""Headings in a command's help, and options that exclude others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand

from cfp.errors import ATTEMPT, CfpError, nearest
from cfp.targets import UnknownOption


class Command(TyperCommand):
    """A command whose help has headings without a terminal, too."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments and options under their headings."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                panels.setdefault(panel_of(param), []).append(record)
        for name, rows in panels.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)


def panel_of(param: Any) -> str:
    """Returns the heading of an option or argument in a command's help."""
    kind = "Arguments" if param.param_type_name == "argument" else "Options"
    return getattr(param, "rich_help_panel", None) or kind


def is_given(ctx: typer.Context, name: str) -> bool:
    """Returns True if the user gave a parameter on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def with_nearest_option(error: UnknownOption, ctx: typer.Context) -> str:
    """Writes what to try into the message on an option that a target does not have.

    The error knows of the target's own options alone.
    """
    commands = getattr(ctx.parent and ctx.parent.command, "commands", {})
    elsewhere = [
        f"cfp {name}" for name, one in commands.items() if error.flag in _flags(one)
    ]
    if elsewhere:
        attempt = f"without {error.flag}, which is an option of {', '.join(elsewhere)}"
    else:
        near = nearest(error.flag, [*error.known, *_flags(ctx.command)])
        attempt = f"{near}{ctx.command_path} --help lists the options of the command"
    before, label, _ = str(error).rpartition(ATTEMPT)
    return f"{before}{label}{attempt}"


def _flags(command: Any) -> list[str]:
    return [
        flag
        for param in command.params
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    ]


def refuse_others(ctx: typer.Context, mode: str, takes: Collection[str]) -> None:
    """Refuses options that do not go with another one.

    Args:
        ctx: of the command.
        mode: the parameter that was given.
        takes: the parameters that go with it.

    Raises:
        CfpError: another one was given, too.
    """
    flags = {p.name: max(p.opts, key=len) for p in ctx.command.params}
    for name in ctx.params:
        if name != mode and name not in takes and is_given(ctx, name):
            flag = flags[name] if flags[name].startswith("-") else flags[name].upper()
            raise CfpError(f"{flag} does not go with {flags[mode]}. Leave out one.")
