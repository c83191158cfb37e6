"""A decoder whose attention is given to it, from the parts of the zoo's LLaMA.

Shapes use: batch, seq, hidden, heads, kv_heads, head_dim, vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cfp.models.layers import cross_entropy, mlp, rms_norm
from cfp.models.model import Config
from cfp.models.transformers import LLAMA, ROTARY_BASE

# (layer, q, k, v) -> output, and what else there is to be seen of it, by name.
Attend = Callable[..., tuple[jax.Array, Mapping[str, jax.Array]]]
Seen = dict[str, jax.Array]

init_params = LLAMA.init


def plain_attend(attend: Callable[..., jax.Array]) -> Attend:
    """An attention of which nothing else is seen."""
    return lambda layer, q, k, v: (attend(q, k, v), {})


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of [batch, seq, heads, head_dim], at positions [seq]."""
    half = x.shape[-1] // 2
    rates = ROTARY_BASE ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def taps(config: Config, batch: int) -> Seen:
    """Zeros to be added to q, k, v of each layer: so their gradients are found."""
    kv_heads = config.kv_heads or config.heads
    return {
        f"layer_{i}.d{name}": jnp.zeros(
            (batch, config.seq, heads, config.head_dim), config.dtype
        )
        for i in range(config.layers)
        for name, heads in (("q", config.heads), ("k", kv_heads), ("v", kv_heads))
    }


def apply(
    config: Config,
    params: Any,
    tokens: jax.Array,
    attend: Attend,
    positions: jax.Array | None = None,
    tapped: Seen | None = None,
) -> tuple[jax.Array, Seen]:
    """[batch, seq] -> logits [batch, seq, vocab], and what was seen in each layer."""
    if positions is None:
        positions = jnp.arange(tokens.shape[1])
    x = jnp.asarray(params["embedding"])[tokens].astype(config.dtype)
    seen: Seen = {}
    for i in range(config.layers):
        layer = params[f"layer_{i}"]
        h = rms_norm(layer["attention_norm"], x)
        q, k, v = (
            jnp.tensordot(h, layer["attention"][name].astype(config.dtype), axes=1)
            for name in ("query", "key", "value")
        )
        q, k = rotate(q, positions), rotate(k, positions)
        if tapped is not None:
            q, k, v = (
                x + tapped[f"layer_{i}.d{name}"]
                for x, name in ((q, "q"), (k, "k"), (v, "v"))
            )
        mixed, more = attend(i, q, k, v)
        seen |= {f"layer_{i}.{name}": value for name, value in more.items()}
        out = layer["attention"]["out"].astype(config.dtype)
        x = x + jnp.tensordot(mixed, out, axes=2)
        h = rms_norm(layer["mlp_norm"], x)
        x = x + mlp(layer["mlp"], h)
    x = rms_norm(params["final_norm"], x)
    return x @ params["head"].astype(config.dtype), seen


def loss(
    config: Config,
    params: Any,
    batch: Mapping[str, jax.Array],
    attend: Attend,
    positions: jax.Array | None = None,
    tapped: Seen | None = None,
) -> tuple[jax.Array, Seen]:
    """Cross-entropy of the tokens that follow, and what was seen."""
    logits, seen = apply(config, params, batch["tokens"], attend, positions, tapped)
    return cross_entropy(logits, batch["labels"]), seen
