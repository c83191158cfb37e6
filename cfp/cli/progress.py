"""What a person sees while something is measured: one live line on the terminal."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cfp.profiling.runner import Progress


class Display:
    """Shows events on the terminal's error stream; elsewhere it stays quiet.

    Use it as a context manager, and hand out `tell` to be told of events.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._started = time.monotonic()
        self._spinner = Spinner("dots")
        self._event: Progress | str = "starting"
        if self._console.is_terminal and not quiet:
            self._live = Live(
                console=self._console,
                transient=True,
                refresh_per_second=8,
                get_renderable=self._render,
                # Results go to stdout themselves, when this is over.
                redirect_stdout=sys.stdout.isatty(),
            )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, event: Progress | str) -> None:
        """Takes note of an event."""
        self._event = event

    def _render(self) -> Table:
        event = self._event
        line = Table.grid(padding=(0, 1))
        cells: list = [self._spinner]
        if isinstance(event, Progress):
            cells += [
                ProgressBar(total=max(1, event.total), completed=event.done, width=12),
                Text(progress_text(event), no_wrap=True, overflow="ellipsis"),
            ]
        else:
            cells += [Text(event), Text(_clock(time.monotonic() - self._started))]
        line.add_row(*cells)
        return line


def progress_text(event: Progress) -> str:
    """An event in words."""
    parts = [f"{event.done}/{event.total}"]
    if event.cached:
        parts.append(f"{event.cached} cached")
    if event.failed:
        parts.append(f"{event.failed} failed")
    if event.label:
        doing = {
            "build": "compiling",
            "run": "running",
            "wait": "another process measures",
        }.get(event.phase, "")
        parts.append(f"{doing} {event.label}".strip())
    if math.isfinite(event.best_ms):
        parts.append(f"best {event.best_ms:.3g} ms")
    parts.append(_clock(event.elapsed_seconds))
    left = seconds_left(event)
    if left is not None:
        parts.append(f"about {_clock(left)} left")
    return ", ".join(parts)


def seconds_left(event: Progress) -> float | None:
    """How long the rest will take, if it goes on as so far; None if nobody knows."""
    measured = event.done - event.cached
    rest = event.total - event.done
    if measured < 2 or rest == 0:
        return None
    return event.elapsed_seconds / measured * rest


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
