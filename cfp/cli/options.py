"""Options that commands share, wrappers of all commands, and their output."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, fields
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, Signature
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import typer

from cfp.analysis.presets import check_preset
from cfp.cli.supervise import Supervision
from cfp.context import DetailedSettings, PlannerSettings, dimensions_of
from cfp.errors import CfpError
from cfp.plan.plan import Plan
from cfp.printable import parse_bytes
from cfp.profiling.coordination import is_follower
from cfp.profiling.store import store_path
from cfp.profiling.tasks import Limits, Progress
from cfp.program.trace import PRECISIONS
from cfp.settings import ConstraintLevel
from cfp.variants import SEARCH_INSTEAD
from cfp.view.console import wrapped
from cfp.view.remarks import unplanned_text
from cfp.view.text import print_plan
from cfp.view.words import is_within_budget, sentence, throughput


def print_error(message: str) -> None:
    """Prints ``error: message`` to the error stream."""
    print(f"error: {message}", file=sys.stderr)


def save(made: Plan, output: Path | None) -> list[str]:
    """Saves a plan in process 0, and returns lines to print; [] if nothing is saved.

    Raises:
        CfpError: the file cannot be written.
    """
    if output is None or is_follower():
        return []
    try:
        made.save(output)
    except OSError as error:
        raise CfpError(f"Cannot write {output}: {error.strerror}.") from error
    return [f"Saved {output}", *wrapped(sentence(unplanned_text(made))).splitlines()]


class Answer(NamedTuple):
    """Result: `data` makes --json's document, `show` prints; exit code 1 if failed."""

    data: Callable[[], Any]
    show: Callable[[], None]
    failed: bool = False


def plan_answer(made: Plan, output: Path | None, *more: str) -> Answer:
    """Answer with a plan and `more` lines, saved to `output`; failed over budget."""
    then = "then run it with cfp run --plan plan.json"
    if "described" in made.environment:
        then = "on its devices, cfp verify plan.json TARGET times it"
    lines = save(made, output) or [f"Save a plan with -o plan.json; {then}"]
    fits = is_within_budget(made)
    lines += [] if fits else [wrapped(f"It does not fit. {SEARCH_INSTEAD}")]

    def data() -> dict[str, Any]:
        rates = throughput(made)
        return {**json.loads(made.to_json()), "throughput": rates and asdict(rates)}

    def show() -> None:
        print_plan(made)
        for line in (*more, *lines):
            print(line)

    return Answer(data, show, failed=not fits)


def leave_printing_to_process_0() -> None:
    """Silences the standard output of all processes but process 0."""
    if is_follower():
        sys.stdout = io.StringIO()


VARIANTS = "Meshes, batches and arguments"
KERNELS = "Kernels"
MEASURING = "Measuring and racing"
OUTPUT = "Output and folders"


class Option:
    """An option of a command.

    Args:
        kind: type of the value; flags (bool) are False by default, others None.
        text: text of the help.
        flags: names of the option; by default that of the parameter.
        under: heading in the help; by default Arguments or Options.
        maker: `typer.Option` or `typer.Argument`; `how` has its further arguments.
    """

    def __init__(
        self,
        kind: Any,
        text: str,
        *flags: str,
        default: Any = None,
        under: str | None = None,
        maker: Callable[..., Any] = typer.Option,
        **how: Any,
    ) -> None:
        default = False if kind is bool else default
        self.kind = kind if default is not None else kind | None
        self.flags, self.default, self.maker = flags, default, maker
        self.how = {"help": text, "rich_help_panel": under, **how}

    def parameter(self, name: str) -> Parameter:
        """Makes the parameter of a command's function, as typer reads it."""
        flags = self.flags
        if self.kind is bool and not flags:  # A name keeps typer from adding --no-.
            flags = (f"--{name.replace('_', '-')}",)
        return Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[self.kind, self.maker(*flags, **self.how)],
        )


def argument(metavar: str, text: str, kind: Any = str, default: Any = ...) -> Option:
    """Makes a positional argument of a command; ... as the default: required."""
    default = Parameter.empty if default is ... else default
    how = {"maker": typer.Argument, "metavar": metavar, "show_default": False}
    return Option(kind, text, default=default, **how)


def _positions(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is no argument's position: give numbers from 0, such as 0,1."
        ) from error


def _together(given: Sequence[tuple[int, ...]] | None) -> list[int] | None:
    """Joins the values of a repeated option in one list; None if not given."""
    return [number for numbers in given for number in numbers] if given else None


TARGET_TEXT = (
    "A model with its options following (gpt --layers 4), file.py:function, or "
    "package.module:function, which returns (train_step, args); its parameters are "
    "options."
)
_POSITIONS = {"metavar": "N", "parser": _positions, "callback": _together}
_VIRTUAL = "cpu, with as many virtual devices as needed, or cuda; "


