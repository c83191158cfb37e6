"""The collectives of a compiled step as a table, with their source lines."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cfp.analysis.naming import op_path
from cfp.plan.words import elided
from cfp.printable import columns, merged_alike, printable
from cfp.profiling.hlo import CollectiveSite
from cfp.report.console import Fitted, literal_console
from cfp.units import format_bytes

_PATH_PARTS = 2
_MOST_NAMES = 3
_NAME_WIDTH = 60
_STEP = re.compile(r"^jit\([^()]*\)/")
_MERGED = re.compile(r"^\((.*)\)$")


def sites_view(sites: Sequence[CollectiveSite], border: box.Box) -> RenderableType:
    """A table of collectives, most bytes first, and their sum.

    Those of one kind, size and line whose ops differ in numbers alone, as those of
    layers do, stand in one row.
    """
    if not sites:
        return Text("The program has no collectives.")
    table = Table(box=border, title="Collectives", title_justify="left", pad_edge=False)
    table.add_column("collective", no_wrap=True)
    for heading in ("times", "bytes of one", "devices"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("source line")
    table.add_column("op")
    for alike in _alike(sites):
        first = alike[0]
        table.add_row(
            first.kind,
            str(sum(site.count for site in alike)),
            format_bytes(first.bytes),
            str(first.group_size),
            printable(short_path(first.source)) or "-",
            printable(_row_text(alike)) or "-",
        )
    total = sum(site.bytes * site.count for site in sites)
    count = sum(site.count for site in sites)
    return Group(
        Fitted(table),
        Text(
            f"{count} {'collective' if count == 1 else 'collectives'} in one step; "
            f"{format_bytes(total)} on each device together. Bytes of one: the larger "
            "of what a device gives and gets. --json lists each op."
        ),
    )


def _row_text(alike: Sequence[CollectiveSite]) -> str:
    """The ops of a row; how many, where the compiler combined their collectives."""
    text = ops_text([site.scope for site in alike])
    count = max(len(_ops(site.scope)) for site in alike)
    return f"{count} ops combined: {text}" if count > 1 else text


def _alike(sites: Sequence[CollectiveSite]) -> list[list[CollectiveSite]]:
    """Collectives that a table shows in one row; the order stays."""
    found: dict[tuple, list[CollectiveSite]] = {}
    for site in sites:
        ops = ops_text([site.scope])
        key = (
            site.kind,
            site.bytes,
            site.group_size,
            site.source,
            re.sub(r"\d+([-,.]+\d+)*", "#", ops),
        )
        found.setdefault(key, []).append(site)
    rows = [*found.values()]
    return sorted(rows, key=lambda row: -sum(site.bytes * site.count for site in row))


def sites_text(sites: Sequence[CollectiveSite]) -> str:
    """The table as plain ASCII text, as wide as `columns` says."""
    console = literal_console(file=io.StringIO(), width=columns(), color_system=None)
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


def ops_text(scopes: Sequence[str]) -> str:
    """The ops of some name stacks in short: ``Block_0-11/Dense_0/dot_general``.

    XLA names an op that it merged of several ``jit(step)/(a:b:c)``.
    """
    ops = [op for scope in scopes for op in _ops(scope)]
    names = merged_alike([_op_text(op) for op in dict.fromkeys(ops) if op])
    names = [elided(name, _NAME_WIDTH) for name in names]
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _ops(scope: str) -> list[str]:
    """The ops that a name stack is of: several, if XLA merged them."""
    inside = _STEP.sub("", scope)
    merged = _MERGED.match(inside)
    return merged[1].split(":") if merged and ":" in merged[1] else [inside]


def _op_text(op: str) -> str:
    """An op's place in the user's model; what differentiation made of it says so."""
    return op_path(op) + (" (backward)" if "transpose(" in op else "")
