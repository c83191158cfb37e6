"""Files and folders that only their owner may read or write, and locks on files.

The cache has a user's file names and programs, and its measurements decide compiler
options. So other users can neither read nor write its new files and folders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from cfp.errors import CfpError

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
# A C function: an interrupt in a Python function could lose the open file.
_opener = partial(os.open, mode=_FILE_MODE)


def cache_dir() -> Path:
    """Returns `$CFP_CACHE_DIR`, else `$XDG_CACHE_HOME/cfp`, else `~/.cache/cfp`.

    A relative `$XDG_CACHE_HOME` is ignored. Raises CfpError without a home directory if
    neither variable decides.
    """
    if chosen := os.environ.get("CFP_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification ignores relative paths.
    if os.path.isabs(base):
        return Path(base) / "cfp"
    try:
        return Path.home() / ".cache" / "cfp"
    except RuntimeError as error:  # The user has no entry in the password database.
        raise CfpError(
            "The user has no home directory for the profile cache. Set CFP_CACHE_DIR "
            "to a writable directory."
        ) from error


def make_private_folder(path: Path) -> None:
    """Makes a folder of mode 0700 if it is missing.

    Missing parents get the usual mode; existing folders keep theirs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Opens a file; a new one gets mode 0600. `mode` is as for `open`."""
    return open(path, mode, opener=_opener)


def make_private(path: Path) -> None:
    """Makes an empty private file, or makes an existing one private if possible.

    An existing file is not opened: closing it would release this process's locks on it,
    which SQLite needs.
    """
    try:
        open_private(path, "xb").close()
    except FileExistsError:
        # Files of other users, or on file systems without modes, do not change.
        with contextlib.suppress(OSError):
            if path.is_file():
                path.chmod(_FILE_MODE)


# ------------------------------------------------------------------------------- locks

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextlib.contextmanager
def locked(path: Path, waits: bool = True) -> Iterator[bool]:
    """Holds an exclusive lock on a private file while the body runs.

    Yields True with the lock; False if another process or thread has it and `waits` is
    False. On file systems without locks (some network ones), yields True unlocked.
    """
    is_ours = True
    with open_private(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            is_ours = False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield is_ours
