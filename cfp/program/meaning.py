"""JAX's configuration, as far as it may change what a step means.

The same function of the same arguments is another program inside
``jax.enable_x64(True)`` or ``jax.default_matmul_precision("highest")``. ``jax.jit``
traces anew there, and so does a step that plans itself.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache

import jax

# Settings of logs, caches, guards, hosts and what is shown change no program. All else
# counts, also what a later release brings: to plan once too often does no harm.
_NO_MATTER = re.compile(
    r".*(cache|cuda_visible|rocm_visible|oneapi_visible|platform|backend_target"
    r"|backend$|device_name|default_device|log|trace|location|source|dump|pprint"
    r"|report|warn|leak|export|serialization|jax2tf|share_binary|pgle|distributed"
    r"|transfer|topology|cross_host|num_cpu|num_gpu|collectives_implementation"
    r"|process_index|recoverability|preemption|proxy|garbage|guard|explain|asserts"
    r"|verbose|async_dispatch|client_create|magma).*"
)


def meaning() -> Hashable:
    """What tells one configuration from another, as of this thread, at this moment."""
    mesh = jax.sharding.get_abstract_mesh()
    return (mesh, *(repr(getattr(jax.config, name)) for name in _names()))


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    """The settings that count, by name."""
    return tuple(
        name
        for name in dir(jax.config)
        if not name.startswith("_")
        and not _NO_MATTER.fullmatch(name)
        and isinstance(getattr(jax.config, name), bool | int | float | str | None)
    )
