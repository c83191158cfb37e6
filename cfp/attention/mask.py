"""Masks, and the scaling and soft cap of scores before the softmax.

Shapes use: batch, query (queries), key (keys), heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

# A position that no key has: of keys that fill a block up.
BEYOND = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """From products of queries and keys to scores: cap * tanh(scale * qk / cap).

    Attributes:
      scale: what products are multiplied with.
      softcap: bound of a score, or None. A bias is added, and a mask applied, after it.
    """

    scale: float
    softcap: float | None = None


def _static() -> Any:
    return field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The keys that a query sees: those that all of these conditions allow.

    Attributes:
      causal: no key behind the query.
      left: no key more than so many positions before the query; None has no bound.
      right: no key more than so many positions behind it; None has no bound.
      keys: no key at this position or behind: it is padding. None has no padding.
      query_positions: [query] int32, rising; 0, 1, 2... if None.
      key_positions: [key] int32, rising; 0, 1, 2... if None.
      query_segments: [batch, query] int32, or None: a query sees keys of its own
        segment only.
      key_segments: [batch, key] int32, or None like `query_segments`.
    """

    causal: bool = _static()
    left: int | None = _static()
    right: int | None = _static()
    keys: int | None = _static()
    query_positions: jax.Array | None = None
    key_positions: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None

    @property
    def by_position(self) -> bool:
        """True if positions matter at all."""
        bounds = (self.left, self.right, self.keys)
        return self.causal or any(bound is not None for bound in bounds)

    def without_positions(self) -> Mask:
        """The same mask of queries and keys that all see each other by position."""
        return replace(
            self,
            causal=False,
            left=None,
            right=None,
            keys=None,
            query_positions=None,
            key_positions=None,
        )


NO_MASK = Mask(causal=False, left=None, right=None, keys=None)


def positions_of(given: jax.Array | None, count: int) -> jax.Array:
    """Positions as an array, also where they are counted from 0."""
    return jnp.arange(count, dtype=jnp.int32) if given is None else given


def visible(mask: Mask, queries: int, keys: int) -> jax.Array | None:
    """[1 or batch, 1, query, key] of bool; None if everything is seen."""
    allowed = None
    if mask.by_position:
        query = positions_of(mask.query_positions, queries)[:, None]
        key = positions_of(mask.key_positions, keys)[None, :]
        for one in _bounds(mask, query, key):
            allowed = one if allowed is None else allowed & one
        assert allowed is not None, "a mask by position has a bound"
        allowed = jnp.broadcast_to(allowed, (queries, keys))[None, None]
    if mask.query_segments is not None and mask.key_segments is not None:
        same = mask.query_segments[:, :, None] == mask.key_segments[:, None, :]
        allowed = same[:, None] if allowed is None else allowed & same[:, None]
    return allowed


def may_meet(mask: Mask, query: jax.Array, key: jax.Array) -> jax.Array:
    """True if any of some queries may see any of some keys, by position.

    Args:
      mask: its segments are not looked at.
      query: positions of the queries, at least one.
      key: positions of the keys, at least one.

    Returns:
      [] bool; true also for some blocks in which nothing is seen.
    """
    first, last = jnp.min(query), jnp.max(query)
    lowest, highest = jnp.min(key), jnp.max(key)
    meets = jnp.asarray(True)
    if mask.causal:
        meets &= lowest <= last
    if mask.left is not None:
        meets &= first - highest <= mask.left
    if mask.right is not None:
        meets &= lowest - last <= mask.right
    if mask.keys is not None:
        meets &= lowest < mask.keys
    return meets


def _bounds(mask: Mask, query: jax.Array, key: jax.Array) -> list[jax.Array]:
    found = []
    if mask.causal:
        found.append(key <= query)
    if mask.left is not None:
        found.append(key >= query - mask.left)
    if mask.right is not None:
        found.append(key <= query + mask.right)
    if mask.keys is not None:
        found.append(key < mask.keys)
    return found
