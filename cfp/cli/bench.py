"""`cfp bench`: compares plans with what experts write, and with a cost model."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from cfp import platform
from cfp.cli import options as o
from cfp.cli.output import print_error
from cfp.cli.session import check_writable
from cfp.errors import CfpError
from cfp.planner_settings import PlannerSettings
from cfp.program.trace import planning_mesh
from cfp.report.progress import Display
from cfp.units import parse_bytes

_PER_KIND = PlannerSettings().per_kind
_LIMITS = PlannerSettings().limits
_COMMAND = "cfp_test.bench.command"


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
    per_kind: o.PerKind = _PER_KIND,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Plan with fewer measurements, and time two steps a turn."
        ),
    ] = False,
    no_race: o.NoRace = False,
    retry_failures: o.RetryFailures = False,
    run_timeout: o.RunTimeout = _LIMITS.run_seconds,
    build_timeout: o.BuildTimeout = _LIMITS.build_seconds,
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

    Example: cfp bench --suite tiny --models gpt --devices 4 --platform cpu --quick
    """
    command = _baselines()
    check_writable(json_file, "--json")
    if devices is not None and mesh:
        raise CfpError("Give --devices or --mesh, not both.")
    axes = [platform.parse_mesh(None, text) for text in mesh or ()]
    axes = axes or [platform.parse_mesh(devices, None)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kept = Path(folder) / "journal.json"
        workdir = workdir or Path(folder)
        try:
            o.supervise(ctx, workdir, lambda: command.Journal(kept).steps)
            platform.select(platform_name, axes[0])
            meshes = [planning_mesh(platform.make_mesh(one)) for one in axes]
            if len({one.size for one in meshes}) > 1:
                raise CfpError("All meshes must have the same number of devices.")
            with Display(quiet) as display:
                results = command.bench(
                    suite,
                    _names(models),
                    ctx.args,
                    meshes,
                    settings=o.settings(ctx, progress=display.tell),
                    workdir=workdir,
                    journal=command.Journal(kept),
                    groups=_with_planned(_names(groups)),
                    handwritten=_names(handwritten),
                    rounds=rounds,
                    quick=quick,
                    budget_bytes=parse_bytes(memory_budget),
                    pytorch=pytorch,
                    compare=compare,
                    json_file=json_file,
                    trace=not no_trace,
                    tell=display.tell,
                )
        except KeyboardInterrupt as error:
            finished = len(command.Journal(kept).finished)
            where = f" and stand in {json_file}" if finished and json_file else ""
            print_error(f"Interrupted. Configurations finished: {finished}{where}.")
            raise typer.Exit(o.INTERRUPTED) from error
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
        print(f"Saved {json_file}")


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _with_planned(groups: list[str]) -> list[str]:
    return ["planned", *groups] if groups and "planned" not in groups else groups


def _baselines() -> ModuleType:
    """The part of the repository that is not installed with cfp.

    Raises:
        CfpError: this is no clone of the repository.
    """
    root = Path(__file__).parents[2]
    for folder in (root, Path.cwd()):
        if (folder / "cfp_test" / "bench").is_dir():
            sys.path.insert(0, str(folder))
            return importlib.import_module(_COMMAND)
    raise CfpError(
        "cfp bench compares with baselines that are not part of the installed package. "
        "Clone the repository, and run python -m cfp bench in the clone."
    )
