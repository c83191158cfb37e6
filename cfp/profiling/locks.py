"""Locks on files, which end with the process that holds them, however it ended."""

from __future__ import annotations

import errno
from typing import IO

try:
    import fcntl
except ImportError:  # Not on Windows.
    fcntl = None

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def lock_file(file: IO[bytes], *, wait: bool = True) -> bool | None:
    """Locks an open file for its opener alone, until it is closed.

    Args:
      file: what to lock.
      wait: for whoever holds it now.

    Returns:
      Whether it is locked now; None where there are no file locks (Windows, some
      network file systems).
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True
