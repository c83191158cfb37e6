"""`cfp launch`: a program as several processes, under what a site has for that."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from cfp.cli import options as o
from cfp.cluster.launch import scripts
from cfp.cluster.launch.local import HERE, dry_lines, free_port, launch_locally
from cfp.cluster.launch.processes import Ended
from cfp.cluster.launch.rayed import bundles, launch_on_ray, strategy
from cfp.cluster.launch.request import Launch
from cfp.errors import CfpError, compose


class Where(StrEnum):
    """What starts processes."""

    SLURM = "slurm"
    MPI = "mpi"
    LSF = "lsf"
    K8S = "k8s"
    RAY = "ray"
    LOCAL = "local"


_SUBMIT = {
    Where.SLURM: ("sbatch",),
    Where.LSF: ("bsub",),
    Where.K8S: ("kubectl", "apply", "-f", "-"),
}


@o.command
def launch(
    where: Annotated[
        Where,
        typer.Argument(help="What starts the processes.", show_default=False),
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="The program and its arguments, after --.",
            show_default=False,
        ),
    ],
    nodes: Annotated[int, typer.Option(metavar="N", help="How many hosts.", min=1)] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(metavar="G", help="GPUs of each host.", min=0)
    ] = 0,
    processes_per_node: Annotated[
        int,
        typer.Option(
            metavar="P",
            help="Processes on each host: one has all of its GPUs, of several each has "
            "its share.",
            min=1,
        ),
    ] = 1,
    cpus_per_process: Annotated[
        int | None, typer.Option(metavar="C", help="Processor cores of each.", min=1)
    ] = None,
    minutes: Annotated[
        int, typer.Option(metavar="M", help="When a job is over.", min=1)
    ] = 60,
    name: Annotated[str, typer.Option(metavar="NAME", help="Of the job.")] = "cfp",
    setup: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINE",
            help="A line of shell before the program, such as 'module load cfp'. May "
            "be given more than once.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="An option of the scheduler, such as --option=--account=abc. May be "
            "given more than once.",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="HOST,HOST", help="mpi: where; the first has process 0."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="k8s: with cfp and the program.")
    ] = None,
    address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="ray: auto, host:port, or local.")
    ] = "auto",
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Where process 0 is reached; one that is free, if not given.",
            min=1,
            max=65535,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done; do nothing.")
    ] = False,
) -> None:
    """Start a program as several processes: slurm, mpi, lsf, k8s, ray or local.

    The program calls cfp.join() before it uses JAX's devices, and they are one program.

    Example: cfp launch slurm --nodes 2 --gpus-per-node 8 -- python train.py

    Example: cfp launch local --nodes 2 --dry-run -- python train.py
    """
    made = Launch(
        command=tuple(command),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        processes_per_node=processes_per_node,
        cpus_per_process=cpus_per_process,
        minutes=minutes,
        name=name,
        setup=tuple(setup or ()),
        options=tuple(option or ()),
        hosts=tuple(filter(None, (hosts or "").split(","))),
        image=image,
        port=port,
    )
    match where:
        case Where.LOCAL:
            code = _dry(dry_lines(made)) if dry_run else _ended(launch_locally(made))
        case Where.RAY:
            lines = [
                f"placement group, {strategy(made)}: {bundles(made)}",
                *dry_lines(made, f"HOST0:{port or 'PORT'}"),
            ]
            code = _dry(lines) if dry_run else _ended(launch_on_ray(made, address))
        case Where.MPI:
            words = scripts.mpi_command(made, _coordinator(made))
            lines = [shlex.join(words)]
            code = _dry(lines) if dry_run else _run(words)
        case _:
            text = _text(where, made)
            code = _dry(text.splitlines()) if dry_run else _run(_SUBMIT[where], text)
    if code:
        raise typer.Exit(code)


def _text(where: Where, made: Launch) -> str:
    match where:
        case Where.SLURM:
            return scripts.slurm_script(made)
        case Where.LSF:
            return scripts.lsf_script(made)
    if made.image is None:
        raise CfpError(
            compose(
                "A pod needs a container's image.",
                expected="an image with cfp and the program",
                got="none",
                attempt="--image HOST/NAME:TAG; docs/install/container.md makes one",
            )
        )
    return scripts.jobset_manifest(made)


def _coordinator(made: Launch) -> str:
    if made.hosts:
        host = made.hosts[0]
    else:
        # In an allocation mpirun runs on its first node, and so does process 0.
        host = HERE if made.nodes == 1 else socket.gethostname()
    return f"{host}:{made.port or free_port()}"


def _dry(lines: Sequence[str]) -> int:
    print("\n".join(lines))
    return 0


def _run(words: tuple[str, ...], text: str | None = None) -> int:
    if shutil.which(words[0]) is None:
        raise CfpError(
            compose(
                f"There is no {words[0]} here.",
                expected=f"{words[0]} on the PATH",
                got="none",
                attempt="a machine that has it; --dry-run prints what it is given",
            )
        )
    done = subprocess.run(
        words, input=None if text is None else text.encode(), check=False
    )
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _ended(ended: Ended) -> int:
    if ended.first is not None:
        print(
            f"Process {ended.first} ended with exit code {ended.code}; all others were "
            "ended.",
            file=sys.stderr,
        )
    return ended.code
