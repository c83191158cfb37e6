"""Plain attention, with all scores in memory: the kernel "xla", and the tests' oracle.

Shapes use: batch, query, key (tokens), heads, kv_heads, group (heads / kv_heads),
head_dim. Query heads that share a key and value head are neighbours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from cfp.kernels.problem import AttentionProblem, Mask, Scores, visible


def attend(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask, bias: Array | None = None
) -> tuple[Array, Array]:
    """Computes attention of a block of queries to a block of keys, differentiably.

    Args:
      q: [batch, query, heads, head_dim].
      k: [batch, key, kv_heads, head_dim].
      v: [batch, key, kv_heads, head_dim].
      mask: visible keys of each query; a query without visible keys gets zeros.
      bias: added to the scores, [1 or batch, 1 or heads, query, key].

    Returns:
      (output [batch, query, heads, head_dim] float32; log-sum-exp of the scores [batch,
      query, heads] float32, -inf without a visible key).
    """
    found = _scores(q, k, scores, mask, bias)[0]
    top = jnp.max(found, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    weights = jnp.exp(found - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = _sum("bhgqk,bkhd->bqhgd", weights.astype(v.dtype), v)
    share = jnp.where(total > 0, total, 1.0)
    out = mixed.reshape(q.shape) / _by_query(share, q.shape)
    lse = jnp.log(total) + top
    return out, _by_query(lse, q.shape)[..., 0]


def whole(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask, bias: Array | None = None
) -> Array:
    """Returns the output of `attend` in the dtype of q."""
    return attend(q, k, v, scores, mask, bias)[0].astype(q.dtype)


def refusal(problem: AttentionProblem, platform: str) -> str | None:
    """None: plain attention computes every problem."""
    return None


def gradients(
    rows: tuple[Array, ...], k: Array, v: Array, scores: Scores, mask: Mask
) -> tuple[Array, Array, Array]:
    """Computes the gradients' contribution of one block of keys.

    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
    Partitioning", 2023, algorithm 2.

    Args:
      rows: (q; output of attention to all blocks of keys, like q; log-sum-exp of scores
        of all blocks, [batch, query, heads] float32; gradient of the output).
      k, v, scores, mask: the block, as for `attend`.

    Returns:
      (dq, dk, dv), float32, in the shapes of q, k and v.
    """
    q, out, lse, dout = rows
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = (batch, queries, kv_heads, heads // kv_heads, head_dim)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    found, slope = _scores(q, k, scores, mask, None)
    weights = jnp.exp(found - _by_score(jnp.where(lse == -jnp.inf, 0.0, lse), kv_heads))
    dout = dout.reshape(grouped)
    dv = _sum("bhgqk,bqhgd->bkhd", weights.astype(v.dtype), dout.astype(v.dtype))
    dweights = _sum("bqhgd,bkhd->bhgqk", dout.astype(v.dtype), v)
    dscores = weights * (dweights - _by_score(delta, kv_heads)) * scores.scale
    if slope is not None:
        dscores = dscores * slope
    dscores = dscores.astype(q.dtype)
    dq = _sum("bhgqk,bkhd->bqhgd", dscores, k)
    dk = _sum("bhgqk,bqhgd->bkhd", dscores, q.reshape(grouped))
    return dq.reshape(q.shape), dk, dv


def _scores(
    q: Array, k: Array, scores: Scores, mask: Mask, bias: Array | None
) -> tuple[Array, Array | None]:
    """Scores [batch, kv_heads, group, query, key] float32, and the soft cap's slope."""
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    q = q.reshape(batch, queries, kv_heads, group, head_dim)
    found = _sum("bqhgd,bkhd->bhgqk", q, k) * scores.scale
    slope = None
    if scores.softcap is not None:
        capped = jnp.tanh(found / scores.softcap)
        found, slope = scores.softcap * capped, 1.0 - capped * capped
    if bias is not None:
        bias = jnp.broadcast_to(bias, (bias.shape[0], heads, queries, keys))
        bias = bias.reshape(bias.shape[0], kv_heads, group, queries, keys)
        found = found + bias.astype(jnp.float32)
    allowed = visible(mask, queries, keys)
    if allowed is not None:
        found = jnp.where(allowed[:, :, None], found, -jnp.inf)
    return found, slope


def _sum(what: str, *operands: Array) -> Array:
    return jnp.einsum(what, *operands, preferred_element_type=jnp.float32)


def _by_query(rows: Array, shape: tuple[int, ...]) -> Array:
    """[batch, kv_heads, group, query, 1] -> [batch, query, heads, 1]."""
    batch, queries, heads, _ = shape
    return rows.reshape(batch, heads, queries, 1).swapaxes(1, 2)


def _by_score(rows: Array, kv_heads: int) -> Array:
    """[batch, query, heads] -> [batch, kv_heads, group, query, 1]."""
    batch, queries, heads = rows.shape
    turned = rows.swapaxes(1, 2)
    return turned.reshape(batch, kv_heads, heads // kv_heads, queries, 1)
