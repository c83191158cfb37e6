"""Attention to some keys, and to others, as attention to all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Output [batch, query, heads, head_dim], log-sum-exp [batch, query, heads]: float32.
Partial = tuple[jax.Array, ...]


def nothing_yet(q: jax.Array) -> Partial:
    """The result of attention to no key at all."""
    out = jnp.zeros(q.shape, jnp.float32)
    return out, jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)


def merge(one: Partial, other: Partial) -> Partial:
    """Joins what two sets of keys gave, in float32.

    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    out, lse = one
    more, more_lse = other
    both = jnp.logaddexp(lse, more_lse)
    # Where neither set had a key to be seen, both outputs are zero.
    base = jnp.where(both == -jnp.inf, 0.0, both)
    out = out * jnp.exp(lse - base)[..., None]
    return out + more.astype(jnp.float32) * jnp.exp(more_lse - base)[..., None], both
