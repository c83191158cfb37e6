"""The collectives of a compiled step as a table, with their source lines."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cfp.printable import printable
from cfp.profiling.hlo_sites import CollectiveSite
from cfp.report.told import WIDTH
from cfp.units import format_bytes

_PATH_PARTS = 2
_WRAPPER = re.compile(r"^jit\([^()]*\)/")
_MERGED = re.compile(r"^\((.*)\)$")


def sites_view(sites: Sequence[CollectiveSite], border: box.Box) -> RenderableType:
    """A table of collectives, most bytes first, and their sum."""
    if not sites:
        return Text("The program has no collectives.")
    table = Table(box=border, title="Collectives", title_justify="left", pad_edge=False)
    table.add_column("collective", no_wrap=True)
    for heading in ("times", "bytes", "devices"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("source line", overflow="fold")
    table.add_column("op", overflow="fold")
    for site in sites:
        table.add_row(
            site.kind,
            str(site.count),
            format_bytes(site.bytes),
            str(site.group_size),
            Text(printable(short_path(site.source)) or "-"),
            Text(printable(short_scope(site.scope)) or "-"),
        )
    total = sum(site.bytes * site.count for site in sites)
    count = sum(site.count for site in sites)
    return Group(
        table,
        Text(
            f"{count} collectives in one step; {format_bytes(total)} on each device "
            "together. Bytes: of one, the larger of what a device gives and gets."
        ),
    )


def sites_text(sites: Sequence[CollectiveSite]) -> str:
    """The table as plain ASCII text in at most 100 columns."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(sites_view(sites, box.ASCII))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join(lines) + "\n"


def sites_data(sites: Sequence[CollectiveSite]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [asdict(site) for site in sites]


def short_path(source: str) -> str:
    """The end of a path: ``models/mlp.py:12``."""
    return "/".join(PurePath(source).parts[-_PATH_PARTS:]) if source else ""


def short_scope(scope: str) -> str:
    """A name stack without the step's own name; of merged ops the first, and how many.

    XLA names an op that it merged of several ``jit(step)/(a:b:c)``.
    """
    inside = _WRAPPER.sub("", scope)
    merged = _MERGED.match(inside)
    if merged is None or ":" not in merged[1]:
        return inside
    first, *more = merged[1].split(":")
    return f"{first} and {len(more)} more"
