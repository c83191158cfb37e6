"""Activations: GELU of a sum, the gated SiLU, and softmaxes of attention scores.

Softmaxes are computed in float32, whatever the scores are.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cfp.operators.operator import Argument, Implementation, Operator


def _bias_gelu(x: Array, bias: Array) -> Array:
    y = x + bias
    inner = sqrt(2 / pi) * (y + 0.044715 * y * y * y)
    return 0.5 * y * (1 + jnp.tanh(inner))


def _bias_gelu_jax_nn(x: Array, bias: Array) -> Array:
    return jax.nn.gelu(x + bias, approximate=True)


bias_gelu = Operator(
    name="bias_gelu",
    summary="GELU (tanh) of x + bias, as between the two halves of an MLP",
    arguments=(Argument("x", "* f"), Argument("bias", "f")),
    oracle=_bias_gelu,
    implementations=(
        Implementation("jax_nn", "jax.nn", _bias_gelu_jax_nn),
        Implementation(
            "rematerialized",
            "jax.nn, jax.checkpoint",
            jax.checkpoint(_bias_gelu_jax_nn),
        ),
    ),
)


def _swiglu(x: Array, gate: Array, up: Array) -> Array:
    return jax.nn.silu(x @ gate) * (x @ up)


def _swiglu_rematerialized(x: Array, gate: Array, up: Array) -> Array:
    # The products are stored, the values computed from them are not.
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(_swiglu, policy=policy)(x, gate, up)


swiglu = Operator(
    name="swiglu",
    summary="silu(x @ gate) * (x @ up), the first half of a gated MLP",
    arguments=(
        Argument("x", "* h"),
        Argument("gate", "h f", spread="fan_in"),
        Argument("up", "h f", spread="fan_in"),
    ),
    oracle=_swiglu,
    flops=lambda d: 4.0 * d["*"] * d["h"] * d["f"],
    implementations=(
        Implementation("jax_nn", "jax.nn", _swiglu),
        Implementation(
            "rematerialized", "jax.nn, jax.checkpoint", _swiglu_rematerialized
        ),
    ),
)


_SCORES = Argument("scores", "b n q s", spread=2.0)
_LEAST = -1e30  # Finite: a row without any key has no not-a-number.


def length_mask(lengths: Array, keys: int) -> Array:
    """[batch] -> [batch, 1, 1, keys]: which keys there are."""
    return jnp.arange(keys) < lengths[:, None, None, None]


def causal_mask(queries: int, keys: int) -> Array:
    """[queries, keys]: a query sees those up to its own place."""
    return jnp.tril(jnp.ones((queries, keys), bool), keys - queries)


def _softmax(mask_of: Callable[..., Array | None]) -> dict[str, Any]:
    """The oracle and the implementations of a softmax over what a mask shows."""

    def xla(scores: Array, *rest: Array) -> Array:
        y, seen = scores.astype(jnp.float32), mask_of(scores, *rest)
        y = y if seen is None else jnp.where(seen, y, _LEAST)
        powers = jnp.exp(y - jax.lax.stop_gradient(y.max(-1, keepdims=True)))
        return (powers / powers.sum(-1, keepdims=True)).astype(scores.dtype)

    def jax_nn(scores: Array, *rest: Array) -> Array:
        wide, seen = scores.astype(jnp.float32), mask_of(scores, *rest)
        return jax.nn.softmax(wide, where=seen).astype(scores.dtype)

    return {
        "oracle": xla,
        "implementations": (
            Implementation("jax_nn", "jax.nn", jax_nn),
            Implementation("xla", "XLA", xla),
        ),
    }


softmax = Operator(
    name="softmax",
    summary="softmax over the last dim",
    arguments=(_SCORES,),
    **_softmax(lambda scores: None),
)

masked_softmax = Operator(
    name="masked_softmax",
    summary="softmax over the first keys of each sequence, the others are zero",
    arguments=(_SCORES, Argument("lengths", "b", kind="lengths", below="s")),
    **_softmax(lambda scores, lengths: length_mask(lengths, scores.shape[-1])),
)

causal_softmax = Operator(
    name="causal_softmax",
    summary="softmax over the keys up to each query's own place",
    arguments=(_SCORES,),
    **_softmax(lambda scores: causal_mask(*scores.shape[-2:])),
)
