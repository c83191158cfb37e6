"""Compiles programs in threads, before any of them is timed.

While something is timed nothing is compiled: compilers take the processor, and on GPUs
they time kernels of their own. So the programs of some cases are compiled together, all
threads at work, and are run after that, one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import jax

from cfp.operators.probe import memory_limit
from cfp.profiling.compile_pool import CompilePool
from cfp.units import format_bytes

# What a library's or a compiler's message has if memory is short.
NO_MEMORY_WORD = "RESOURCE_EXHAUSTED"


class TooLargeError(Exception):
    """A program that would not fit into memory."""


class Ahead:
    """Compiled programs by key.

    Args:
        threads: how many compile at once; with one, each compiles when it is taken.

    Attributes:
        in_groups: whether anything is compiled ahead.
    """

    def __init__(self, threads: int) -> None:
        self._pool = CompilePool(threads)
        self.in_groups = threads > 1
        self._found: dict[Hashable, Future[tuple[Any, float]]] = {}

    def start(self, key: Hashable, function: Callable[..., Any], *args: Any) -> None:
        """Begins to compile a function for arguments of these shapes."""
        if self.in_groups:
            build = partial(compile_program, function, *args)
            self._found[key] = self._pool.start(str(key), build)

    def finish(self, seconds: float) -> bool:
        """Waits until all is compiled, no longer than so many seconds.

        Returns:
            Whether all is; what has not begun never does.
        """
        limit = None if seconds == float("inf") else max(seconds, 0.0)
        _, late = wait(self._found.values(), limit)
        for one in late:
            one.cancel()
        return not late

    def take(
        self, key: Hashable, function: Callable[..., Any], *args: Any
    ) -> tuple[Any, float]:
        """A program and the seconds that it took to compile; it is kept no longer.

        Raises:
            TooLargeError: it does not fit.
        """
        started = self._found.pop(key, None)
        if started is None:
            return compile_program(function, *args)
        try:
            return started.result()
        except TooLargeError:
            raise
        except Exception as error:
            if NO_MEMORY_WORD not in str(error):
                raise
        # Compilers that try kernels at the same time take each other's memory.
        return compile_program(function, *args)

    def forget(self) -> None:
        """Drops what was compiled and not taken."""
        self._found.clear()

    def close(self) -> None:
        """Begins nothing else, and does not wait for what has begun."""
        self._pool.close()


def compile_program(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """A compiled program that fits into memory, and the seconds that it took.

    Args:
        function: what to compile.
        args: its arguments, or their shapes and types.

    Raises:
        TooLargeError: it does not fit.
    """
    started = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - started
    needed, limit = needed_bytes(compiled), memory_limit()
    if limit is not None and needed > limit:
        raise TooLargeError(
            f"needs {format_bytes(needed)}, and {format_bytes(limit)} are there"
        )
    return compiled, seconds


def needed_bytes(compiled: Any) -> int:
    """Bytes that a program holds at most, with arguments and results."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
