"""The modes of `cfp profile` without a step: export, import and curves of links."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import jax
import typer

from cfp import platform as platforms
from cfp.cli import values
from cfp.cli.output import only_json
from cfp.devices.schema import description_of
from cfp.errors import CfpError
from cfp.printable import columns
from cfp.profiling.collectives import measure_rates
from cfp.profiling.exported import read_export
from cfp.profiling.key import environment_parts, other_kind
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore, store_path
from cfp.report.console import Fitted, literal_console
from cfp.report.curves import curves_data, curves_table, plot_curves
from cfp.report.progress import Display

_PANEL = "Instead of a step's measurements"
_CURVES = "Curves of links"
Export = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write all stored measurements to a file, to be imported elsewhere.",
        rich_help_panel=_PANEL,
    ),
]
Import = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        help="Add measurements that were exported elsewhere to those stored here; may "
        "be given more than once. Of two measurements of the same thing the one that "
        "is here stays, unless it is a failure and the other is not. A file with an "
        "error in it adds nothing. Those of another kind of machine are kept apart: "
        "no plan here uses them.",
        rich_help_panel=_PANEL,
    ),
]
Curves = Annotated[
    bool,
    typer.Option(
        "--curves",
        help="Measure the rates of collectives over each axis of a mesh, or look them "
        "up.",
        rich_help_panel=_PANEL,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw the curves, as .png, .svg or .pdf.",
        rich_help_panel=_CURVES,
    ),
]
Link = Annotated[
    float | None,
    typer.Option(
        metavar="GB/S",
        help="Rate of one device's links, to compare with: 450 for an H200.",
        min=0.001,
        rich_help_panel=_CURVES,
    ),
]
Describe = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a description of these devices for cfp plan --for, as .toml.",
        rich_help_panel=_CURVES,
    ),
]
# Options that go with each mode, by parameter.
TAKES = {
    "export": ("workdir",),
    "imported": ("workdir",),
    "curves": (
        *("devices", "mesh", "platform", "workdir", "plot", "link", "describe"),
        *("as_json", "quiet"),
    ),
}


def export_profiles(ctx: typer.Context) -> None:
    """Writes all stored measurements to a file."""
    path, file = store_path(ctx.params["workdir"]), ctx.params["export"]
    if not path.exists():
        raise CfpError(
            f"There are no measurements to export: {path} does not exist. Run "
            "cfp profile TARGET first, or name its folder with --workdir."
        )
    with ProfileStore(path) as store:
        count = store.export(file)
    print(f"{count} measurements written to {file}")


def import_profiles(ctx: typer.Context) -> None:
    """Adds measurements of other stores to those stored here."""
    with ProfileStore(store_path(ctx.params["workdir"])) as store:
        for file in ctx.params["imported"]:
            print(f"{store.merge(file)} measurements added from {file}")
            for line in _list_foreign(read_export(file)):
                print(line)
        print(f"{len(store)} in {store.path}")


def _list_foreign(records: Sequence[ProfileRecord]) -> Iterator[str]:
    """Yields a line for each other kind of machine among records."""
    here = environment_parts(jax.devices())
    found = Counter(other_kind(record.parts, here) for record in records)
    for how, count in found.items():
        if how:
            yield f"  {count} of another kind of machine, kept apart: {how}"


def measure_curves(ctx: typer.Context) -> None:
    """Measures the rates of collectives over the axes of a mesh, or looks them up."""
    given = ctx.params
    plot, link, describe = given["plot"], given["link"], given["describe"]
    values.check_drawable(plot)
    values.check_writable(describe, "--describe")
    axes = platforms.parse_mesh(given["devices"], given["mesh"])
    with only_json(given["as_json"]) as print_json:
        platforms.select(given["platform"], axes)
        with (
            ProfileStore(store_path(given["workdir"])) as store,
            Display(given["quiet"]) as display,
        ):
            devices_mesh = platforms.make_mesh(axes)
            rates = measure_rates(devices_mesh, store, progress=display.tell)
        if describe is not None:
            describe.write_text(description_of(devices_mesh, rates))
        if plot is not None:
            plot_curves([("", rates)], plot, link)
        if given["as_json"]:
            print_json(json.dumps(curves_data(rates, link), indent=1))
        else:
            literal_console(width=columns()).print(Fitted(curves_table(rates, link)))


RUN = {
    "export": export_profiles,
    "imported": import_profiles,
    "curves": measure_curves,
}
