"""Attention as BERT, GPT and T5 have it, without their projections.

Queries, keys and values are [batch, tokens, heads, head_dim].

- BERT: every query sees the keys of its sequence; what follows its length is padding.
- GPT: a query sees keys up to its own place.
- T5: every query sees all keys; a bias is added to the scores, which are not scaled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from cfp.operators import probe
from cfp.operators.activations import causal_mask, length_mask
from cfp.operators.norms import tokamaxes
from cfp.operators.operator import Argument, Implementation, Operator, Reason

_HALVES = ("bfloat16", "float16")
_LEAST = -1e30
# What the kernel of Pallas divides a sequence into.
_PALLAS_BLOCK = 128


def _q_k_v(seq: str = "s") -> tuple[Argument, ...]:
    return (
        Argument(name="query", dims=f"b {seq} n d"),
        Argument(name="key", dims="b s n d"),
        Argument(name="value", dims="b s n d"),
    )


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
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


def _flax(query, key, value, *, mask=None, bias=None, scale=None) -> jax.Array:
    if scale is not None:  # It always divides by the root of the head's width.
        query = query * (scale * query.shape[-1] ** 0.5)
    return nn.dot_product_attention(
        query, key, value, bias=bias, mask=mask, force_fp32_for_softmax=True
    )


def _cudnn_refuses(query: jax.Array, *_: Any, **__: Any) -> Reason:
    if str(query.dtype) not in _HALVES:
        return f"cuDNN's attention takes {' and '.join(_HALVES)}"
    if query.shape[-1] % 8 or query.shape[-1] > 128:
        return f"cuDNN wants heads of 8 to 128 in steps of 8, not {query.shape[-1]}"
    if query.shape[1] % 2:
        return "cuDNN wants an even number of tokens"
    return None


def _pallas_refuses(query: jax.Array, *_: Any, **__: Any) -> Reason:
    if query.shape[1] % _PALLAS_BLOCK and query.shape[1] > _PALLAS_BLOCK:
        return f"the kernel wants tokens in multiples of {_PALLAS_BLOCK}"
    if query.shape[1] & (query.shape[1] - 1) and query.shape[1] < _PALLAS_BLOCK:
        return "the kernel wants a power of two of tokens below its block"
    if query.shape[-1] & (query.shape[-1] - 1) or query.shape[-1] < 16:
        return f"the kernel wants heads of 16, 32, 64, ..., not {query.shape[-1]}"
    return None


def _with(form: Callable[..., Mapping[str, Any]], attend: Callable[..., jax.Array]):
    """An attention whose keyword arguments are made of the operator's arguments."""

    def call(query, key, value, *rest, **options) -> jax.Array:
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

    def by_jax_nn(name: str) -> Callable[..., jax.Array]:
        attend: Any = jax.nn.dot_product_attention
        return _with(fused, functools.partial(attend, implementation=name))

    def by_tokamax(*args: jax.Array, backend: str) -> jax.Array:
        attend = functools.partial(
            probe.load_tokamax().dot_product_attention, implementation=backend
        )
        return _with(fused, attend)(*args)

    def all_scores(*args: jax.Array) -> jax.Array:
        return _with(form, _attend)(*args)

    return (
        Implementation(
            name="cudnn",
            library="cuDNN by jax.nn",
            call=by_jax_nn("cudnn"),
            probe=probe.cudnn_reason,
            refuses=_cudnn_refuses,
        ),
        Implementation(name="jax_nn", library="jax.nn", call=by_jax_nn("xla")),
        Implementation(name="xla", library="XLA", call=all_scores),
        Implementation(
            name="rematerialized",
            library="XLA, jax.checkpoint",
            call=jax.checkpoint(all_scores),
        ),
        Implementation(name="flax", library="flax", call=_with(form, _flax)),
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


BERT_ATTENTION = Operator(
    name="bert_attention",
    summary="attention to the first keys of each sequence",
    arguments=(
        *_q_k_v(),
        Argument(name="lengths", dims="b", kind="lengths", below="s"),
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


def gpt_attention_pallas(
    query: jax.Array, key: jax.Array, value: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The kernel of `jax.experimental.pallas.ops.gpu`; on CPUs it is interpreted."""
    module = probe.load_pallas("attention")
    scale = query.shape[-1] ** -0.5
    sizes = module.BlockSizes.get_default()
    # Positional: the arguments that are no arrays must be so for its custom gradient.
    return module.mha(
        query,
        key,
        value,
        None,
        scale,
        True,
        sizes,
        "triton",
        None,
        2,
        None,
        interpret,
    )


GPT_ATTENTION = Operator(
    name="gpt_attention",
    summary="causal attention",
    arguments=_q_k_v(),
    oracle=_with(_gpt_form, _attend),
    flops=_flops(causal=True),
    implementations=(
        *_implementations(_gpt_form, _gpt_fused, ("xla", "triton", "mosaic_gpu")),
        Implementation(
            name="pallas",
            library="Pallas",
            call=gpt_attention_pallas,
            probe=probe.pallas("attention"),
            refuses=_pallas_refuses,
        ),
    ),
)

# -------------------------------------------------------------------------------- T5


def _t5_form(query, key, bias) -> dict[str, Any]:
    return {"bias": bias, "scale": 1.0}


T5_ATTENTION = Operator(
    name="t5_attention",
    summary="attention with a bias of the scores, which are not scaled",
    arguments=(
        Argument(name="query", dims="b s n d", spread="fan_last"),
        *_q_k_v()[1:],
        Argument(name="bias", dims="1 n s s"),
    ),
    oracle=_with(_t5_form, _attend),
    flops=_flops(causal=False),
    implementations=_implementations(_t5_form, _t5_form, ("xla", "triton")),
)
