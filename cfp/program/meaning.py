"""JAX's configuration, as far as it may change a step's program.

A function of the same arguments is another program inside ``jax.enable_x64(True)`` or
``jax.default_matmul_precision("highest")``. ``jax.jit`` traces again there, and
`cfp.parallelize` does the same. ``jax.jit`` compares a tuple that JAX keeps for each
thread. No public function returns that tuple, and reading each setting by its public
name takes a thousand times as long (0.17 ms, against 0.0001).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.config import trace_context

from cfp.errors import CfpError

# What JAX leaves out of that tuple although it changes what runs: the kind of random
# keys, and how the compiler works, with what JAX 0.10.2 to 0.12 has by default. Other
# settings change what is traced, which fingerprints are of, or only what is reported.
_ALSO = {
    "jax_compiler_enable_remat_pass": "True",
    "jax_cpu_enable_async_dispatch": "True",
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_most_optimizations": "False",
    "jax_enable_pgle": "False",
    "jax_exec_time_optimization_effort": "0.0",
    "jax_memory_fitting_effort": "0.0",
    "jax_memory_fitting_level": "O2",
    "jax_no_execution": "False",
    "jax_optimization_level": "UNKNOWN",
    "jax_pgle_profiling_runs": "3",
    "jax_xla_profile_version": "0",
}


def trace_context_key() -> Hashable:
    """Returns the key of this thread's JAX configuration at this moment."""
    return trace_context(), _others()(jax.config)


def compiler_settings() -> tuple[tuple[str, str], ...]:
    """Returns settings that compiled programs depend on beside their modules.

    Only values other than JAX's defaults, by name.
    """
    # Some are no attributes of the configuration.
    values = jax.config.values
    found = {
        name: str(getattr(jax.config, name, values.get(name, usual)))
        for name, usual in _ALSO.items()
    }
    return tuple((name, text) for name, text in found.items() if text != _ALSO[name])


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Turns JAX's checks for NaN and infinity off, in this thread.

    Under these checks JAX donates no memory and reads all results, so that measuring on
    random numbers would take other time and memory, or fail.
    """
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def checks_numbers() -> bool:
    """True if JAX is to look for NaN or infinity in what programs return."""
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def check_numbers(results: Sequence[tuple[str, jax.Array]]) -> None:
    """Looks for NaN and infinity as far as `jax_debug_nans` and `jax_debug_infs` say.

    Args:
        results: by path.

    Raises:
        FloatingPointError: it names the first that has one.
    """
    settings = (("NaN", "nans", jnp.isnan), ("infinity", "infs", jnp.isinf))
    for name, short, test in settings:
        if not getattr(jax.config, f"jax_debug_{short}"):
            continue
        for path, result in results:
            inexact = jnp.issubdtype(result.dtype, jnp.inexact)
            if inexact and bool(test(result).any()):
                raise FloatingPointError(
                    f"Result {path} of the step has {name} (jax_debug_{short} is on). "
                    "To see the operation that makes it, call the step by itself, "
                    "in jax.jit, with the same arguments."
                )


def check_settings() -> None:
    """Refuses a configuration of JAX under which nothing can be planned or compiled.

    Raises:
        CfpError: it names the setting.
    """
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise CfpError(
            "jax_use_shardy_partitioner is off (JAX_USE_SHARDY_PARTITIONER=0, or "
            "jax.config.update), and cfp shards programs by Shardy. Unset the "
            'variable, or call jax.config.update("jax_use_shardy_partitioner", True).'
        )
    if getattr(jax.config, "jax_disable_jit", False):
        raise CfpError(
            "jax_disable_jit is on (jax.disable_jit(), or JAX_DISABLE_JIT=1), and cfp "
            "shards compiled programs. Leave jax.disable_jit() to plan a step, or to "
            "run it under a plan; to debug the step call it by itself."
        )


@lru_cache(maxsize=1)
def _others() -> Callable[[Any], Any]:
    """Reads the other settings, those that this version of JAX has."""
    return attrgetter(*(name for name in _ALSO if hasattr(jax.config, name)))
