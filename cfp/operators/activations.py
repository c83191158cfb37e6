"""Activations: GELU of a sum, the gated SiLU, and softmaxes of attention scores.

Softmaxes are computed in float32, whatever the scores are.
"""

from __future__ import annotations

import functools
from math import pi, sqrt

import jax
import jax.numpy as jnp

from cfp.operators import probe
from cfp.operators.norms import tokamaxes
from cfp.operators.operator import Argument, Implementation, Operator

# ------------------------------------------------------------------- GELU of a sum


def _bias_gelu(x: jax.Array, bias: jax.Array) -> jax.Array:
    y = x + bias
    inner = sqrt(2 / pi) * (y + 0.044715 * y * y * y)
    return 0.5 * y * (1 + jnp.tanh(inner))


def _bias_gelu_jax_nn(x: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(x + bias, approximate=True)


BIAS_GELU = Operator(
    name="bias_gelu",
    summary="GELU (tanh) of x + bias, as between the two halves of an MLP",
    arguments=(
        Argument(name="x", dims="* f"),
        Argument(name="bias", dims="f"),
    ),
    oracle=_bias_gelu,
    implementations=(
        Implementation(name="jax_nn", library="jax.nn", call=_bias_gelu_jax_nn),
        Implementation(name="xla", library="XLA", call=_bias_gelu),
        Implementation(
            name="rematerialized",
            library="jax.nn, jax.checkpoint",
            call=jax.checkpoint(_bias_gelu_jax_nn),
        ),
    ),
)

# --------------------------------------------------------------------- gated SiLU


def _swiglu(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(x @ gate) * (x @ up)


def _swiglu_fused(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    both = x @ jnp.concatenate([gate, up], axis=1)
    left, right = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(left) * right


def _swiglu_rematerialized(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    # The products are stored, what is made of them is not.
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(_swiglu, policy=policy)(x, gate, up)


def _swiglu_tokamax(
    x: jax.Array, gate: jax.Array, up: jax.Array, *, backend: str
) -> jax.Array:
    return probe.load_tokamax().gated_linear_unit(
        x, (gate, up), activation=jax.nn.silu, implementation=backend
    )


SWIGLU = Operator(
    name="swiglu",
    summary="silu(x @ gate) * (x @ up), the first half of a gated MLP",
    arguments=(
        Argument(name="x", dims="* h"),
        Argument(name="gate", dims="h f", spread="fan_in"),
        Argument(name="up", dims="h f", spread="fan_in"),
    ),
    oracle=_swiglu,
    flops=lambda d: 4.0 * d["*"] * d["h"] * d["f"],
    implementations=(
        Implementation(name="jax_nn", library="jax.nn", call=_swiglu),
        Implementation(name="fused", library="XLA", call=_swiglu_fused),
        Implementation(
            name="rematerialized",
            library="jax.nn, jax.checkpoint",
            call=_swiglu_rematerialized,
        ),
        *tokamaxes(functools.partial(_swiglu_tokamax), ("xla", "triton", "mosaic")),
    ),
)


_SCORES = Argument(name="scores", dims="b n q s", spread=2.0)
_LEAST = -1e30  # Finite: a row without any key has no not-a-number.


def _softmax(scores: jax.Array) -> jax.Array:
    y = scores.astype(jnp.float32)
    powers = jnp.exp(y - jax.lax.stop_gradient(y.max(-1, keepdims=True)))
    return (powers / powers.sum(-1, keepdims=True)).astype(scores.dtype)


def _softmax_jax_nn(scores: jax.Array) -> jax.Array:
    return jax.nn.softmax(scores.astype(jnp.float32)).astype(scores.dtype)


def softmax_pallas(scores: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The kernel of `jax.experimental.pallas.ops.gpu`; on CPUs it is interpreted."""
    return probe.load_pallas("softmax").softmax(scores, interpret=interpret)


SOFTMAX = Operator(
    name="softmax",
    summary="softmax over the last dim",
    arguments=(_SCORES,),
    oracle=_softmax,
    implementations=(
        Implementation(name="jax_nn", library="jax.nn", call=_softmax_jax_nn),
        Implementation(name="xla", library="XLA", call=_softmax),
        Implementation(
            name="pallas",
            library="Pallas",
            call=softmax_pallas,
            probe=probe.pallas("softmax"),
            differentiable=False,
        ),
    ),
)


def length_mask(lengths: jax.Array, keys: int) -> jax.Array:
    """[batch] -> [batch, 1, 1, keys]: which keys there are."""
    return jnp.arange(keys) < lengths[:, None, None, None]


def _masked(scores: jax.Array, lengths: jax.Array) -> jax.Array:
    mask = length_mask(lengths, scores.shape[-1])
    return _softmax(jnp.where(mask, scores.astype(jnp.float32), _LEAST)).astype(
        scores.dtype
    )


def _masked_jax_nn(scores: jax.Array, lengths: jax.Array) -> jax.Array:
    mask = length_mask(lengths, scores.shape[-1])
    return jax.nn.softmax(scores.astype(jnp.float32), where=mask).astype(scores.dtype)


MASKED_SOFTMAX = Operator(
    name="masked_softmax",
    summary="softmax over the first keys of each sequence, the others are zero",
    arguments=(
        _SCORES,
        Argument(name="lengths", dims="b", kind="lengths", below="s"),
    ),
    oracle=_masked,
    implementations=(
        Implementation(name="jax_nn", library="jax.nn", call=_masked_jax_nn),
        Implementation(name="xla", library="XLA", call=_masked),
    ),
)


def causal_mask(queries: int, keys: int) -> jax.Array:
    """[queries, keys]: a query sees those up to its own place."""
    return jnp.tril(jnp.ones((queries, keys), bool), keys - queries)


def _causal(scores: jax.Array) -> jax.Array:
    mask = causal_mask(*scores.shape[-2:])
    return _softmax(jnp.where(mask, scores.astype(jnp.float32), _LEAST)).astype(
        scores.dtype
    )


def _causal_jax_nn(scores: jax.Array) -> jax.Array:
    mask = causal_mask(*scores.shape[-2:])
    return jax.nn.softmax(scores.astype(jnp.float32), where=mask).astype(scores.dtype)


CAUSAL_SOFTMAX = Operator(
    name="causal_softmax",
    summary="softmax over the keys up to each query's own place",
    arguments=(_SCORES,),
    oracle=_causal,
    implementations=(
        Implementation(name="jax_nn", library="jax.nn", call=_causal_jax_nn),
        Implementation(name="xla", library="XLA", call=_causal),
    ),
)
