"""Attention in chunks of up to 1024 tokens, written in lax, on any platform.

Two loops run over chunks of queries and of keys, with running sums of each row. They
skip chunks of keys that positions hide from all queries of a chunk. Rabe and Staats,
"Self-attention Does Not Need O(n^2) Memory", 2021; Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from cfp.kernels import plain
from cfp.kernels.problem import (
    BEYOND,
    AttentionProblem,
    Mask,
    Scores,
    may_meet,
    padded,
    positions_of,
)

CHUNK = 1024  # Tokens.

_Arrays = tuple[Array, ...]


def refusal(problem: AttentionProblem, platform: str) -> str | None:
    """Reason to refuse a problem with a bias or dense mask; None for all others."""
    if problem.bias:
        return "it supports no bias or mask [queries, keys], as large as the scores"
    return None


def whole(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask, bias: Array | None = None
) -> Array:
    """Computes attention; the output has q's dtype. A bias raises AssertionError."""
    assert bias is None, "refused before"
    return _whole(q, k, v, scores, mask)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _whole(q, k, v, scores, mask):
    return _forward(q, k, v, scores, mask)[0]


def _forward(q, k, v, scores, mask):
    out, lse = attend(q, k, v, scores, mask)
    out = out.astype(q.dtype)
    return out, (q, k, v, out, lse, mask)


def _backward(scores, kept, dout):
    q, k, v, out, lse, mask = kept
    grads = gradients((q, out, lse, dout), k, v, scores, mask)
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv, None


_whole.defvjp(_forward, _backward)


