"""JAX's configuration, as far as it may change what a step means.

The same function of the same arguments is another program inside
``jax.enable_x64(True)`` or ``jax.default_matmul_precision("highest")``. ``jax.jit``
traces anew there, and so does a step that plans itself. ``jax.jit`` compares a tuple
that JAX keeps per thread. No public function returns that tuple, and to read each
setting by its public name takes a thousand times as long (0.17 ms, against 0.0001).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from operator import attrgetter
from typing import Any

import jax
from jax._src.config import trace_context

# What JAX leaves out of that tuple although it changes what runs: the kind of random
# keys, checks of what was computed, and how the compiler works.
_ALSO = (
    "jax_compiler_enable_remat_pass",
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_prng_impl",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
)


def meaning() -> Hashable:
    """What tells one configuration from another, as of this thread, at this moment."""
    return trace_context(), _others()(jax.config)


def compiler_settings() -> tuple[tuple[str, Any], ...]:
    """Settings, by name, that compiled programs depend on beside their modules."""
    return tuple((n, getattr(jax.config, n)) for n in _ALSO if hasattr(jax.config, n))


@lru_cache(maxsize=1)
def _others() -> Callable[[Any], Any]:
    """Reads the other settings, those that this version of JAX has."""
    return attrgetter(*(name for name in _ALSO if hasattr(jax.config, name)))
