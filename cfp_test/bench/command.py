"""`cfp bench`: plans against what experts write, a cost model, and PyTorch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cfp import platform
from cfp.cli import options as o
from cfp.cli.session import check_writable
from cfp.errors import CfpError
from cfp.models.options import Scalar
from cfp.program.trace import planning_mesh
from cfp.report.progress import Display
from cfp.targets import parse_options
from cfp.units import parse_bytes
from cfp_test.bench import clock
from cfp_test.bench.compete import SuiteOptions
from cfp_test.bench.competitors import GROUPS
from cfp_test.bench.configs import SUITES, configs
from cfp_test.bench.journal import Journal
from cfp_test.bench.rows import changes
from cfp_test.bench.suite import run_suite
from cfp_test.bench.tables import print_changes, print_configuration


@o.command
def bench(
    ctx: typer.Context,
    suite: Annotated[
        str,
        typer.Option(
            help="layers: a few layers at full width; models: whole models; tiny: to "
            "see it work, on a CPU."
        ),
    ] = "layers",
    models: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Some of the models: gpt,moe."),
    ] = None,
    devices: o.Devices = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXES",
            help="Mesh to plan for, such as x=4; may be given more than once.",
        ),
    ] = None,
    platform_name: Annotated[
        str | None, typer.Option("--platform", help="cpu or cuda.")
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Ways to compare: handwritten,cost_model,preset; all, if not given.",
        ),
    ] = None,
    handwritten: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Some of the hand-written strategies."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="How many turns each competitor gets.", min=1)
    ] = 5,
    pytorch: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rows that alpa_test/pytorch wrote."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all results here."),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Earlier results to compare these with."),
    ] = None,
    memory_budget: o.Budget = None,
    workdir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for measurements; a new one that is deleted, if not given, so "
            "that planning costs what it costs the first time.",
        ),
    ] = None,
    per_kind: o.PerKind = o.USUAL.per_kind,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Plan with fewer measurements, and time two steps a turn."
        ),
    ] = False,
    no_race: o.NoRace = False,
    retry_failures: o.RetryFailures = False,
    run_timeout: o.RunTimeout = o.USUAL.limits.run_seconds,
    build_timeout: o.BuildTimeout = o.USUAL.limits.build_seconds,
    no_trace: Annotated[
        bool,
        typer.Option("--no-trace", help="Skip tracing, which tells where time goes."),
    ] = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare plans with shardings written by hand, a cost model, and PyTorch.

    All competitors of a configuration are first checked against one device, and then
    timed in turn in one process. What ends that process, or hangs, is out, and another
    process goes on. Options that this command does not know are the models':
    --layers 2 --batch 16 --dtype float32. Runs in a clone of cfp.

    The example takes six minutes on two cores. On GPUs planning alone takes one to two
    minutes for each model and mesh, and all its competitors are compiled and timed.

    Example: cfp bench --suite tiny --models gpt --devices 4 --platform cpu --quick
    """
    check_writable(json_file, "--json")
    if devices is not None and mesh:
        raise CfpError("Give --devices or --mesh, not both.")
    axes = [platform.parse_mesh(None, text) for text in mesh or ()]
    axes = axes or [platform.parse_mesh(devices, None)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kept = Path(folder) / "journal.json"
        workdir = workdir or Path(folder)
        try:
            o.supervise(ctx, workdir, lambda: Journal(kept).steps)
            platform.select(platform_name, axes[0])
            meshes = [planning_mesh(platform.make_mesh(one)) for one in axes]
            if len({one.size for one in meshes}) > 1:
                raise CfpError("All meshes must have the same number of devices.")
            wanted = _models(suite, _names(models))
            compared = _groups(_names(groups))
            before = None if compare is None else read_results(compare)
            torch_rows = [] if pytorch is None else read_rows(pytorch)
            made = configs(suite, wanted, _overrides(wanted, ctx.args), meshes[0].size)
            workdir.mkdir(parents=True, exist_ok=True)
            with Display(quiet) as display:
                options = SuiteOptions(
                    workdir=workdir,
                    settings=o.settings(ctx, progress=display.tell),
                    rounds=rounds,
                    timing=clock.QUICK_TURN if quick else None,
                    groups=compared,
                    only=_names(handwritten),
                    budget_bytes=parse_bytes(memory_budget),
                    pytorch=torch_rows,
                    trace=not no_trace,
                    tell=display.tell,
                    journal=Journal(kept),
                )
                results = run_suite(suite, made, meshes, options, _keeping(json_file))
                if before is not None:
                    print_changes(changes(before, results))
        except KeyboardInterrupt as error:
            finished = len(Journal(kept).finished)
            where = f" and stand in {json_file}" if finished and json_file else ""
            o.print_error(f"Interrupted. Configurations finished: {finished}{where}.")
            raise typer.Exit(o.INTERRUPTED) from error
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
        print(f"Saved {json_file}")


def command() -> Any:
    """The command, parsed as those of `cfp` are."""
    app = typer.Typer(add_completion=False, rich_markup_mode=o.MARKUP)
    app.command(cls=o.Command, context_settings=o.PASS_ON)(bench)
    return typer.main.get_command(app)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _models(suite: str, names: Sequence[str]) -> list[str]:
    """The models of a suite, or those of them that were named.

    Raises:
      CfpError: there is no such suite, or no such model in it.
    """
    if suite not in SUITES:
        raise CfpError(f"There is no suite {suite!r}. There are: {', '.join(SUITES)}.")
    for model in names:
        if model not in SUITES[suite]:
            raise CfpError(
                f"The suite {suite} has no model {model!r}. It has: "
                f"{', '.join(SUITES[suite])}."
            )
    return list(names or SUITES[suite])


def _groups(names: Sequence[str]) -> Sequence[str]:
    """The groups that were named, and the plan; all, if none were.

    Raises:
      CfpError: there is no such group.
    """
    for group in names:
        if group not in GROUPS:
            raise CfpError(
                f"There are no competitors {group!r}. There are: {', '.join(GROUPS)}."
            )
    return [*dict.fromkeys(("planned", *names))] if names else GROUPS


def _keeping(json_file: Path | None) -> Callable[[dict[str, Any]], None]:
    """Returns a function that prints the latest configuration, and keeps all so far."""

    def keep(results: dict[str, Any]) -> None:
        print_configuration(results["configurations"][-1])
        if json_file is not None:
            json_file.write_text(json.dumps(results, indent=1) + "\n")

    return keep


def _overrides(models: Sequence[str], words: Sequence[str]) -> dict[str, Scalar]:
    """Options of models from `--layers 2 --dtype float32`, for all that have them.

    Raises:
      CfpError: none of the models has an option, or its value is none.
    """
    errors = []
    for model in models:
        try:
            return parse_options(model, words)
        except CfpError as error:
            errors.append(error)
    raise errors[0]


def read_results(path: Path) -> Mapping[str, Any]:
    """Reads what an earlier run wrote.

    Raises:
      CfpError: the file is none.
    """
    try:
        data = json.loads(path.read_text())
        if data["format"] == 1 and "configurations" in data:
            return data
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CfpError(f"Cannot read results from {path}: {error}") from error
    raise CfpError(f"{path} does not hold results of cfp bench.")


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """Reads the rows of JSON, one on each line, that PyTorch's runs wrote.

    Raises:
      CfpError: the file holds none.
    """
    try:
        lines = path.read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        for row in rows:
            row["model"], row["options"], row["devices"], row["name"], row["status"]
        return rows
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CfpError(f"Cannot read PyTorch's rows from {path}: {error}") from error
