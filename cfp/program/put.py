"""Whole arrays to where a sharding has them, and back, also over several processes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from cfp.program.memory import memory_kind


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """An array in a sharding.

    Args:
        leaf: the whole array; where devices of other processes are to have parts of it,
            each process passes the same.
        sharding: where it is to be.
    """
    is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if sharding.is_fully_addressable or not is_here:
        return jax.device_put(leaf, sharding)
    # What `jax.device_put` does then compares the values of all processes, by
    # collectives that take equally many devices in each.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data, impl = np.asarray(jax.random.key_data(leaf)), jax.random.key_impl(leaf)

        def wrap(data: jax.Array) -> jax.Array:
            return jax.random.wrap_key_data(data, impl=impl)

        return jax.jit(wrap, out_shardings=sharding)(data)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index]
    )


def fetch(leaf: jax.Array, device: Any) -> jax.Array:
    """A whole array on one device of this process, wherever its parts are.

    All processes that have parts of it call this, each with a `jax.Device` of its own.
    The parts are joined on the devices: what JAX does to move them to one device takes
    them through the host.
    """
    mesh = getattr(leaf.sharding, "mesh", None)
    if mesh is not None and not leaf.is_fully_replicated and not memory_kind(leaf):
        whole = NamedSharding(mesh, PartitionSpec())
        leaf = jax.jit(_same, out_shardings=whole)(leaf)
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, device)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = fetch(jax.random.key_data(leaf), device)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if leaf.is_fully_replicated:
        return jax.device_put(leaf.addressable_data(0), device)
    parts = multihost_utils.process_allgather(leaf, tiled=True)
    return jax.device_put(parts, device)


def _same(leaf: jax.Array) -> jax.Array:
    """The array; JAX compiles one function for all arrays of a shape."""
    return leaf
