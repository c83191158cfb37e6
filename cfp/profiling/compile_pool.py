"""The pool of threads that compile, and how many there are.

All that is compiled side by side is compiled here: programs whose kernels are tuned,
segments, whole programs of a race, and operators.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import jax

from cfp.program.meaning import unchecked

_MOST_THREADS = 24
# Of the host, for one compile of a large program; a guess, as no host was short of it.
_BYTES_EACH = 2 * 2**30
# Of a container, by the kernel's control groups of version 2 or 1; "max" is none.
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_X64_SETTING = "jax_enable_x64"

_T = TypeVar("_T")


def default_threads(platform: str) -> int:
    """Chooses the number of compiles at once, by this process's cores and memory."""
    cores = _cores()
    if platform == "cpu" and cores <= 4:
        return 1  # The devices are these cores.
    share = cores // 4 if platform == "cpu" else cores * 3 // 8
    return max(1, min(_MOST_THREADS, share, _host_bytes() // _BYTES_EACH))


def _cores() -> int:
    """Returns how many cores this process may use: all, or those of its job's share."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CompilePool:
    """Threads that compile until the pool is closed.

    They have the JAX settings of the thread that made the pool, as `with
    jax.enable_x64(...)` holds for one thread. A compile cannot be stopped: after an
    interrupt or an error a thread ends its compile and begins no other, and nothing
    waits for it.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="cfp-build")
        self._x64 = bool(getattr(jax.config, _X64_SETTING))
        self._is_closed = False

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Begins nothing else, and does not wait for what has begun."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def start(self, label: str, compiled: Callable[[], _T]) -> Future[_T]:
        """Compiles as soon as a thread is free, and notes an error with the label.

        The outcome is cancelled if the pool is closed before it begins.
        """

        def run() -> _T:
            if self._is_closed:
                raise CancelledError
            with jax.enable_x64(self._x64), unchecked():
                try:
                    return compiled()
                except Exception as error:
                    error.add_note(f"While {label} was compiled.")
                    raise

        return self._threads.submit(run)


def _host_bytes() -> int:
    """Returns the memory that this process may use: the host's, or its container's."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [file.read_text().strip() for file in _CONTAINER_LIMITS if file.is_file()]
    return min([host, *(int(limit) for limit in limits if limit.isdecimal())])
