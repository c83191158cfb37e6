"""Real arguments for a step of the user's, where only their shapes may be known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from cfp.program.fixed import fixed, released
from cfp.program.put import put


def make_argument(arg: Any, shardings: Any, key: jax.Array) -> Any:
    """An argument on the devices; where only its shape is known, of small numbers.

    Args:
        arg: a pytree of arrays and `jax.ShapeDtypeStruct` s.
        shardings: one for each of its arrays.
        key: for what is random.
    """
    leaves, tree = tree_flatten(fixed(arg))
    made = []
    for i, (leaf, sharding) in enumerate(
        zip(leaves, tree_leaves(shardings), strict=True)
    ):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            draw = jax.jit(_random, static_argnums=(1, 2), out_shardings=sharding)
            made.append(draw(jax.random.fold_in(key, i), leaf.shape, leaf.dtype))
        else:
            made.append(put(jnp.asarray(leaf), sharding))
    return released(tree_unflatten(tree, made))


def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # Small and never negative: what is a variance, an index or a count stays one.
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(key, shape)
    if jnp.issubdtype(dtype, jnp.floating):
        return (0.05 * jax.random.uniform(key, shape)).astype(dtype)
    return jax.random.bernoulli(key, 0.5, shape).astype(dtype)