def attend(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask
) -> tuple[Array, Array]:
    """Like `plain.attend`, without a bias."""
    queries = q.shape[1]
    if max(queries, k.shape[1]) <= CHUNK:
        return plain.attend(q, k, v, scores, mask)
    mask, (q,), (k, v) = _even(mask, (q,), (k, v))
    size_q, size_k = min(CHUNK, q.shape[1]), min(CHUNK, k.shape[1])
    rounds = k.shape[1] // size_k

    def rows(start: Array) -> tuple[Array, Array]:
        part = _cut(q, start, size_q)

        def add(i: Array, so_far: _Arrays) -> _Arrays:
            at = i * size_k
            inner = _mask_of(mask, start, size_q, at, size_k)

            def meet(so_far: _Arrays) -> _Arrays:
                keys, values = _cut(k, at, size_k), _cut(v, at, size_k)
                return merge(so_far, plain.attend(part, keys, values, scores, inner))

            return _if_met(inner, meet, so_far)

        return lax.fori_loop(0, rounds, add, nothing_yet(part))

    starts = jnp.arange(q.shape[1] // size_q, dtype=jnp.int32) * size_q
    out, lse = lax.map(rows, starts)
    return _joined(out)[:, :queries], _joined(lse)[:, :queries]


def gradients(
    rows: tuple[Array, ...], k: Array, v: Array, scores: Scores, mask: Mask
) -> tuple[Array, Array, Array]:
    """Like `plain.gradients`."""
    queries, keys = rows[0].shape[1], k.shape[1]
    if max(queries, keys) <= CHUNK:
        return plain.gradients(rows, k, v, scores, mask)
    mask, even, (k, v) = _even(mask, rows, (k, v))
    q = even[0]
    size_q, size_k = min(CHUNK, q.shape[1]), min(CHUNK, k.shape[1])
    rounds = q.shape[1] // size_q

    def columns(dq: Array, start: Array) -> tuple[Array, _Arrays]:
        part = _cut(k, start, size_k), _cut(v, start, size_k)

        def add(i: Array, so_far: _Arrays) -> _Arrays:
            at = i * size_q
            inner = _mask_of(mask, at, size_q, start, size_k)

            def meet(so_far: _Arrays) -> _Arrays:
                dq, dk, dv = so_far
                some = tuple(_cut(one, at, size_q) for one in even)
                more = plain.gradients(some, *part, scores, inner)
                row = _cut(dq, at, size_q) + more[0]
                dq = lax.dynamic_update_slice_in_dim(dq, row, at, axis=1)
                return dq, dk + more[1], dv + more[2]

            return _if_met(inner, meet, so_far)

        zero = jnp.zeros(part[0].shape, jnp.float32)
        dq, dk, dv = lax.fori_loop(0, rounds, add, (dq, zero, zero))
        return dq, (dk, dv)

    starts = jnp.arange(k.shape[1] // size_k, dtype=jnp.int32) * size_k
    dq, (dk, dv) = lax.scan(columns, jnp.zeros(q.shape, jnp.float32), starts)
    return dq[:, :queries], _joined(dk)[:, :keys], _joined(dv)[:, :keys]


def _if_met(mask: Mask, meet, so_far: _Arrays) -> _Arrays:
    if not mask.by_position:
        return meet(so_far)
    assert mask.query_positions is not None and mask.key_positions is not None
    met = may_meet(mask, mask.query_positions, mask.key_positions)
    return lax.cond(met, meet, lambda so_far: so_far, so_far)


def _even(
    mask: Mask, by_query: _Arrays, by_key: _Arrays
) -> tuple[Mask, list[Array], list[Array]]:
    """Pads queries, and keys, to whole chunks if beyond one; masks added keys."""
    queries, keys = by_query[0].shape[1], by_key[0].shape[1]
    more_q, more_k = _missing(queries), _missing(keys)
    query = positions_of(mask.query_positions, queries)
    key = positions_of(mask.key_positions, keys)
    # Added queries repeat the last position, which widens no chunk's range.
    query = jnp.pad(query, (0, more_q), mode="edge")
    mask = replace(
        mask,
        keys=mask.keys or (BEYOND if more_k else None),
        query_positions=query,
        key_positions=jnp.pad(key, (0, more_k), constant_values=BEYOND),
        query_segments=padded(mask.query_segments, {1: queries + more_q}),
        key_segments=padded(mask.key_segments, {1: keys + more_k}),
    )
    filled_q = [padded(one, {1: queries + more_q}) for one in by_query]
    return mask, filled_q, [padded(one, {1: keys + more_k}) for one in by_key]


def _missing(count: int) -> int:
    return 0 if count <= CHUNK else -count % CHUNK


def _mask_of(mask: Mask, query: Array, queries: int, key: Array, keys: int):
    return replace(
        mask,
        query_positions=_cut(mask.query_positions, query, queries, 0),
        key_positions=_cut(mask.key_positions, key, keys, 0),
        query_segments=_cut(mask.query_segments, query, queries, 1),
        key_segments=_cut(mask.key_segments, key, keys, 1),
    )


def _cut(x: Any, start: Array, count: int, axis: int = 1) -> Any:
    return None if x is None else lax.dynamic_slice_in_dim(x, start, count, axis=axis)


def _joined(chunks: Array) -> Array:
    """[chunk, batch, tokens, ...] -> [batch, chunk * tokens, ...]."""
    moved = jnp.moveaxis(chunks, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


# ------------------------------------------------------------------- parts of the keys

# Output [batch, query, heads, head_dim], log-sum-exp [batch, query, heads]: float32.
Partial = tuple[Array, ...]


def nothing_yet(q: Array) -> Partial:
    """Result of attention without keys: zeros, and log-sum-exp -inf, in float32."""
    out = jnp.zeros(q.shape, jnp.float32)
    return out, jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)


def merge(one: Partial, other: Partial) -> Partial:
    """Combines results of attention to two disjoint sets of keys, in float32.

    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    out, lse = one
    more, more_lse = other
    both = jnp.logaddexp(lse, more_lse)
    # If no set has a visible key, both outputs are zero.
    base = jnp.where(both == -jnp.inf, 0.0, both)
    out = out * jnp.exp(lse - base)[..., None]
    return out + more.astype(jnp.float32) * jnp.exp(more_lse - base)[..., None], both
