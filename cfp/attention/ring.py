"""Attention to keys that are spread over devices: a ring, or keys gathered at once.

Each rank keeps its queries. In a ring keys and values go round, one collective-permute
a step, issued before the computation of the step that it does not depend on; results
join by their log-sum-exp in float32. The backward pass goes round again, with the whole
row's output and log-sum-exp, and the gradients of keys and values travel along with
them in float32 until they are home. Liu et al., "Ring Attention with Blockwise
Transformers for Near-Infinite Context", 2023. In zigzag order every step of a causal
mask is the same work on every rank.

All of this is for the inside of a `jax.shard_map` that is manual in the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cfp.attention.merge import Partial, merge, nothing_yet
from cfp.attention.pieces import Piece, Pieces, Ring


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def spread_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    ring: Ring,
) -> jax.Array:
    """Attention of a rank's queries to the keys of all ranks.

    Args:
      q: [batch, queries of this rank, heads, head_dim].
      k: [batch, keys of this rank, kv_heads, head_dim].
      v: like k.
      query_segments: [batch, queries of this rank] int32, or None.
      key_segments: of all keys, [batch, keys], in the order of ranks; or None.
      ring: how tokens are spread.

    Returns:
      Like q.
    """
    return _forward(q, k, v, query_segments, key_segments, ring)[0]


def _forward(q, k, v, query_segments, key_segments, ring: Ring):
    def attend(so_far: Partial, piece: Piece, kv: jax.Array) -> Partial:
        attend = ring.kernel.attend
        assert attend is not None, "refused before"
        keys, values = kv[0][:, piece.keys], kv[1][:, piece.keys]
        more = attend(q[:, piece.queries], keys, values, ring.scores, piece.mask)
        rows = merge(tuple(x[:, piece.queries] for x in so_far), more)
        return tuple(
            _put(x, piece.queries, row) for x, row in zip(so_far, rows, strict=True)
        )

    pieces = Pieces.of(ring, q, k, query_segments, key_segments)
    so_far: Any = nothing_yet(q)
    kv = jnp.stack([k, v])
    if ring.gather:
        gathered = _gathered(kv, ring)
        for step in range(ring.steps(q.shape[1])):
            block = _block(gathered, step, ring)
            so_far = _run(pieces.of_step(step), attend, so_far, block)
    else:
        last = ring.steps(q.shape[1]) - 1
        for step in range(last + 1):
            following = kv if step == last else _rotated(kv, ring, 1)
            so_far = _run(pieces.of_step(step), attend, so_far, kv)
            # No block leaves before its predecessor is used up: two are alive at most.
            kv, so_far = lax.optimization_barrier((following, so_far))
    out, lse = so_far
    out = out.astype(q.dtype)
    return out, (q, k, v, query_segments, key_segments, out, lse)


def _backward(ring: Ring, kept: Any, dout: jax.Array):
    # Without this barrier XLA finds that the blocks which go round here are those of
    # the forward pass, and keeps them all in between.
    q, k, v, query_segments, key_segments, out, lse = kept
    q, k, v, out, lse, dout = lax.optimization_barrier((q, k, v, out, lse, dout))

    def add(dq: jax.Array, piece: Piece, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradients = ring.kernel.gradients
        assert gradients is not None, "refused before"
        rows = [x[:, piece.queries] for x in (q, out, lse, dout)]
        keys, values = kv[0][:, piece.keys], kv[1][:, piece.keys]
        mine, *theirs = gradients(
            rows[0], keys, values, *rows[1:], ring.scores, piece.mask
        )
        more = jnp.stack([x.astype(jnp.float32) for x in theirs])
        dkv = _put(jnp.zeros(kv.shape, jnp.float32), piece.keys, more, axis=2)
        row = dq[:, piece.queries] + mine.astype(jnp.float32)
        return _put(dq, piece.queries, row), dkv

    def step_of(step: int, dq: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        nothing = jnp.zeros(kv.shape, jnp.float32)
        return _run(
            pieces.of_step(step), lambda s, p, kv: add(s[0], p, kv), (dq, nothing), kv
        )

    pieces = Pieces.of(ring, q, k, query_segments, key_segments)
    dq = jnp.zeros(q.shape, jnp.float32)
    kv = jnp.stack([k, v])
    if ring.gather:
        gathered = _gathered(kv, ring)
        total = jnp.zeros(gathered.shape, jnp.float32)
        for step in range(ring.steps(q.shape[1])):
            dq, dkv = step_of(step, dq, _block(gathered, step, ring))
            total = _with_block(total, dkv, step, ring)
        dkv = _scattered(total, ring)
    else:
        last = ring.steps(q.shape[1]) - 1
        dkv = jnp.zeros(kv.shape, jnp.float32)
        for step in range(last + 1):
            following = kv if step == last else _rotated(kv, ring, 1)
            arrived = dkv if step == 0 else _rotated(dkv, ring, 1)
            dq, more = step_of(step, dq, kv)
            kv, dq, dkv = lax.optimization_barrier((following, dq, arrived + more))
        dkv = _rotated(dkv, ring, -last)
    dk, dv = dkv.astype(k.dtype)
    return dq.astype(q.dtype), dk, dv, None, None


spread_attention.defvjp(_forward, _backward)


def _run(
    pieces: Sequence[Piece],
    compute: Callable[[Any, Piece, jax.Array], Any],
    so_far: Any,
    kv: jax.Array,
) -> Any:
    """Computes the piece of a step that this rank has."""
    first = pieces[0]
    if first.when is None:
        return compute(so_far, first, kv)
    return lax.cond(
        first.when,
        lambda so_far: compute(so_far, first, kv),
        lambda so_far: compute(so_far, pieces[1], kv) if pieces[1:] else so_far,
        so_far,
    )


def _put(x: jax.Array, where: slice, part: jax.Array, axis: int = 1) -> jax.Array:
    if part.shape == x.shape:
        return part
    return x.at[(slice(None),) * axis + (where,)].set(part)


def _rotated(x: jax.Array, ring: Ring, ranks: int) -> jax.Array:
    if ranks % ring.ranks == 0:
        return x
    path = [(rank, (rank + ranks) % ring.ranks) for rank in range(ring.ranks)]
    return lax.ppermute(x, ring.axis, path)


def _gathered(kv: jax.Array, ring: Ring) -> jax.Array:
    """[ranks, 2, batch, keys, ...]; of a single block [2, batch, ranks * keys, ...]."""
    if ring.in_one:
        return lax.all_gather(kv, ring.axis, axis=2, tiled=True)
    return lax.all_gather(kv, ring.axis, axis=0)


def _scattered(dkv: jax.Array, ring: Ring) -> jax.Array:
    """What ranks have of the gradients of `_gathered`, summed, each its own."""
    axis = 2 if ring.in_one else 0
    return lax.psum_scatter(dkv, ring.axis, scatter_dimension=axis, tiled=ring.in_one)


def _block(gathered: jax.Array, step: int, ring: Ring) -> jax.Array:
    if ring.in_one:
        return gathered
    source = (lax.axis_index(ring.axis) - step) % ring.ranks
    return lax.dynamic_index_in_dim(gathered, source, keepdims=False)


def _with_block(total: jax.Array, block: jax.Array, step: int, ring: Ring) -> jax.Array:
    if ring.in_one:
        return block
    source = (lax.axis_index(ring.axis) - step) % ring.ranks
    return lax.dynamic_update_index_in_dim(total, block, source, axis=0)