def _setting(
    of: Any, name: str, kind: Any, under: str | None = MEASURING, **how: Any
) -> Option:
    """Makes a setting's option; its help is from the docstring of the settings `of`."""
    text = re.search(rf" {name}: (.*?\.)\s", inspect.getdoc(of) or "", re.DOTALL)
    usual = getattr(of, name)
    default = usual if "min" in how and isfinite(usual) else None
    words = " ".join(text[1].split()) if text else ""
    return Option(kind, sentence(words), default=default, under=under, **how)


_USUAL = PlannerSettings()
_of_settings = partial(_setting, _USUAL)
_of_limits = partial(_setting, _USUAL.limits, kind=float, metavar="SECONDS", min=1)
# Options that several commands have.
OPTIONS: Mapping[str, Option] = {
    "path": argument("PLAN", "A saved plan.", Path),
    "target": argument("TARGET", TARGET_TEXT),
    "saved": Option(Path, "A plan saved by cfp plan -o.", "--plan"),
    "devices": Option(
        int, "Number of devices: usually a mesh with one axis, x.", metavar="N", min=1
    ),
    "mesh": Option(str, "x=4, or x=2,y=2.", metavar="AXES"),
    "described": Option(
        str,
        "Plan by estimates for devices that are not here: 4xh200, 2x8xh100 (hosts x "
        "devices x kind), v5e:4x4, or a description such as cluster.toml.",
        "--for",
        metavar="CLUSTER",
    ),
    "platform": Option(str, f"{_VIRTUAL}by default JAX's choice.", metavar="NAME"),
    "memory_budget": Option(
        str,
        "Memory of one device that a plan may use, such as 80GiB; on GPUs 128 MiB of "
        "it are left for the allocator.",
        metavar="SIZE",
    ),
    "time_budget": _of_settings("seconds", float, None, metavar="SECONDS", min=0),
    "preset": Option(
        str,
        "Take a preset instead of searching: data_parallel, fully_sharded, ...",
        metavar="NAME",
    ),
    "pin": Option(
        list[str],
        "Keep a sharding: 'PATTERN=None,x', the pattern a glob over argument paths. "
        "May be given more than once.",
        metavar="PIN",
    ),
    "donate": Option(
        list[int],
        "Positions of arguments that a function's step may overwrite: 0,1, or the "
        "option again for each.",
        **_POSITIONS,
    ),
    "output": Option(
        Path, "Save the plan here, as JSON.", "--output", "-o", metavar="FILE"
    ),
    "static": Option(
        list[int],
        "Positions of arguments of a function's step that are no arrays: 0,1, or the "
        "option again for each.",
        under=VARIANTS,
        **_POSITIONS,
    ),
    "choose": _of_settings("choose", str, metavar="NAMES"),
    "kernels": _of_settings("kernels", str, KERNELS, metavar="KERNELS"),
    "precision": _of_settings("precision", str, KERNELS, metavar="|".join(PRECISIONS)),
    "per_kind": _of_settings("per_kind", int, metavar="N", min=1),
    "others": _of_settings("others", int, metavar="COUNT", min=0),
    "measure": _of_settings("measure", bool),
    "retry_failures": _of_settings("retry_failures", bool),
    "ray": _of_settings("ray", str, metavar="ADDRESS"),
    "run_timeout": _of_limits("run_seconds"),
    "build_timeout": _of_limits("build_seconds"),
    "quick": Option(
        bool,
        "Measure less: segments alone, and candidates constrained throughout.",
        under=MEASURING,
    ),
    "no_race": Option(
        bool,
        "Choose by prediction; do not time whole programs. With --memory-budget the "
        "plan is compiled, to see whether it fits.",
        under=MEASURING,
    ),
    "workdir": Option(
        Path,
        "Folder for profiles.sqlite and debug folders; by default the user's cache, "
        "without debug folders.",
        under=OUTPUT,
        metavar="DIR",
    ),
    "as_json": Option(
        bool, "Print one JSON document, and nothing else.", "--json", under=OUTPUT
    ),
    "other_devices": Option(
        bool, "Try the plan on devices of another kind, or under another JAX, too."
    ),
    "quiet": Option(bool, "Show no progress.", "--quiet", "-q", under=OUTPUT),
}
_PLANS = f"{_VIRTUAL}by default the plan's if cpu, else JAX's choice."
PLANS_PLATFORM = Option(str, _PLANS, metavar="NAME")

# Coloured help on a terminal.
MARKUP: Any = "rich" if sys.stdout.isatty() else None

# Environment variable for --traceback.
TRACEBACK = "CFP_TRACEBACK"

# Exit code of a command that the user interrupted, as in shells.
INTERRUPTED = 130

# Passes options that a command does not know to the target.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


Body = Callable[[Any, Any], Answer | None]


