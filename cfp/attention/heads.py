"""Heads over devices that they do not divide into: shared key heads, and padding."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFit:
    """Padding and repetition that make heads divide into parts.

    Attributes:
      kv_heads: key and value heads as they are.
      repeats: copies of each key and value head, for parts of its queries.
      padded_kv_heads: key and value heads then, with those of zeros behind them.
      group: query heads of each of these.
    """

    kv_heads: int
    repeats: int
    padded_kv_heads: int
    group: int

    @property
    def heads(self) -> int:
        """Query heads, with those of zeros."""
        return self.padded_kv_heads * self.group

    @property
    def changes(self) -> bool:
        return self.repeats > 1 or self.padded_kv_heads > self.kv_heads

    def queries(self, q: jax.Array) -> jax.Array:
        """[batch, tokens, heads, head_dim] with heads of zeros behind."""
        return _padded(q, self.heads)

    def keys(self, k: jax.Array) -> jax.Array:
        """[batch, tokens, kv_heads, head_dim], repeated and padded."""
        if self.repeats > 1:
            # In float32, so that the gradients of copies are summed in it.
            wide = jnp.repeat(k.astype(jnp.float32), self.repeats, axis=2)
            k = wide.astype(k.dtype)
        return _padded(k, self.padded_kv_heads)


def fit_heads(heads: int, kv_heads: int, parts: int) -> HeadFit:
    """Finds the fewest heads that divide into some parts.

    A key head is copied where several parts have queries of it; what still does not
    divide is filled up with heads of zeros, so that there are as few heads as possible.

    Args:
      heads: query heads, a multiple of kv_heads.
      kv_heads: key and value heads.
      parts: into how many parts they are to divide.
    """
    group = heads // kv_heads
    fits = [
        HeadFit(
            kv_heads=kv_heads,
            repeats=repeats,
            padded_kv_heads=-(-kv_heads * repeats // parts) * parts,
            group=group // repeats,
        )
        for repeats in range(1, group + 1)
        if group % repeats == 0
    ]
    return min(fits, key=lambda fit: (fit.heads + fit.padded_kv_heads, fit.heads))


def _padded(x: jax.Array, heads: int) -> jax.Array:
    more = heads - x.shape[2]
    return jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0))) if more else x
