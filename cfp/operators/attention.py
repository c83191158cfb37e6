"""Attention as BERT, GPT and T5 have it, its projections, and embeddings.

Queries, keys and values are [batch, tokens, heads, head_dim].

- BERT: every query sees the keys of its sequence; what follows its length is padding.
- GPT: a query sees keys up to its own place.
- T5: every query sees all keys; a bias is added to the scores, which are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from cfp.attention.kernels import KERNELS
from cfp.attention.problem import problem_of
from cfp.errors import AttentionError
from cfp.operators import probe
from cfp.operators.activations import causal_mask, length_mask
from cfp.operators.operator import Argument, Implementation, Operator, Reason


def _qkv_separate(x: Array, kernel: Array, bias: Array) -> Array:
    return jnp.stack([x @ kernel[i] + bias[i] for i in range(3)])


def _qkv_fused(x: Array, kernel: Array, bias: Array) -> Array:
    wide = jnp.concatenate([kernel[0], kernel[1], kernel[2]], axis=1)
    made = x @ wide + bias.reshape(-1)
    return jnp.stack(jnp.split(made, 3, axis=-1))


def _qkv_batched(x: Array, kernel: Array, bias: Array) -> Array:
    ones = (1,) * (x.ndim - 1)
    made = jnp.einsum("...h,xhk->x...k", x, kernel)
    return made + bias.reshape(3, *ones, -1)


qkv_projection = Operator(
    name="qkv_projection",
    summary="query, key and value of x, stacked",
    arguments=(
        Argument("x", "* h"),
        Argument("kernel", "3 h h", spread="fan_in"),
        Argument("bias", "3 h", spread=0.1),
    ),
    oracle=_qkv_separate,
    flops=lambda d: 6.0 * d["*"] * d["h"] ** 2,
    implementations=(
        Implementation("separate", "XLA", _qkv_separate),
        Implementation("fused", "XLA", _qkv_fused),
        Implementation("batched", "jax.numpy", _qkv_batched),
    ),
)


def _angles(x: Array, base: float) -> tuple[Array, Array]:
    """Cosine and sine, [tokens, 1, head_dim / 2]."""
    half = x.shape[-1] // 2
    rates = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * rates
    return jnp.cos(angles), jnp.sin(angles)


def _rotary(x: Array, *, base: float) -> Array:
    cos, sin = _angles(x, base)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _rotary_complex(x: Array, *, base: float) -> Array:
    cos, sin = _angles(x, base)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jax.lax.complex(left, right) * jax.lax.complex(cos, sin)
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


def _rotary_refuses(x: Array, *, base: float) -> Reason:
    return f"the head's width {x.shape[-1]} is odd" if x.shape[-1] % 2 else None


rotary_embedding = Operator(
    name="rotary_embedding",
    summary="turns pairs of a head's features by angles that grow with the place",
    arguments=(Argument("x", "b s n d"),),
    oracle=_rotary,
    options={"base": 10000.0},
    implementations=(
        Implementation("xla", "XLA", _rotary, refuses=_rotary_refuses),
        Implementation("complex", "jax.lax", _rotary_complex, refuses=_rotary_refuses),
    ),
)


def _take(table: Array, tokens: Array) -> Array:
    return jnp.take(table, tokens, axis=0)


def _take_float32(table: Array, tokens: Array) -> Array:
    # The gradients of a token that occurs often are then added up in float32.
    return jnp.take(table.astype(jnp.float32), tokens, axis=0).astype(table.dtype)


embedding = Operator(
    name="embedding",
    summary="rows of a table, by token",
    arguments=(
        Argument("table", "v h"),
        Argument("tokens", "b s", kind="below", below="v"),
    ),
    oracle=_take,
    implementations=(
        Implementation("xla", "jax.numpy", _take),
        Implementation("float32", "jax.numpy", _take_float32),
    ),
)


# From (query, key, the operator's other arguments) to keyword arguments.
Form = Callable[..., Mapping[str, Any]]
_LEAST = -1e30


def _all_scores(query, key, value, *, mask=None, bias=None, scale=None) -> Array:
    """Softmax of all scores, which are stored."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum(
        "bqnd,bknd->bnqk", query, key, preferred_element_type=jnp.float32
    )
    scores = scores * factor
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, _LEAST)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", weights, value)


