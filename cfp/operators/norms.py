"""Layer norm, RMS norm, and layer norm of a sum with dropout.

Statistics are computed in float32, whatever the arguments are.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from cfp.operators.operator import Argument, Implementation, Operator, Reason

_SCALE = Argument("scale", "h", around=1.0, spread=0.1)
_BIAS = Argument("bias", "h", spread=0.1)
_X = Argument("x", "* h")


def _layer_norm(x: Array, scale: Array, bias: Array, *, eps: float) -> Array:
    y = x.astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + eps)
    return (normal * scale + bias).astype(x.dtype)


def _layer_norm_jax_nn(x: Array, scale: Array, bias: Array, *, eps: float) -> Array:
    y = jax.nn.standardize(x.astype(jnp.float32), epsilon=eps)
    return (y * scale + bias).astype(x.dtype)


layer_norm = Operator(
    name="layer_norm",
    summary="(x - mean) / sqrt(variance + eps) * scale + bias, over the last dim",
    arguments=(_X, _SCALE, _BIAS),
    oracle=_layer_norm,
    options={"eps": 1e-5},
    implementations=(
        Implementation("xla", "XLA", _layer_norm),
        Implementation("jax_nn", "jax.nn", _layer_norm_jax_nn),
    ),
)


def _rms_norm(x: Array, scale: Array, *, eps: float) -> Array:
    y = x.astype(jnp.float32)
    mean = jnp.square(y).mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt(mean + eps) * scale).astype(x.dtype)


def _rms_norm_flax(x: Array, scale: Array, *, eps: float) -> Array:
    params = {"params": {"scale": scale}}
    return nn.RMSNorm(epsilon=eps, dtype=x.dtype).apply(params, x)  # type: ignore


rms_norm = Operator(
    name="rms_norm",
    summary="x / sqrt(mean of squares + eps) * scale, over the last dim",
    arguments=(_X, _SCALE),
    oracle=_rms_norm,
    options={"eps": 1e-6},
    implementations=(
        Implementation("xla", "XLA", _rms_norm),
        Implementation("flax", "flax", _rms_norm_flax),
    ),
)


def _dropout_add_layer_norm(
    x, residual, scale, bias, key, *, rate: float, eps: float, norm=_layer_norm
) -> Array:
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 1.0 - rate, x.shape)
    dropped = jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
    return norm(residual + dropped, scale, bias, eps=eps)


def _dropout_refuses(*args: Array, rate: float, eps: float) -> Reason:
    return None if 0.0 <= rate < 1.0 else f"rate={rate} is not in [0, 1)"


dropout_add_layer_norm = Operator(
    name="dropout_add_layer_norm",
    summary="layer norm of residual + dropout(x), as after each half of a layer",
    arguments=(
        _X,
        Argument("residual", "* h"),
        _SCALE,
        _BIAS,
        Argument("key", "2", kind="key"),
    ),
    oracle=_dropout_add_layer_norm,
    options={"rate": 0.1, "eps": 1e-5},
    implementations=tuple(
        Implementation(
            name,
            library,
            functools.partial(_dropout_add_layer_norm, norm=norm),
            refuses=_dropout_refuses,
        )
        for name, library, norm in (
            ("xla", "XLA", _layer_norm),
            ("jax_nn", "jax.nn", _layer_norm_jax_nn),
        )
    ),
)
