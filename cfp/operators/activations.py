"""Activations with what comes before them: GELU of a sum, and the gated SiLU."""

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
