"""The console, text that fits its width, and tables that lose nothing by it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from textwrap import TextWrapper
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cfp.printable import columns, printable


def literal_console(**options: Any) -> Console:
    """A console that takes no text for markup.

    Names come from the user's model, or from a file: ``experts[i]`` is no tag to be
    left out, ``[/]`` closes nothing, and ``:warning:`` is no picture.

    Args:
        options: as of ``rich.console.Console``.
    """
    return Console(markup=False, emoji=False, **options)


def print_view(
    view: Callable[[box.Box], RenderableType], console: Console | None = None
) -> None:
    """Prints a view: in a terminal with lines and colours, else as plain text.

    Args:
        view: makes it, with the lines of a border.
        console: standard output, if not given.
    """
    console = console or literal_console()
    if console.is_terminal:
        console.print(view(box.ROUNDED))
    else:
        console.file.write(plain_text(view(box.ASCII)))


def plain_text(view: RenderableType, width: int | None = None) -> str:
    """A view as plain text without spaces and blank lines at its ends.

    Args:
        view: with ASCII lines.
    """
    file = io.StringIO()
    literal_console(file=file, width=width or columns(), color_system=None).print(view)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def wrapped(line: str) -> str:
    """A line that is folded; what follows is indented more than its start."""
    text = printable(line)
    indent = len(text) - len(text.lstrip()) + 2
    wrap = TextWrapper(
        width=columns(),
        initial_indent=" " * (indent - 2),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
    return wrap.fill(text.lstrip())


def new_table(border: box.Box, title: str | None, headings: Mapping[str, str]) -> Table:
    """A table without rows, whose cells are folded where they do not fit.

    Args:
        headings: of each column its kind: "text", or "number", which is justified to
            the right.
    """
    table = Table(box=border, title=title, title_justify="left", pad_edge=False)
    for heading, kind in headings.items():
        justify = "right" if kind == "number" else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table.

    Attributes:
        bar: the length of the row's bar on a page, in any unit; None for no bar.
        won: whether it is the plan's own.
        ends: whether a group of rows ends here.
    """

    cells: tuple[str, ...]
    bar: float | None = None
    won: bool = False
    ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table as it is shown in text and on a page.

    Attributes:
        headings: of each column its kind, as of `new_table`.
        notes: sentences that stand below.
    """

    title: str
    headings: Mapping[str, str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def filled(self) -> Rows:
        """The same without columns in which nothing stands."""
        columns = zip(*(row.cells for row in self.rows), strict=True)
        kept = [bool({*texts} - {"", "-"}) for texts in columns]
        rows = [replace(r, cells=tuple(compress(r.cells, kept))) for r in self.rows]
        headings = dict(compress(self.headings.items(), kept))
        return replace(self, headings=headings, rows=rows)

    def table(self, border: box.Box) -> Table:
        """The rows for a rich console."""
        table = new_table(border, self.title, self.headings)
        for row in self.rows:
            style = "bold" if row.won else None
            table.add_row(*row.cells, style=style, end_section=row.ends)
        return table


def sheet(
    border: box.Box, head: str, tables: Iterable[Rows], lines: Iterable[str]
) -> Group:
    """A line in bold, tables that have rows, and lines below: for a rich console."""
    parts: list[RenderableType] = [Text(head, style="bold"), Text()] if head else []
    for made in tables:
        if made.rows:
            parts += [made.table(border), *map(Text, made.notes), Text()]
    return Group(*parts, *(Text(line) for line in lines if line))
