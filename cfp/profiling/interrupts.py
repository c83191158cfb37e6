"""Ctrl-C while a plan is made: it is never lost, and its message says what is kept.

Python raises KeyboardInterrupt between any two instructions of the main thread, also in
functions that nothing can be raised out of, such as finalizers and what the garbage
collector calls back (JAX has it do so). There it is printed, and forgotten. Such an
interrupt is sent once more, a moment later, until it arrives where it ends something.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cfp.errors import CfpError
from cfp.profiling.store import ProfileStore, store_path

# Long enough for what was interrupted to be over, and too short to be noticed.
_AGAIN_SECONDS = 0.05


def interrupted_text(cache_dir: str | Path | None, again: str) -> str:
    """Makes the message for a user who interrupts.

    Args:
        again: what goes on from there: "the same command".
    """
    with suppress(CfpError):
        kept = store_path(cache_dir)
        count = 0
        if kept.exists():
            with ProfileStore(kept) as store:
                count = len(store)
        if not count:
            return "Interrupted. Nothing was measured yet."
        what = "1 measurement is" if count == 1 else f"{count} measurements are"
        return f"Interrupted. {what} kept in {kept}; {again} goes on from there."
    return f"Interrupted. What was measured cannot be read now; {again} starts anew."


@contextmanager
def handle_keyboard_interrupt(cache_dir: str | Path | None) -> Iterator[None]:
    """Delivers Ctrl-C as one KeyboardInterrupt, whose message says what is kept.

    Raises:
        KeyboardInterrupt: the user has interrupted. Its context says where.
    """
    try:
        with _none_lost():
            yield
    except KeyboardInterrupt:
        # The place at which it happened to arrive is of no use to users.
        raise KeyboardInterrupt(interrupted_text(cache_dir, "the same call")) from None


@contextmanager
def _none_lost() -> Iterator[None]:
    """A time in which an interrupt that Python drops is sent again.

    Only where Python itself answers the signal: a program's own handler may count
    signals, or mean something else by them. Python answers in the main thread.
    """
    main = threading.main_thread()
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if threading.current_thread() is not main or not usual:
        yield
        return
    before, ident = sys.unraisablehook, main.ident
    assert ident is not None, "the main thread has begun"
    again: threading.Timer | None = None
    is_pending = False

    def send() -> None:
        nonlocal is_pending
        is_pending = False
        signal.pthread_kill(ident, signal.SIGINT)

    def hook(raised: sys.UnraisableHookArgs) -> None:
        nonlocal again, is_pending
        interrupts = issubclass(raised.exc_type, KeyboardInterrupt)
        if not interrupts or threading.current_thread() is not main:
            before(raised)
        elif not is_pending:  # A second would come after the end.
            is_pending = True
            again = threading.Timer(_AGAIN_SECONDS, send)
            again.daemon = True
            again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        if again is not None:
            again.cancel()
            again.join()
    if is_pending:
        raise KeyboardInterrupt
