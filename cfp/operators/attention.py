"""Attention as BERT, GPT and T5 have it, its projections, and embeddings.

Queries, keys and values are [batch, tokens, heads, head_dim].

- BERT: every query sees the keys of its sequence; what follows its length is padding.
- GPT: a query sees keys up to its own place.
- T5: every query sees all keys; a bias is added to the scores, which are not scaled.

Projections make them from the residual stream; embeddings are rotary, or of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from cfp.attention import pallas
from cfp.attention.kernels import KERNELS
from cfp.attention.problem import NO_MASK, Scores, problem_of
from cfp.errors import AttentionError
from cfp.operators import probe
from cfp.operators.activations import causal_mask, length_mask
from cfp.operators.norms import tokamaxes
from cfp.operators.operator import Argument, Implementation, Operator, Reason

# ---------------------------------------------------------- query, key and value


def _qkv_separate(x: Array, kernel: Array, bias: Array) -> Array:
    return jnp.stack([x @ kernel[i] + bias[i] for i in range(3)])


def _qkv_fused(x: Array, kernel: Array, bias: Array) -> Array:
    hidden = x.shape[-1]
    wide = jnp.concatenate([kernel[0], kernel[1], kernel[2]], axis=1)
    made = x @ wide + bias.reshape(-1)
    return jnp.stack([made[..., i * hidden : (i + 1) * hidden] for i in range(3)])


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

# ------------------------------------------------------------------ rotary embedding


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


def _rotary_rotated(x: Array, *, base: float) -> Array:
    cos, sin = (jnp.concatenate([a, a], axis=-1) for a in _angles(x, base))
    y = x.astype(jnp.float32)
    left, right = jnp.split(y, 2, axis=-1)
    return (y * cos + jnp.concatenate([-right, left], axis=-1) * sin).astype(x.dtype)


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
    implementations=tuple(
        Implementation(name, of, call, refuses=_rotary_refuses)
        for name, of, call in (
            ("xla", "XLA", _rotary),
            ("rotated", "XLA", _rotary_rotated),
            ("complex", "jax.lax", _rotary_complex),
        )
    ),
)

# ------------------------------------------------------------------- token embedding


def _take(table: Array, tokens: Array) -> Array:
    return jnp.take(table, tokens, axis=0)


def _one_hot(table: Array, tokens: Array) -> Array:
    return jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype) @ table


def _embed_flax(table: Array, tokens: Array) -> Array:
    made = nn.Embed(*table.shape, dtype=table.dtype)
    return made.apply({"params": {"embedding": table}}, tokens)  # type: ignore


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
        Implementation("one_hot", "jax.nn", _one_hot),
        Implementation("flax", "flax", _embed_flax),
    ),
)


_LEAST = -1e30


_Q_K_V = (
    Argument("query", "b s n d"),
    Argument("key", "b s n d"),
    Argument("value", "b s n d"),
)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
) -> Array:
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


def _limits(kernel: str, fused: Callable[..., Mapping[str, Any]]):
    """The reason why a kernel of `cfp.attention` does not compute an operator.

    Args:
        fused: makes the keyword arguments of `jax.nn.dot_product_attention`.
    """

    def refuses(query, key, value, *rest) -> Reason:
        given = fused(query, key, *rest)
        try:
            causal, bias = given.get("is_causal", False), given.get("bias")
            scale = given.get("scale")
            problem = problem_of(
                query, key, value, causal=causal, bias=bias, scale=scale
            )
        except AttentionError as error:
            return str(error)
        return KERNELS[kernel].refusal(problem, jax.default_backend())

    return refuses


def _with(form: Callable[..., Mapping[str, Any]], attend: Callable[..., Array]):
    """An attention whose keyword arguments are made of the operator's arguments."""

    def call(query, key, value, *rest, **options) -> Array:
        return attend(query, key, value, **form(query, key, *rest), **options)

    return call


