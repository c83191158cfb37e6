"""The commands that move measurements from one machine's store to another's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cfp.cli import options as o
from cfp.errors import CfpError
from cfp.profiling.store import ProfileStore, store_path


@o.command
def export_profiles(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Where to write.", show_default=False),
    ],
    workdir: o.Workdir = None,
) -> None:
    """Write all stored measurements to a file, to be imported elsewhere.

    Example: cfp profile export records.jsonl --workdir work
    """
    path = store_path(workdir)
    if not path.exists():
        raise CfpError(
            f"There are no measurements to export: {path} does not exist. Run "
            "cfp profile first, or name its folder with --workdir."
        )
    with ProfileStore(path) as store:
        count = store.export(file)
    print(f"{count} measurements written to {file}")


@o.command
def import_profiles(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Written by export.", show_default=False),
    ],
    workdir: o.Workdir = None,
) -> None:
    """Add measurements that were exported elsewhere to those stored here.

    Of two measurements of the same thing the one that is here stays, unless it is a
    failure and the other is not. A file with an error in it adds nothing.

    Example: cfp profile import node0.jsonl node1.jsonl
    """
    with ProfileStore(store_path(workdir)) as store:
        for file in files:
            print(f"{store.merge(file)} measurements added from {file}")
        print(f"{len(store)} in {store.path}")


# By the words that call them: the second word after "profile" is else a target.
COMMANDS = {"profile export": export_profiles, "profile import": import_profiles}
