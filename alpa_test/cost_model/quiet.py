"""Keeps what integer solvers print off standard output, where answers stand.

Solvers print from C, to file descriptor 1: HiGHS 1.16 its name
when the first model of a process is made, before any option can be set. So the
descriptor itself leads elsewhere while a solver is at work; what it printed is logged.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator

_STANDARD_OUTPUT = 1
_log = logging.getLogger(__name__)
# The descriptor belongs to the whole process: two threads would restore it to the
# other's file.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def quiet_solver() -> Iterator[None]:
    """Nothing that is printed inside, from C or Python, reaches standard output.

    What other threads print to it in the meantime is logged, too.
    """
    with _one_at_a_time, contextlib.ExitStack() as stack:
        try:
            kept = os.dup(_STANDARD_OUTPUT)
        except OSError:  # Standard output is closed: nothing can reach it.
            yield
            return
        stack.callback(os.close, kept)
        file = stack.enter_context(tempfile.TemporaryFile())
        _flush()
        os.dup2(file.fileno(), _STANDARD_OUTPUT)
        try:
            yield
        finally:
            _flush()
            os.dup2(kept, _STANDARD_OUTPUT)
            file.seek(0)
            if printed := file.read().decode(errors="replace").strip():
                _log.debug("The solver printed: %s", printed)


def _flush() -> None:
    """Hands over what Python and C hold back, to where the descriptor leads now."""
    # A stream that is closed, or that nobody reads, is no reason to stop.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
