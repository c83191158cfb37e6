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

from cfp.attention.chunked import Partial, merge, nothing_yet
from cfp.attention.pieces import Piece, Pieces, Ring

Step = int | jax.Array  # Not 0 where it is an array.


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


def attend_ring(
    q: jax.Array, k: jax.Array, v: jax.Array, ring: Ring
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of a rank's queries, without segments.

    Returns:
      (output like q; log-sum-exp over all keys, [batch, queries, heads] float32).
    """
    out, (*_, lse) = _forward(q, k, v, None, None, ring)
    return out, lse


def ring_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    ring: Ring,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of a rank's queries, keys and values, given what `attend_ring` makes.

    Args:
      q, k, v, ring: as of `attend_ring`.
      out, lse: its results.
      dout: gradient of the output.
    """
    dq, dk, dv, *_ = _backward(ring, (q, k, v, None, None, out, lse), dout)
    return dq, dk, dv


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

    def compute(step: Step, so_far: Partial, kv: jax.Array) -> Partial:
        return _run(pieces.of_step(step), attend, so_far, kv)

    last = ring.steps(q.shape[1]) - 1
    kv = jnp.stack([k, v])
    if ring.gather:
        gathered = _gathered(kv, ring)
        so_far = compute(0, nothing_yet(q), _block(gathered, 0, ring))
        so_far = lax.fori_loop(
            1,
            last + 1,
            lambda step, so_far: compute(step, so_far, _block(gathered, step, ring)),
            so_far,
        )
    else:

        def go_on(step: Step, carried: tuple[jax.Array, Partial]) -> Any:
            kv, so_far = carried
            following = _rotated(kv, ring, 1)
            return following, compute(step, so_far, kv)

        # A loop, so that no block leaves before its predecessor is used up; unrolled,
        # XLA may have all of them on their way at once.
        carried = kv, nothing_yet(q)
        if last > 0:
            carried = lax.fori_loop(1, last, go_on, go_on(0, carried))
        so_far = compute(last, carried[1], carried[0])
    out, lse = so_far
    out = out.astype(q.dtype)
    return out, (q, k, v, query_segments, key_segments, out, lse)


def _backward(ring: Ring, kept: Any, dout: jax.Array):
    # What goes round here must not look like what went round in the forward pass, or
    # XLA takes both for one and keeps blocks in between. A barrier is not enough: it is
    # gone when XLA looks for the last time. So values come before keys here.
    q, k, v, query_segments, key_segments, out, lse = kept
    q, k, v, out, lse, dout = lax.optimization_barrier((q, k, v, out, lse, dout))

    def add(dq: jax.Array, piece: Piece, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradients = ring.kernel.gradients
        assert gradients is not None, "refused before"
        rows = [x[:, piece.queries] for x in (q, out, lse, dout)]
        values, keys = kv[0][:, piece.keys], kv[1][:, piece.keys]
        mine, dk, dv = gradients(
            rows[0], keys, values, *rows[1:], ring.scores, piece.mask
        )
        more = jnp.stack([x.astype(jnp.float32) for x in (dv, dk)])
        dkv = _put(jnp.zeros(kv.shape, jnp.float32), piece.keys, more, axis=2)
        row = dq[:, piece.queries] + mine.astype(jnp.float32)
        return _put(dq, piece.queries, row), dkv

    pieces = Pieces.of(ring, q, k, query_segments, key_segments)

    def compute(step: Step, dq: jax.Array, kv: jax.Array) -> tuple[jax.Array, ...]:
        nothing = jnp.zeros(kv.shape, jnp.float32)
        return _run(
            pieces.of_step(step), lambda s, p, kv: add(s[0], p, kv), (dq, nothing), kv
        )

    last = ring.steps(q.shape[1]) - 1
    dq = jnp.zeros(q.shape, jnp.float32)
    kv = jnp.stack([v, k])
    if ring.gather:
        gathered = _gathered(kv, ring)

        def add_block(step: Step, carried: tuple[jax.Array, ...]) -> Any:
            dq, total = carried
            dq, dkv = compute(step, dq, _block(gathered, step, ring))
            return dq, _with_block(total, dkv, step, ring)

        carried = dq, jnp.zeros(gathered.shape, jnp.float32)
        carried = lax.fori_loop(1, last + 1, add_block, add_block(0, carried))
        dq, dkv = carried[0], _scattered(carried[1], ring)
    else:

        def go_on(step: Step, carried: tuple[jax.Array, ...]) -> Any:
            kv, dq, dkv = carried
            following, arrived = _rotated(kv, ring, 1), _rotated(dkv, ring, 1)
            dq, more = compute(step, dq, kv)
            return following, dq, arrived + more

        if last == 0:
            dq, dkv = compute(0, dq, kv)
        else:
            following = _rotated(kv, ring, 1)
            dq, dkv = compute(0, dq, kv)
            kv, dq, dkv = lax.fori_loop(1, last, go_on, (following, dq, dkv))
            arrived = _rotated(dkv, ring, 1)
            dq, more = compute(last, dq, kv)
            dkv = arrived + more
        dkv = _rotated(dkv, ring, -last)
    dv, dk = dkv.astype(k.dtype)
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
    if ranks % ring.ranks == 0 or ring.plays is not None:
        return x
    path = [(rank, (rank + ranks) % ring.ranks) for rank in range(ring.ranks)]
    return lax.ppermute(x, ring.axis, path)


def _gathered(kv: jax.Array, ring: Ring) -> jax.Array:
    """[ranks, 2, batch, keys, ...]; of a single block [2, batch, ranks * keys, ...]."""
    if ring.in_one:
        return lax.all_gather(kv, ring.axis, axis=2, tiled=True)
    return lax.all_gather(kv, ring.axis, axis=0)


def _scattered(dkv: jax.Array, ring: Ring) -> jax.Array:
    """Sums the gradients of `_gathered` over ranks; each rank keeps its own part."""
    axis = 2 if ring.in_one else 0
    return lax.psum_scatter(dkv, ring.axis, scatter_dimension=axis, tiled=ring.in_one)


def _block(gathered: jax.Array, step: Step, ring: Ring) -> jax.Array:
    if ring.in_one:
        return gathered
    source = (ring.rank - step) % ring.ranks
    return lax.dynamic_index_in_dim(gathered, source, keepdims=False)


def _with_block(
    total: jax.Array, block: jax.Array, step: Step, ring: Ring
) -> jax.Array:
    if ring.in_one:
        return block
    source = (ring.rank - step) % ring.ranks
    return lax.dynamic_update_index_in_dim(total, block, source, axis=0)
