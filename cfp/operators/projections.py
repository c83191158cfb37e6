"""Queries, keys and values from the residual stream; rotary and token embedding."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from cfp.operators import probe
from cfp.operators.operator import Argument, Implementation, Operator, Reason

# ---------------------------------------------------------- query, key and value


def _qkv_separate(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return jnp.stack([x @ kernel[i] + bias[i] for i in range(3)])


def _qkv_fused(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    hidden = x.shape[-1]
    wide = jnp.concatenate([kernel[0], kernel[1], kernel[2]], axis=1)
    made = x @ wide + bias.reshape(-1)
    return jnp.stack([made[..., i * hidden : (i + 1) * hidden] for i in range(3)])


def _qkv_batched(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    ones = (1,) * (x.ndim - 1)
    made = jnp.einsum("...h,xhk->x...k", x, kernel)
    return made + bias.reshape(3, *ones, -1)


QKV_PROJECTION = Operator(
    name="qkv_projection",
    summary="query, key and value of x, stacked",
    arguments=(
        Argument(name="x", dims="* h"),
        Argument(name="kernel", dims="3 h h", spread="fan_in"),
        Argument(name="bias", dims="3 h", spread=0.1),
    ),
    oracle=_qkv_separate,
    flops=lambda d: 6.0 * d["*"] * d["h"] ** 2,
    implementations=(
        Implementation(name="separate", library="XLA", call=_qkv_separate),
        Implementation(name="fused", library="XLA", call=_qkv_fused),
        Implementation(name="batched", library="jax.numpy", call=_qkv_batched),
    ),
)

# ------------------------------------------------------------------ rotary embedding


def _angles(x: jax.Array, base: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, [tokens, 1, head_dim / 2]."""
    half = x.shape[-1] // 2
    rates = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * rates
    return jnp.cos(angles), jnp.sin(angles)


def _rotary(x: jax.Array, *, base: float) -> jax.Array:
    cos, sin = _angles(x, base)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _rotary_rotated(x: jax.Array, *, base: float) -> jax.Array:
    cos, sin = (jnp.concatenate([a, a], axis=-1) for a in _angles(x, base))
    y = x.astype(jnp.float32)
    left, right = jnp.split(y, 2, axis=-1)
    return (y * cos + jnp.concatenate([-right, left], axis=-1) * sin).astype(x.dtype)


def _rotary_complex(x: jax.Array, *, base: float) -> jax.Array:
    cos, sin = _angles(x, base)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jax.lax.complex(left, right) * jax.lax.complex(cos, sin)
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


def _rotary_refuses(x: jax.Array, *, base: float) -> Reason:
    return f"the head's width {x.shape[-1]} is odd" if x.shape[-1] % 2 else None


ROTARY_EMBEDDING = Operator(
    name="rotary_embedding",
    summary="turns pairs of a head's features by angles that grow with the place",
    arguments=(Argument(name="x", dims="b s n d"),),
    oracle=_rotary,
    options={"base": 10000.0},
    implementations=tuple(
        Implementation(name=name, library=of, call=call, refuses=_rotary_refuses)
        for name, of, call in (
            ("xla", "XLA", _rotary),
            ("rotated", "XLA", _rotary_rotated),
            ("complex", "jax.lax", _rotary_complex),
        )
    ),
)

# ------------------------------------------------------------------- token embedding


def _take(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(table, tokens, axis=0)


def _one_hot(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype) @ table


def _embed_flax(table: jax.Array, tokens: jax.Array) -> jax.Array:
    made = nn.Embed(*table.shape, dtype=table.dtype)
    return made.apply({"params": {"embedding": table}}, tokens)  # type: ignore


def _take_float32(table: jax.Array, tokens: jax.Array) -> jax.Array:
    # The gradients of a token that occurs often are then added up in float32.
    return jnp.take(table.astype(jnp.float32), tokens, axis=0).astype(table.dtype)


EMBEDDING = Operator(
    name="embedding",
    summary="rows of a table, by token",
    arguments=(
        Argument(name="table", dims="v h"),
        Argument(name="tokens", dims="b s", kind="below", below="v"),
    ),
    oracle=_take,
    implementations=(
        Implementation(name="xla", library="jax.numpy", call=_take),
        Implementation(name="float32", library="jax.numpy", call=_take_float32),
        Implementation(name="one_hot", library="jax.nn", call=_one_hot),
        Implementation(
            name="flax",
            library="flax",
            call=_embed_flax,
            probe=probe.library("flax.linen"),
        ),
    ),
)
