"""Compile threads, their overlap with runs, and their thread-local settings."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

from cfp.profiling.key import GPU_PLATFORMS
from cfp.program.meaning import unchecked

_MOST_THREADS = 24
_X64_SETTING = "jax_enable_x64"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def default_threads(platform: str) -> int:
    """Chooses the number of builds at once."""
    cores = os.cpu_count() or 1
    if platform == "cpu" and cores <= 4:
        return 1  # The devices are these cores.
    share = cores // 4 if platform == "cpu" else cores * 3 // 8
    return max(1, min(_MOST_THREADS, share))


def overlaps(platform: str) -> bool:
    """Returns True if builds leave the devices idle, so that others may be timed."""
    return platform != "cpu" and platform not in GPU_PLATFORMS


@contextmanager
def builders(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that build, as long as what they build is asked for.

    A compile cannot be stopped: after an interrupt they finish what they have begun,
    and nothing waits for it.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="cfp-build")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def with_settings(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function for other threads, with the settings of this one.

    JAX keeps `with jax.enable_x64(...)` to the thread that said it.
    """
    x64 = bool(getattr(jax.config, _X64_SETTING))

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with jax.enable_x64(x64), unchecked():
            return function(*args, **kwargs)

    return wrapped
