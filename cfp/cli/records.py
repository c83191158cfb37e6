"""Commands about measurements that are no plan's: moved elsewhere, and of links."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import jax
import typer

from cfp import platform as platforms
from cfp.cli import options as o
from cfp.cli import values
from cfp.devices.exported import description_of
from cfp.errors import CfpError
from cfp.printable import columns
from cfp.profiling.collectives import measure_rates
from cfp.profiling.exported import read_export
from cfp.profiling.key import environment_parts, other_kind
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore, store_path
from cfp.report.console import literal_console
from cfp.report.curves import curves_data, curves_table, plot_curves
from cfp.report.fitted import Fitted
from cfp.report.progress import Display


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
    failure and the other is not. A file with an error in it adds nothing. Those of
    another kind of machine are kept apart: they answer nothing here.

    Example: cfp profile import node0.jsonl node1.jsonl
    """
    with ProfileStore(store_path(workdir)) as store:
        for file in files:
            print(f"{store.merge(file)} measurements added from {file}")
            for line in _kept_apart(read_export(file)):
                print(line)
        print(f"{len(store)} in {store.path}")


def _kept_apart(records: Sequence[ProfileRecord]) -> Iterator[str]:
    """Says which records are of other kinds of machines than this one."""
    here = environment_parts(jax.devices())
    found = Counter(other_kind(record.parts, here) for record in records)
    for how, count in found.items():
        if how:
            yield f"  {count} of another kind of machine, kept apart: {how}"


@o.measuring
def curves(
    ctx: typer.Context,
    devices: o.Devices = None,
    mesh: o.MeshText = None,
    platform: o.Platform = None,
    workdir: o.Workdir = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the curves, as .png, .svg or .pdf."),
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="What one device's links can send, to compare with: 450 for an H200.",
            min=0.001,
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a description of these devices for cfp plan --for, as .toml.",
        ),
    ] = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure how fast the devices of a mesh talk to each other, or look it up.

    Example: cfp profile curves --mesh x=4 --plot curves.png --link 450
    """
    values.check_drawable(plot)
    values.check_writable(export, "--export")
    axes = platforms.parse_mesh(devices, mesh)
    with o.only_json(as_json) as print_json:
        platforms.select(platform, axes)
        with (
            ProfileStore(store_path(workdir)) as store,
            Display(quiet) as display,
        ):
            devices_mesh = platforms.make_mesh(axes)
            rates = measure_rates(devices_mesh, store, progress=display.tell)
        if export is not None:
            export.write_text(description_of(devices_mesh, rates))
        if plot is not None:
            plot_curves([("", rates)], plot, link)
        if as_json:
            print_json(json.dumps(curves_data(rates, link), indent=1))
        else:
            literal_console(width=columns()).print(Fitted(curves_table(rates, link)))


# By the words that call them: the second word after "profile" is else a target.
COMMANDS = {
    "profile export": export_profiles,
    "profile import": import_profiles,
    "profile curves": curves,
}