def _implementations(
    form: Callable[..., Mapping[str, Any]],
    fused: Callable[..., Mapping[str, Any]],
    tokamax_backends: tuple[str, ...],
) -> tuple[Implementation, ...]:
    """The implementations that all kinds have.

    Args:
        form: makes `mask`, `bias` and `scale` for what takes these.
        fused: makes the keyword arguments of `jax.nn.dot_product_attention`.
        tokamax_backends: of tokamax, whose function takes the same arguments.
    """

    def by_jax_nn(name: str) -> Callable[..., Array]:
        attend: Any = jax.nn.dot_product_attention
        return _with(fused, functools.partial(attend, implementation=name))

    def by_tokamax(*args: Array, backend: str) -> Array:
        attend = functools.partial(
            probe.load_tokamax().dot_product_attention, implementation=backend
        )
        return _with(fused, attend)(*args)

    def all_scores(*args: Array) -> Array:
        return _with(form, _attend)(*args)

    return (
        Implementation(
            "cudnn",
            "cuDNN by jax.nn",
            by_jax_nn("cudnn"),
            probe=functools.partial(probe.gpu_reason, 8.0),
            refuses=_limits("cudnn", fused),
        ),
        Implementation("jax_nn", "jax.nn", by_jax_nn("xla")),
        Implementation("xla", "XLA", all_scores),
        Implementation(
            "rematerialized", "XLA, jax.checkpoint", jax.checkpoint(all_scores)
        ),
        Implementation("flax", "flax", _with(form, _flax)),
        *tokamaxes(by_tokamax, tokamax_backends, triton=""),
    )


def _flops(causal: bool) -> Callable[[Mapping[str, int]], float]:
    part = 0.5 if causal else 1.0
    return lambda d: part * 4.0 * d["b"] * d["n"] * d["s"] ** 2 * d["d"]


# ------------------------------------------------------------------------------ BERT


def _bert_form(query, key, lengths) -> dict[str, Any]:
    return {"mask": length_mask(lengths, key.shape[1])}


def _bert_fused(query, key, lengths) -> dict[str, Any]:
    return {"key_value_seq_lengths": lengths}


bert_attention = Operator(
    name="bert_attention",
    summary="attention to the first keys of each sequence",
    arguments=(
        *_Q_K_V,
        Argument("lengths", "b", kind="lengths", below="s"),
    ),
    oracle=_with(_bert_form, _attend),
    flops=_flops(causal=False),
    implementations=_implementations(
        _bert_form, _bert_fused, ("xla", "triton", "mosaic_gpu")
    ),
)

# ------------------------------------------------------------------------------- GPT


def _gpt_form(query, key) -> dict[str, Any]:
    return {"mask": causal_mask(query.shape[1], key.shape[1])}


def _gpt_fused(query, key) -> dict[str, Any]:
    return {"is_causal": True}


_CAUSAL = replace(NO_MASK, causal=True)


def gpt_attention_pallas(
    query: Array, key: Array, value: Array, *, interpret: bool = False
) -> Array:
    """The kernel of `jax.experimental.pallas.ops.gpu`; on CPUs it is interpreted."""
    scores = Scores(scale=query.shape[-1] ** -0.5)
    return pallas.whole(query, key, value, scores, _CAUSAL, None, interpret)


gpt_attention = Operator(
    name="gpt_attention",
    summary="causal attention",
    arguments=_Q_K_V,
    oracle=_with(_gpt_form, _attend),
    flops=_flops(causal=True),
    implementations=(
        *_implementations(_gpt_form, _gpt_fused, ("xla", "triton", "mosaic_gpu")),
        Implementation(
            "pallas",
            "Pallas",
            gpt_attention_pallas,
            probe=probe.pallas("attention"),
            refuses=_limits("pallas", _gpt_fused),
        ),
    ),
)

# -------------------------------------------------------------------------------- T5


def _t5_form(query, key, bias) -> dict[str, Any]:
    return {"bias": bias, "scale": 1.0}


t5_attention = Operator(
    name="t5_attention",
    summary="attention with a bias of the scores, which are not scaled",
    arguments=(
        Argument("query", "b s n d", spread="fan_last"),
        *_Q_K_V[1:],
        Argument("bias", "1 n s s"),
    ),
    oracle=_with(_t5_form, _attend),
    flops=_flops(causal=False),
    implementations=_implementations(_t5_form, _t5_form, ("xla", "triton")),
)