def _flax(query, key, value, *, mask=None, bias=None, scale=None) -> Array:
    if scale is not None:  # It always divides by the root of the head's width.
        query = query * (scale * query.shape[-1] ** 0.5)
    return nn.dot_product_attention(
        query, key, value, bias=bias, mask=mask, force_fp32_for_softmax=True
    )


def _jax_nn(name: Any) -> Callable[..., Array]:
    def attend(*args: Array, **given: Any) -> Array:
        return jax.nn.dot_product_attention(*args, implementation=name, **given)

    return attend


def _attention(
    name: str,
    summary: str,
    *rest: Argument,
    query: Argument | None = None,
    form: Form,
    fused: Form,
    flops_share: float = 1.0,
) -> Operator:
    """An operator of attention.

    Args:
        rest: its arguments besides query, key and value.
        query: unlike the default.
        form: makes `mask`, `bias` and `scale`.
        fused: makes the keyword arguments of `jax.nn.dot_product_attention`.
        flops_share: the share of the scores that are computed.
    """

    def by(attend: Callable[..., Array], form: Form) -> Callable[..., Array]:
        def call(query, key, value, *rest) -> Array:
            return attend(query, key, value, **form(query, key, *rest))

        return call

    def refuses(query, key, value, *rest) -> Reason:
        given = fused(query, key, *rest)
        try:
            problem = problem_of(
                query,
                key,
                value,
                causal=given.get("is_causal", False),
                bias=given.get("bias"),
                scale=given.get("scale"),
            )
        except AttentionError as error:
            return str(error)
        return KERNELS["cudnn"].refusal(problem, jax.default_backend())

    return Operator(
        name=name,
        summary=summary,
        arguments=(
            query or Argument("query", "b s n d"),
            Argument("key", "b s n d"),
            Argument("value", "b s n d"),
            *rest,
        ),
        oracle=by(_all_scores, form),
        flops=lambda d: flops_share * 4.0 * d["b"] * d["n"] * d["s"] ** 2 * d["d"],
        implementations=(
            Implementation(
                "cudnn",
                "cuDNN by jax.nn",
                by(_jax_nn("cudnn"), fused),
                probe=probe.gpu_reason,
                refuses=refuses,
            ),
            Implementation("jax_nn", "jax.nn", by(_jax_nn("xla"), fused)),
            Implementation("xla", "XLA", by(_all_scores, form)),
            Implementation("flax", "flax", by(_flax, form)),
        ),
    )


bert_attention = _attention(
    "bert_attention",
    "attention to the first keys of each sequence",
    Argument("lengths", "b", kind="lengths", below="s"),
    form=lambda query, key, lengths: {"mask": length_mask(lengths, key.shape[1])},
    fused=lambda query, key, lengths: {"key_value_seq_lengths": lengths},
)

gpt_attention = _attention(
    "gpt_attention",
    "causal attention",
    form=lambda query, key: {"mask": causal_mask(query.shape[1], key.shape[1])},
    fused=lambda query, key: {"is_causal": True},
    flops_share=0.5,
)


def _unscaled(query: Array, key: Array, bias: Array) -> dict[str, Any]:
    return {"bias": bias, "scale": 1.0}


t5_attention = _attention(
    "t5_attention",
    "attention with a bias of the scores, which are not scaled",
    Argument("bias", "1 n s s"),
    query=Argument("query", "b s n d", spread="fan_last"),
    form=_unscaled,
    fused=_unscaled,
)
