"""Console output: tables and text that fit the width, and progress on stderr.

Progress is a live line on a terminal, else printed lines as `PlainLines` schedules.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from textwrap import TextWrapper
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cfp.context import PlannerSettings
from cfp.printable import clock_text, columns, printable, waiting_text
from cfp.profiling.coordination import is_follower
from cfp.profiling.tasks import Progress


def literal_console(**options: Any) -> Console:
    """Makes a rich console with `options`; it prints markup and emoji codes as text.

    Model names may look like these: ``experts[i]``, ``[/]``, ``:warning:``.
    """
    return Console(markup=False, emoji=False, **options)


def print_view(
    view: Callable[[box.Box], RenderableType], console: Console | None = None
) -> None:
    """Prints a view: in colour on a terminal, else as text with ASCII borders.

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
    """Renders a view as lines of at most `width` characters, by default `columns()`."""
    file = io.StringIO()
    literal_console(file=file, width=width or columns(), color_system=None).print(view)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def wrapped(line: str, break_long_words: bool = True) -> str:
    """Folds a line, made printable, at `columns()`; later lines indent by two more."""
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
        bar: length of the row's bar on a page, relative to other rows; None: no bar.
        won: True for the plan's own row.
        ends: True for the last row of a group.
    """

    cells: tuple[str, ...]
    bar: float | None = None
    won: bool = False
    ends: bool = False


def row_of(*cells: str, bar: float | None = None, won: bool = False) -> Row:
    """Makes a row; takes its cells as positional arguments."""
    return Row(cells=cells, bar=bar, won=won)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table, to be rendered as text or HTML.

    Attributes:
        notes: sentences below the table.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @property
    def numbers(self) -> set[str]:
        """Headings, but the first, of columns of "-", "", unsigned numbers or sizes."""
        columns = [*zip(self.headings, *(row.cells for row in self.rows), strict=True)]
        return {
            name for name, *cells in columns[1:] if all(map(_NUMBER.fullmatch, cells))
        }

    def filled(self) -> Rows:
        """Returns the table without columns whose cells are all empty or "-"."""
        columns = zip(*(row.cells for row in self.rows), strict=True)
        kept = [bool({*texts} - {"", "-"}) for texts in columns]
        rows = [replace(r, cells=tuple(compress(r.cells, kept))) for r in self.rows]
        return replace(self, headings=tuple(compress(self.headings, kept)), rows=rows)

    def table(self, border: box.Box) -> RenderableType:
        """Returns the table; long cells fold at the width of the output."""
        return _Fitted(self, border)

    def widths(self, most: int) -> list[int | None]:
        """Returns widths that keep words whole in a table of at most `most` characters.

        Numbers keep their unit. The widest column that has room is narrowed first. If
        not all words fit, the longest break. All are None if not even letters fit.
        """
        widths, least = [], []
        for name, *cells in zip(
            self.headings, *(r.cells for r in self.rows), strict=True
        ):
            words = [w for text in (name, *cells) for w in text.split()]
            words += cells if name in self.numbers else []
            widths.append(max(map(len, (name, *cells))))
            least.append(max(map(len, words), default=0))
        most -= 3 * len(widths) - 1  # Borders, and spaces beside them.
        while sum(least) > most and max(least) > 1:
            least[least.index(max(least))] -= 1
        if sum(least) > most:
            return [None] * len(widths)
        while sum(widths) > most:
            spare = [w if w > low else 0 for w, low in zip(widths, least, strict=True)]
            widths[spare.index(max(spare))] -= 1
        return [*widths]


@dataclass(frozen=True, slots=True)
class _Fitted:
    rows: Rows
    border: box.Box

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        rows = self.rows
        table = Table(
            box=self.border,
            title=rows.title or None,
            title_justify="left",
            pad_edge=False,
        )
        widths = rows.widths(options.max_width)
        for heading, width in zip(rows.headings, widths, strict=True):
            justify = "right" if heading in rows.numbers else "left"
            table.add_column(heading, justify=justify, overflow="fold", width=width)
        for row in rows.rows:
            style = "bold" if row.won else None
            table.add_row(*row.cells, style=style, end_section=row.ends)
        yield table


def sheet(
    border: box.Box, head: str, tables: Iterable[Rows], lines: Iterable[str]
) -> Group:
    """Joins a bold headline, the tables with rows, and the lines; leaves out ""."""
    parts: list[RenderableType] = [Text(head, style="bold"), Text()] if head else []
    for made in tables:
        if made.rows:
            parts += [made.table(border), *map(Text, made.notes), Text()]
    return Group(*parts, *(Text(line) for line in lines if line))


# Interval of checks for a plain line that is due.
_LOOK_SECONDS = 1.0


@dataclass(slots=True)
class PlainLines:
    """Schedule and text of progress lines in a log.

    Attributes:
        silent_seconds: time from the start without lines.
        every_seconds: least time between neighbouring lines about the same work.
    """

    silent_seconds: float = 10.0
    every_seconds: float = 30.0
    _doing: str = ""
    _shown_seconds: float = 0.0

    def due(self, event: Progress | str, seconds: float) -> str | None:
        """Returns a line on the event if due `seconds` after the start, else None."""
        doing = "measuring" if isinstance(event, Progress) else event.split(" ", 1)[0]
        is_same = doing == self._doing
        recent = is_same and seconds - self._shown_seconds < self.every_seconds
        if seconds < self.silent_seconds or recent:
            return None
        self._doing, self._shown_seconds = doing, seconds
        if isinstance(event, Progress):
            event = f"measuring {progress_text(event, clock=False)}"
        return f"cfp {clock_text(seconds)}: {event}"


class Display:
    """Context manager that shows progress events, passed to `tell`, on stderr.

    On a terminal they are a live line, elsewhere lines of :class:`PlainLines`. Nothing
    is shown if `quiet`, or in other processes than process 0.
    """

    def __init__(self, quiet: bool = False, lines: PlainLines | None = None) -> None:
        console = literal_console(stderr=True)
        is_terminal = console.is_terminal and not console.is_dumb_terminal
        is_quiet = quiet or is_follower()
        self._live: Live | None = None
        self._lines = None if is_quiet or is_terminal else lines or PlainLines()
        self._writer = threading.Thread(
            target=self._write, name="cfp-progress", daemon=True
        )
        self._over = threading.Event()
        self._started = time.monotonic()
        self._spinner = Spinner("dots")
        self._event: Progress | str = "loading and reading the step"
        if is_terminal and not is_quiet:
            self._live = Live(
                console=console,
                transient=True,
                refresh_per_second=8,
                get_renderable=self._render,
                # Results are printed to stdout once the display has ended.
                redirect_stdout=sys.stdout.isatty(),
            )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        if self._lines is not None:
            self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
        if self._lines is not None:
            self._writer.join()

    def tell(self, event: Progress | str) -> None:
        """Stores the latest event, which the display shows next."""
        self._event = event

    def _write(self) -> None:
        """Prints due lines, in a thread, until the display ends or stderr is closed."""
        assert self._lines is not None
        # Only process 0 of several shows progress.
        while not self._over.wait(_LOOK_SECONDS) and not is_follower():
            line = self._lines.due(self._event, time.monotonic() - self._started)
            if line is not None and sys.stderr is not None:
                try:
                    print(line, file=sys.stderr, flush=True)
                except (OSError, ValueError):
                    return  # The error stream is closed.

    def _render(self) -> Table:
        event, line = self._event, Table.grid(padding=(0, 1))
        if is_follower():
            return line
        clock = clock_text(time.monotonic() - self._started)
        is_progress = isinstance(event, Progress)
        text = progress_text(event) if is_progress else f"{event} {clock}"
        line.add_row(self._spinner, Text(text, no_wrap=True, overflow="ellipsis"))
        return line


@contextlib.contextmanager
def shown(
    settings: PlannerSettings | None, doing: str, silence: str, quiet: bool
) -> Iterator[PlannerSettings]:
    """Yields settings that show progress; as given if quiet or with own `progress`.

    Args:
        doing, silence: the work, and how to silence progress, in a log's first line.
    """
    settings = settings or PlannerSettings()
    is_refused = not isinstance(settings, PlannerSettings)  # `plan` raises for it.
    if quiet or is_refused or settings.progress is not None:
        yield settings
        return
    with Display() as display:
        if display._lines is not None and sys.stderr is not None:
            print(f"cfp: {doing}. {silence}", file=sys.stderr, flush=True)
        yield replace(settings, progress=display.tell)


def progress_text(event: Progress, clock: bool = True) -> str:
    """Describes an event: ``3/8, 2 cached, compiling mlp, 0:12``."""
    parts = [f"{event.done}/{event.total}"]
    parts += [f"{event.cached} cached"] if event.cached else []
    parts += [f"{event.failed} failed"] if event.failed else []
    phases = {
        "build": "compiling",
        "run": "running",
        "wait": "another process measures",
    }
    if event.awaited == 1:
        parts.append(waiting_text(event.label, event.awaited_seconds))
    elif event.label:
        parts.append(f"{phases.get(event.phase, '')} {event.label}".strip())
    parts += [f"best {event.best_ms:.3g} ms"] if math.isfinite(event.best_ms) else []
    parts += [clock_text(event.elapsed_seconds)] if clock else []
    return ", ".join(parts)
