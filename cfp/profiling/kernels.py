"""Files in which a compiler for GPUs finds the kernels that it has compiled before.

Parts of one program share most of their kernels: a layer alone, beside a neighbour,
and in the whole program. The compiler reads a file of kernels when it begins, and
writes it when it has made new ones, so that two compiles with one file would read half
of it, or lose what the other wrote. So each compile borrows a file of its own,
preferably the one that was in use last.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path


class KernelFiles:
    """Files to lend, as many as there are compiles at once.

    Args:
      folder: where to put them; it must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._free: list[Path] = []
        self._count = 0
        self._latest = b""

    @contextlib.contextmanager
    def lent(self) -> Iterator[Path]:
        """A file for one compile, which may not exist yet. Nobody else has it then."""
        with self._lock:
            path = self._free.pop() if self._free else self._new()
        try:
            yield path
        finally:
            with self._lock:
                self._free.append(path)
                if path.exists():
                    self._latest = path.read_bytes()

    def _new(self) -> Path:
        """Another file, with what was known in the one that was given back last."""
        path = self._folder / str(self._count)
        self._count += 1
        if self._latest:
            path.write_bytes(self._latest)
        return path


@cache
def kernel_files() -> KernelFiles:
    """Those of this process; gone when it ends.

    Another process's programs share few kernels with this one's.
    """
    folder = tempfile.mkdtemp(prefix="cfp-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return KernelFiles(Path(folder))
