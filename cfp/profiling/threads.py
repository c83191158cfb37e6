"""How much is built at once, whether beside what runs, and with which settings."""

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

from cfp.profiling.key import GPU_PLATFORMS

_MOST_THREADS = 24
_X64_SETTING = "jax_enable_x64"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def default_threads(platform: str) -> int:
    """How many builds at once leave a machine usable, and each other in peace."""
    cores = os.cpu_count() or 1
    if platform == "cpu" and cores <= 4:
        return 1  # The devices are these cores.
    share = cores // 4 if platform == "cpu" else cores * 3 // 8
    return max(1, min(_MOST_THREADS, share))


def overlaps(platform: str) -> bool:
    """Whether building leaves the devices in peace, so that others may be timed."""
    return platform != "cpu" and platform not in GPU_PLATFORMS


def with_settings(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function for other threads, with the settings of this one.

    JAX keeps `with jax.enable_x64(...)` to the thread that said it.
    """
    x64 = bool(getattr(jax.config, _X64_SETTING))

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with jax.enable_x64(x64):
            return function(*args, **kwargs)

    return wrapped
