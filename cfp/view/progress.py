"""Progress of measurements: one live line on the terminal.

Where there is no terminal, as in the log of a batch job, plain lines now and then.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cfp.devices.joining import is_follower
from cfp.planner_settings import PlannerSettings
from cfp.profiling.tasks import Progress
from cfp.units import clock_text, waiting_text
from cfp.view.console import literal_console

# How often to see whether a plain line is due.
_LOOK_SECONDS = 1.0


@dataclass(slots=True)
class PlainLines:
    """Schedule and text of progress where lines stay.

    Attributes:
        silent_seconds: nothing that is over by then says anything.
        every_seconds: how long the same kind of work goes on until the next line.
    """

    silent_seconds: float = 10.0
    every_seconds: float = 30.0
    _doing: str = ""
    _shown_seconds: float = 0.0
    _event: Progress | str = ""
    _begun_seconds: float = 0.0

    def due(self, event: Progress | str, seconds: float) -> str | None:
        """The line that is due, if one is.

        Of what goes on since the last line, it says for how long.

        Args:
            seconds: how long everything has taken so far.
        """
        if event != self._event:
            self._event, self._begun_seconds = event, seconds
        if seconds < self.silent_seconds:
            return None
        doing = "measuring" if isinstance(event, Progress) else event.split(" ", 1)[0]
        is_new = doing != self._doing
        if not is_new and seconds - self._shown_seconds < self.every_seconds:
            return None
        self._doing, self._shown_seconds = doing, seconds
        if isinstance(event, Progress):
            event = f"measuring {progress_text(event, clock=False)}"
        elif (so_far := seconds - self._begun_seconds) >= self.every_seconds:
            event = f"{event}, {clock_text(so_far)} so far"
        return f"cfp {clock_text(seconds)}: {event}"


class Display:
    """Shows events on the error stream: live on a terminal, elsewhere in plain lines.

    Use it as a context manager, and pass `tell` on, to be called with events.
    """

    def __init__(self, quiet: bool = False, lines: PlainLines | None = None) -> None:
        console = literal_console(stderr=True)
        self._live: Live | None = None
        self._lines: PlainLines | None = None
        self._over = threading.Event()
        self._started = time.monotonic()
        self._spinner = Spinner("dots")
        self._event: Progress | str = "loading and reading the step"
        if quiet or is_follower():
            return
        if not console.is_terminal or console.is_dumb_terminal:
            self._lines = lines or PlainLines()
            return
        self._live = Live(
            console=console,
            transient=True,
            refresh_per_second=8,
            get_renderable=self._render,
            # Results go to stdout themselves, when this is over.
            redirect_stdout=sys.stdout.isatty(),
        )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        if self._lines is not None:
            name = "cfp-progress"
            self._writer = threading.Thread(target=self._write, name=name, daemon=True)
            self._writer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
        if self._lines is not None:
            self._writer.join()

    @property
    def is_live(self) -> bool:
        """True if there is a terminal to show a live line on."""
        return self._live is not None

    def tell(self, event: Progress | str) -> None:
        """Takes note of an event."""
        self._event = event

    def _write(self) -> None:
        """In a thread, since what takes longest has no events."""
        assert self._lines is not None
        while not self._over.wait(_LOOK_SECONDS):
            if is_follower():  # It may have joined others meanwhile.
                return
            line = self._lines.due(self._event, time.monotonic() - self._started)
            if line is not None and sys.stderr is not None:
                try:
                    print(line, file=sys.stderr, flush=True)
                except (OSError, ValueError):
                    return  # It is not read any more.

    def _render(self) -> Table:
        event = self._event
        line = Table.grid(padding=(0, 1))
        if is_follower():
            return line
        cells: list = [self._spinner]
        if isinstance(event, Progress):
            cells += [
                ProgressBar(total=max(1, event.total), completed=event.done, width=12),
                Text(progress_text(event), no_wrap=True, overflow="ellipsis"),
            ]
        else:
            cells += [Text(event), Text(clock_text(time.monotonic() - self._started))]
        line.add_row(*cells)
        return line


@contextlib.contextmanager
def shown(
    settings: PlannerSettings | None, doing: str, silence: str, quiet: bool
) -> Iterator[PlannerSettings]:
    """Settings that show the progress of planning, unless they pass it on already.

    On a terminal that is a live line. Elsewhere one line says what is being done and
    how to silence it, and others follow now and then.

    Args:
        doing: what takes the time, for the first line.
    """
    settings = settings or PlannerSettings()
    is_refused = not isinstance(settings, PlannerSettings)  # By what plans, at once.
    if quiet or is_refused or settings.progress is not None:
        yield settings
        return
    with Display() as display:
        if not display.is_live and sys.stderr is not None:
            print(f"cfp: {doing}. {silence}", file=sys.stderr, flush=True)
        yield replace(settings, progress=display.tell)


def progress_text(event: Progress, clock: bool = True) -> str:
    """An event in words, with the time that what it belongs to has taken."""
    parts = [f"{event.done}/{event.total}"]
    if event.cached:
        parts.append(f"{event.cached} cached")
    if event.failed:
        parts.append(f"{event.failed} failed")
    if event.awaited == 1:
        parts.append(waiting_text(event.label, event.awaited_seconds))
    elif event.label:
        doing = {
            "build": "compiling",
            "run": "running",
            "wait": "another process measures",
        }.get(event.phase, "")
        parts.append(f"{doing} {event.label}".strip())
    if math.isfinite(event.best_ms):
        parts.append(f"best {event.best_ms:.3g} ms")
    if clock:
        parts.append(clock_text(event.elapsed_seconds))
    return ", ".join(parts)
