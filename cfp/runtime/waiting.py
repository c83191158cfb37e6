"""Waits for steps: says that one is compiled, and loads one before it is called."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from cfp.devices.joining import is_follower
from cfp.program.meaning import trace_context_key
from cfp.units import clock_text

_T = TypeVar("_T")

# What takes less says nothing; what takes longer says so again and again.
_SILENT_SECONDS, _EVERY_SECONDS = 5.0, 30.0


def compiling_text(name: str, seconds: float | None) -> str:
    """Words for the compile of a step under its plan.

    Args:
        name: of the step.
        seconds: what it took when it was planned, if that is known.
    """
    before = ""
    if seconds is not None and round(seconds):
        before = f", which took {clock_text(seconds)} when it was planned"
    return f"compiling {name!r} under its plan{before}"


@contextmanager
def told_while(
    doing: str,
    tell: Callable[[str], None] | None,
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
) -> Iterator[None]:
    """Says what is being done, at once or, on standard error, if it takes long.

    Args:
        doing: what.
        tell: what shows it; None for lines on standard error.
        wait: waits for an event so many seconds, and says whether it came.
    """
    if tell is not None:
        tell(doing)
        yield
        return
    over = threading.Event()

    def write() -> None:
        seconds = _SILENT_SECONDS
        while not wait(over, seconds if seconds == _SILENT_SECONDS else _EVERY_SECONDS):
            if is_follower() or sys.stderr is None:
                return
            line = f"cfp: {doing}; {clock_text(seconds)} so far"
            try:
                print(line, file=sys.stderr, flush=True)
            except (OSError, ValueError):
                return  # It is not read any more.
            seconds += _EVERY_SECONDS

    writer = threading.Thread(target=write, name="cfp-compiling", daemon=True)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def load_early(load: Callable[[], _T], key: Hashable) -> Future[_T | None]:
    """Begins to load something in a thread of its own.

    None comes of it where that thread has another configuration of JAX.

    Args:
        load: what loads it.
        key: of the configuration that it is for; see `trace_context_key`.
    """

    def run() -> _T | None:
        if trace_context_key() != key:
            return None
        loaded = load()
        return loaded if trace_context_key() == key else None

    threads = ThreadPoolExecutor(1, "cfp-loading")
    future = threads.submit(run)
    threads.shutdown(wait=False)
    return future
