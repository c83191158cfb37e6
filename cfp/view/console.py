"""The console, and tables that fit any width and lose nothing.

Cells are broken at spaces, slashes and the like. Where columns would be too narrow to
be read, each row becomes a line of its own that names its columns.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from textwrap import TextWrapper
from typing import Any

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
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
    """A table without rows.

    Args:
        headings: of each column its kind: "text", which may be broken; "word", which
            may not; or "number", which may not, and is justified to the right.
    """
    table = Table(box=border, title=title, title_justify="left", pad_edge=False)
    for heading, kind in headings.items():
        justify = "right" if kind == "number" else "left"
        table.add_column(heading, justify=justify, no_wrap=kind != "text")
    return table


# Text with what may end a line behind it: spaces, or a sign that belongs to the text.
_PIECE = re.compile(r"\s*[^\s/,;]*[/,;]*")
# Where one that is too long is broken, if it can be.
_WORD = re.compile(r"[^_.+]*[_.+]*")
# A column of text is not made narrower than its longest piece, or than this.
_NARROW = 16
_BETWEEN = 3  # Columns are a line and two spaces apart.


@dataclass(frozen=True, slots=True)
class Fitted:
    """A table of plain text that is as wide as it may be, or turned into lines.

    Attributes:
        table: has cells and headings that are text. Columns that must not be broken
            are marked with ``no_wrap``.
    """

    table: Table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """Draws it."""
        widths = column_widths(self.table.columns, options.max_width)
        if widths:
            yield _broken(self.table, widths)
        else:
            for line, style in _records(self.table, options.max_width):
                yield Text(line, style=style or "")


def column_widths(columns: Sequence[Column], width: int) -> list[int]:
    """Computes the width of each column; empty, if they cannot stand side by side."""
    cells = [[_plain(one.header), *map(_plain, one.cells)] for one in columns]
    wanted = [max(map(_longest_line, texts)) for texts in cells]
    found = [
        _least(column, texts, most)
        for column, texts, most in zip(columns, cells, wanted, strict=True)
    ]
    left = width - sum(found) - _BETWEEN * len(columns) + 1
    if left < 0:
        return []
    # Whatever would take most lines gets a column more, as long as there are any.
    for _ in range(left):
        ratios = [
            most / have if most > have else 0.0
            for most, have in zip(wanted, found, strict=True)
        ]
        if not any(ratios):
            break
        found[ratios.index(max(ratios))] += 1
    return found


def broken(text: str, width: int) -> list[str]:
    """A text in lines of at most some width, and nothing of it but spaces left out."""
    lines = [""]
    for piece in _pieces(text):
        long = cell_len(piece.strip()) > width
        for part in _pieces(piece, _WORD) if long else [piece]:
            if cell_len(lines[-1] + part.rstrip()) <= width:
                lines[-1] += part
                continue
            lines += chop_cells(part.strip(), width)
    return [line.strip() for line in lines if line.strip()] or [""]


def _pieces(text: str, pattern: re.Pattern[str] = _PIECE) -> list[str]:
    return [piece for piece in pattern.findall(text) if piece]


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _longest_line(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _least(column: Column, texts: Sequence[str], most: int) -> int:
    """The least width that a column may have."""
    heading, *cells = texts
    longest = max((cell_len(p.strip()) for p in _pieces(heading)), default=0)
    if column.no_wrap:
        return max([longest, *map(_longest_line, cells)])
    pieces = (cell_len(p.strip()) for text in cells for p in _pieces(text))
    return min(most, max(longest, min(_NARROW, max(pieces, default=0))))


def _broken(table: Table, widths: Sequence[int]) -> Table:
    """The same table with columns of these widths."""

    def lines(cell: object, width: int) -> Text:
        parts = _plain(cell).split("\n")
        return Text("\n".join(line for part in parts for line in broken(part, width)))

    found = copy(table)
    found.columns = [
        replace(
            column,
            header=lines(column.header, width),
            _cells=[lines(cell, width) for cell in column.cells],
            width=width,
            no_wrap=False,
        )
        for column, width in zip(table.columns, widths, strict=True)
    ]
    return found


def _records(table: Table, width: int) -> Iterator[tuple[str, str | None]]:
    """A line for each row, folded, with its style."""
    if table.title:
        yield _plain(table.title), None
    headings = [_plain(column.header) for column in table.columns]
    cells = zip(*(map(_plain, column.cells) for column in table.columns), strict=True)
    wrap = TextWrapper(width=width, subsequent_indent="    ", break_on_hyphens=False)
    for row, texts in zip(table.rows, cells, strict=True):
        pairs = [pair for pair in zip(headings, texts, strict=True) if pair[1]]
        marks = "".join(text for heading, text in pairs if not heading)
        cells = "; ".join(f"{heading}: {text}" for heading, text in pairs if heading)
        yield wrap.fill(f"{marks or ' '} {cells}"), str(row.style) or None
