"""Whether a lock on a file keeps another process out."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile

from cfp.cluster.doctor.probes.answer import answer

_TRY = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(3)
"""
_KEPT_OUT = 3


def find() -> dict[str, bool]:
    """Locks a file, and has another process try the same."""
    with tempfile.NamedTemporaryFile(dir=sys.argv[1]) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = subprocess.run([sys.executable, "-c", _TRY, file.name], check=False)
    return {"excludes": done.returncode == _KEPT_OUT}


if __name__ == "__main__":
    answer(find)
