"""Layer norm, RMS norm, and layer norm of a sum with dropout.

Statistics are computed in float32, whatever the arguments are.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from cfp.operators import probe
from cfp.operators.operator import Argument, Implementation, Operator, Reason

_SCALE = Argument("scale", "h", around=1.0, spread=0.1)
_BIAS = Argument("bias", "h", spread=0.1)
_X = Argument("x", "* h")


# ------------------------------------------------------------------------ layer norm


def _layer_norm(x: Array, scale: Array, bias: Array, *, eps: float) -> Array:
    y = x.astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + eps)
    return (normal * scale + bias).astype(x.dtype)


def _layer_norm_jax_nn(x: Array, scale: Array, bias: Array, *, eps: float) -> Array:
    y = jax.nn.standardize(x.astype(jnp.float32), epsilon=eps)
    return (y * scale + bias).astype(x.dtype)


def _layer_norm_flax(x: Array, scale: Array, bias: Array, *, eps: float) -> Array:
    params = {"params": {"scale": scale, "bias": bias}}
    return nn.LayerNorm(epsilon=eps, dtype=x.dtype).apply(params, x)  # type: ignore


def layer_norm_pallas(
    x: Array, scale: Array, bias: Array, *, eps: float, interpret: bool = False
) -> Array:
    """The kernel of `jax.experimental.pallas.ops.gpu`; on CPUs it is interpreted."""
    return _by_pallas("layer_norm", x, scale, bias, eps, interpret)


def _by_pallas(
    name: str, x: Array, scale: Array, bias: Array, eps: float, interpret: bool
) -> Array:
    kernel = getattr(probe.load_pallas(name), name)
    rows = x.reshape(1, -1, x.shape[-1])
    # Positional: the arguments that are no arrays must be so for its custom gradient.
    return kernel(rows, scale, bias, None, 3, eps, "triton", interpret).reshape(x.shape)


def _layer_norm_tokamax(
    x: Array, scale: Array, bias: Array, *, eps: float, backend: str
) -> Array:
    return probe.load_tokamax().layer_norm(
        x, scale, bias, epsilon=eps, implementation=backend
    )


def tokamaxes(
    call, backends: tuple[str, ...], triton: str = "jax_triton"
) -> tuple[Implementation, ...]:
    """The functions of tokamax for an operator.

    Args:
        call: takes the operator's arguments, and `backend`.
        backends: names that tokamax gives its implementations.
        triton: a module that its Triton kernel needs.
    """
    return tuple(
        Implementation(
            f"tokamax_{backend}",
            "tokamax",
            functools.partial(call, backend=backend),
            probe=probe.tokamax(backend, triton if backend == "triton" else ""),
        )
        for backend in backends
    )


layer_norm = Operator(
    name="layer_norm",
    summary="(x - mean) / sqrt(variance + eps) * scale + bias, over the last dim",
    arguments=(_X, _SCALE, _BIAS),
    oracle=_layer_norm,
    options={"eps": 1e-5},
    implementations=(
        Implementation("xla", "XLA", _layer_norm),
        Implementation("jax_nn", "jax.nn", _layer_norm_jax_nn),
        Implementation("flax", "flax", _layer_norm_flax),
        Implementation(
            "pallas", "Pallas", layer_norm_pallas, probe=probe.pallas("layer_norm")
        ),
        *tokamaxes(_layer_norm_tokamax, ("xla", "triton")),
    ),
)

# -------------------------------------------------------------------------- RMS norm


def _rms_norm(x: Array, scale: Array, *, eps: float) -> Array:
    y = x.astype(jnp.float32)
    mean = jnp.square(y).mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt(mean + eps) * scale).astype(x.dtype)


def _rms_norm_flax(x: Array, scale: Array, *, eps: float) -> Array:
    params = {"params": {"scale": scale}}
    return nn.RMSNorm(epsilon=eps, dtype=x.dtype).apply(params, x)  # type: ignore


def rms_norm_pallas(
    x: Array, scale: Array, *, eps: float, interpret: bool = False
) -> Array:
    """The kernel of `jax.experimental.pallas.ops.gpu`; on CPUs it is interpreted."""
    return _by_pallas("rms_norm", x, scale, jnp.zeros_like(scale), eps, interpret)


def _rms_norm_tokamax(x: Array, scale: Array, *, eps: float, backend: str) -> Array:
    return probe.load_tokamax().layer_norm(
        x, scale, None, epsilon=eps, subtract_mean=False, implementation=backend
    )


rms_norm = Operator(
    name="rms_norm",
    summary="x / sqrt(mean of squares + eps) * scale, over the last dim",
    arguments=(_X, _SCALE),
    oracle=_rms_norm,
    options={"eps": 1e-6},
    implementations=(
        Implementation("xla", "XLA", _rms_norm),
        Implementation("flax", "flax", _rms_norm_flax),
        Implementation(
            "pallas", "Pallas", rms_norm_pallas, probe=probe.pallas("rms_norm")
        ),
        *tokamaxes(_rms_norm_tokamax, ("xla", "triton")),
    ),
)

# -------------------------------------------------- layer norm of a sum with dropout


def _sum(x: Array, residual: Array, key: Array, rate: float) -> Array:
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 1.0 - rate, x.shape)
    return residual + jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def _dropout_add_layer_norm(
    x, residual, scale, bias, key, *, rate: float, eps: float, norm=_layer_norm
) -> Array:
    return norm(_sum(x, residual, key, rate), scale, bias, eps=eps)


def _dropout_refuses(*args: Array, rate: float, eps: float) -> Reason:
    return None if 0.0 <= rate < 1.0 else f"rate={rate} is not in [0, 1)"


def _dropout(name: str, library: str, norm, found=lambda: None) -> Implementation:
    return Implementation(
        name,
        library,
        functools.partial(_dropout_add_layer_norm, norm=norm),
        probe=found,
        refuses=_dropout_refuses,
    )


def _dropout_rematerialized(*args, rate: float, eps: float) -> Array:
    call = functools.partial(_dropout_add_layer_norm, rate=rate, eps=eps)
    return jax.checkpoint(call)(*args)


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
    implementations=(
        _dropout("xla", "XLA", _layer_norm),
        _dropout("jax_nn", "jax.nn", _layer_norm_jax_nn),
        Implementation(
            "rematerialized",
            "XLA, jax.checkpoint",
            _dropout_rematerialized,
            refuses=_dropout_refuses,
        ),
        _dropout("pallas", "Pallas", layer_norm_pallas, probe.pallas("layer_norm")),
        _dropout(
            "tokamax_triton",
            "tokamax",
            functools.partial(_layer_norm_tokamax, backend="triton"),
            probe.tokamax("triton", "jax_triton"),
        ),
    ),
)
