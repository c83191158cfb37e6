"""Token orders: zigzag, in which causal attention is the same work for every rank.

The sequence is cut into two chunks for each rank; rank i has chunk i and chunk
2 * ranks - 1 - i. Whole models run in this order: convert tokens, labels, positions and
segment ids once, where batches are loaded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def zigzag_order(length: int, ranks: int) -> np.ndarray:
    """Positions in zigzag order: token i of the new order is token `order[i]` of old.

    Args:
      length: tokens, a multiple of 2 * ranks.
      ranks: devices that share a sequence in the ring.

    Raises:
      ValueError: the length cannot be cut into two chunks for each rank.
    """
    if length % (2 * ranks):
        raise ValueError(
            f"a length in zigzag order is a multiple of 2 * ranks = {2 * ranks}, "
            f"got {length}"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * ranks, -1)
    mine = [chunks[[rank, 2 * ranks - 1 - rank]] for rank in range(ranks)]
    return np.concatenate(mine).reshape(-1)


def to_zigzag(x: jax.Array, ranks: int, axis: int = 1) -> jax.Array:
    """Tokens along a dim in zigzag order, whose positions are `zigzag_order`."""
    return jnp.take(x, zigzag_order(x.shape[axis], ranks), axis=axis)


def from_zigzag(x: jax.Array, ranks: int, axis: int = 1) -> jax.Array:
    """Undoes `to_zigzag`."""
    back = np.argsort(zigzag_order(x.shape[axis], ranks))
    return jnp.take(x, back, axis=axis)


def local_positions(rank: jax.Array, ranks: int, count: int, zigzag: bool) -> jax.Array:
    """Positions of the tokens that a rank has, [count] int32."""
    index = jnp.arange(count, dtype=jnp.int32)
    if not zigzag:
        return rank * count + index
    half = count // 2
    first, second = index[:half], index[:half]
    last = 2 * ranks - 1 - rank
    return jnp.concatenate([rank * half + first, last * half + second])