def command(*names: str, **own: Option) -> Callable[[Body], Callable[..., None]]:
    """Returns a decorator: function(context, values) becomes one that typer can call.

    Prints the function's answer. Exit code: 1 if the answer failed, 2 after a CfpError,
    which is printed, and 130 after an interrupt.

    Args:
        names: names of shared `OPTIONS`.
        own: options of this command, which may replace shared ones.
    """
    options = {name: own.get(name) or OPTIONS[name] for name in names} | own
    ctx = Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def wrapped_by(function: Body) -> Callable[..., None]:
        def run(ctx: typer.Context, **given: Any) -> None:
            _with_one_message(function, ctx, given)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        parameters = [one.parameter(name) for name, one in options.items()]
        # Typer reads the options from it; type checkers do not know it.
        vars(run)["__signature__"] = Signature([ctx, *parameters])
        run.__annotations__ = {}
        return run

    return wrapped_by


def _with_one_message(
    function: Body, ctx: typer.Context, given: dict[str, Any]
) -> None:
    stdout, as_json = sys.stdout, bool(given.get("as_json"))
    try:
        parse_bytes(given.get("memory_budget"))
        check_preset(given.get("preset"))
        # With --json one document goes to stdout, and all other output to stderr.
        with contextlib.redirect_stdout(sys.stderr if as_json else stdout):
            answer = function(ctx, SimpleNamespace(**given))
            if answer is not None and not as_json:
                answer.show()
        if answer is not None and as_json and not is_follower():
            print(json.dumps(answer.data(), indent=1))
        if answer is not None and answer.failed:
            raise typer.Exit(1)
    except CfpError as error:
        print_error(str(error))
        if "static_argnums" in str(error):
            print("On the command line, give --static N.", file=sys.stderr)
        own = [flag for one in ctx.command.params for flag in one.opts]
        if unknown := re.search(r"no option (--\S+), and neither has", str(error)):
            for near in {*get_close_matches(unknown[1], own, 1, 0.75)} - {unknown[1]}:
                print(f"Did you mean the command's {near}?", file=sys.stderr)
        if os.environ.get(TRACEBACK):
            traceback.print_exception(error)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        kept = store_path(given.get("workdir"))
        print_error(wrapped(f"Interrupted. Stored measurements are kept in {kept}."))
        raise typer.Exit(INTERRUPTED) from error


def supervise(ctx: typer.Context, workdir: Path | None) -> None:
    """Calls `Supervision.enter`, which may fork, if the shell started the command."""
    if isinstance(ctx.obj, Supervision):
        ctx.obj.enter(store_path(workdir))


# Functions that convert an option's text to its setting's type.
_READ: Mapping[str, Callable[[str], Any]] = {
    "choose": lambda text: tuple(sorted(dimensions_of(text.split(",")))),
    "kernels": lambda text: tuple(n for n in text.split(",") if n != "none"),
}


def settings(
    ctx: typer.Context, progress: Callable[[Progress | str], None]
) -> PlannerSettings:
    """Makes planner settings from a command's options, except --ray."""
    given = {"measure": True, **ctx.params}
    given |= {"seconds": given.get("time_budget"), "ray": None}
    found = {
        one.name: _READ.get(one.name, lambda value: value)(given[one.name])
        for one in fields(PlannerSettings)
        if given.get(one.name) is not None
    }
    found |= {"race": not given.get("no_race"), "measure": given["measure"] or None}
    if given.get("retry_failures"):
        found["retry_failures"] = getattr(ctx.obj, "started", True)
    if "run_timeout" in given:
        found["limits"] = Limits(
            run_seconds=given["run_timeout"], build_seconds=given["build_timeout"]
        )
    if given.get("quick"):
        found["in_context"] = False
        found["constraint_levels"] = (ConstraintLevel.EVERYTHING,)
    return DetailedSettings(progress=progress, **found)


# ------------------------------------------------------- options that exclude others


def mode_of(
    ctx: typer.Context, modes: Mapping[str, Collection[str]], parts: Mapping[str, str]
) -> str | None:
    """Returns the name of the given parameter that selects a mode; None without one.

    Args:
        modes: for each mode's parameter, the parameters allowed beside it.
        parts: {parameter that needs a mode: that mode's parameter}.

    Raises:
        CfpError: given parameters exclude each other, or one lacks its mode.
    """
    flags = {p.name: max(p.opts, key=len) for p in ctx.command.params}
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = [n for n, s in sources.items() if s is not None and s.name == "COMMANDLINE"]
    mode = next((name for name in modes if name in given), None)
    for name in given:
        if mode is not None and name != mode and name not in modes[mode]:
            flag = flags[name] if flags[name].startswith("-") else flags[name].upper()
            raise CfpError(f"{flag} does not go with {flags[mode]}. Leave out one.")
        if mode is None and name in parts:
            raise CfpError(f"{flags[name]} needs {flags[parts[name]]}. Give both.")
    return mode
