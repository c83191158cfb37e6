"""The console, text that fits its width, and tables that lose nothing by it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
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
    """Makes a console that prints text as it stands, without markup.

    Model names may look like markup: ``experts[i]``, ``[/]``, ``:warning:``.

    Args:
        options: as of ``rich.console.Console``.
    """
    return Console(markup=False, emoji=False, **options)


def print_view(
    view: Callable[[box.Box], RenderableType], console: Console | None = None
) -> None:
    """Prints a view: with lines and colours in a terminal, as plain text elsewhere.

    Args:
        view: takes a table border and returns the view.
        console: by default standard output.
    """
    console = console or literal_console()
    if console.is_terminal:
        console.print(view(box.ROUNDED))
    else:
        console.file.write(plain_text(view(box.ASCII)))


def plain_text(view: RenderableType, width: int | None = None) -> str:
    """Renders a view as plain text, without spaces and blank lines at its ends."""
    file = io.StringIO()
    literal_console(file=file, width=width or columns(), color_system=None).print(view)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def wrapped(line: str, break_long_words: bool = True) -> str:
    """Folds a line; continuation lines are indented more than the first."""
    text = printable(line)
    indent = len(text) - len(text.lstrip()) + 2
    wrap = TextWrapper(
        width=columns(),
        initial_indent=" " * (indent - 2),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=break_long_words,
    )
    return wrap.fill(text.lstrip())


_NUMBER = re.compile(r"-?|[\d., x%]+( [KMG]?i?B)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table.

    Attributes:
        bar: length of the row's bar on a page, in any unit; None for no bar.
        won: True for the plan's own row.
        ends: True for the last row of a group.
    """

    cells: tuple[str, ...]
    bar: float | None = None
    won: bool = False
    ends: bool = False


def row_of(*cells: str, bar: float | None = None, won: bool = False) -> Row:
    """Makes a row of cells."""
    return Row(cells=cells, bar=bar, won=won)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table for text and page.

    Attributes:
        notes: sentences below the table.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @property
    def numbers(self) -> set[str]:
        """Headings of columns of numbers; the first column is text."""
        columns = [*zip(self.headings, *(row.cells for row in self.rows), strict=True)]
        return {
            name for name, *cells in columns[1:] if all(map(_NUMBER.fullmatch, cells))
        }

    def filled(self) -> Rows:
        """Drops the columns without any text."""
        columns = zip(*(row.cells for row in self.rows), strict=True)
        kept = [bool({*texts} - {"", "-"}) for texts in columns]
        rows = [replace(r, cells=tuple(compress(r.cells, kept))) for r in self.rows]
        return replace(self, headings=tuple(compress(self.headings, kept)), rows=rows)

    def table(self, border: box.Box) -> Table:
        """Renders rows for a rich console; cells fold at the column's width."""
        table = Table(
            box=border, title=self.title or None, title_justify="left", pad_edge=False
        )
        for heading in self.headings:
            justify = "right" if heading in self.numbers else "left"
            table.add_column(heading, justify=justify, overflow="fold")
        for row in self.rows:
            style = "bold" if row.won else None
            table.add_row(*row.cells, style=style, end_section=row.ends)
        return table


def sheet(
    border: box.Box, head: str, tables: Iterable[Rows], lines: Iterable[str]
) -> Group:
    """Joins a bold line, the tables that have rows, and lines below them."""
    parts: list[RenderableType] = [Text(head, style="bold"), Text()] if head else []
    for made in tables:
        if made.rows:
            parts += [made.table(border), *map(Text, made.notes), Text()]
    return Group(*parts, *(Text(line) for line in lines if line))
