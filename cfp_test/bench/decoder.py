"""Transformers in plain JAX whose attention is written out, or a call of cuDNN's.

Parameters and Adam's moments are float32, the computation is bfloat16. The step is as
users write it by hand: no library of layers, no scan, no rematerialization.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes of a transformer.

    Attributes:
        layers, batch, tokens, width, heads, vocabulary, feed_forward: the sizes.
        gated: whether the feed-forward layer has a gate, as LLaMA's.
        causal: whether a token attends to earlier ones alone.
        attention: "written", or an ``implementation`` of
            ``jax.nn.dot_product_attention``, such as "cudnn".
    """

    layers: int = 4
    batch: int = 12
    tokens: int = 1024
    width: int = 4096
    heads: int = 32
    vocabulary: int = 51200
    feed_forward: int = 16384
    gated: bool = False
    causal: bool = True
    attention: str = "written"


MODELS = {
    "gpt": Decoder(),
    "llama1k": Decoder(batch=16, vocabulary=32000, feed_forward=11008, gated=True),
    "llama4k": Decoder(
        batch=4, tokens=4096, vocabulary=32000, feed_forward=11008, gated=True
    ),
    "bert": Decoder(vocabulary=30720, causal=False),
    "tiny": Decoder(
        layers=2,
        batch=8,
        tokens=32,
        width=64,
        heads=4,
        vocabulary=128,
        feed_forward=256,
    ),
}


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = (wide * wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)


def _attend(sizes: Decoder, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if sizes.attention != "written":
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=sizes.causal, implementation=sizes.attention
        )
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k).astype(jnp.float32)
    scores = scores / (sizes.width // sizes.heads) ** 0.5
    if sizes.causal:
        seen = jnp.tril(jnp.ones((sizes.tokens, sizes.tokens), bool))
        scores = jnp.where(seen, scores, -1e30)
    weights = jax.nn.softmax(scores, -1).astype(v.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", weights, v)


Constrain = Callable[[jax.Array], jax.Array]


def _layer(
    sizes: Decoder, constrain: Constrain, x: jax.Array, layer: dict[str, jax.Array]
) -> jax.Array:
    layer = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer)
    heads = (sizes.batch, sizes.tokens, sizes.heads, sizes.width // sizes.heads)
    h = _normalize(x, layer["norm_attention"])
    q, k, v = ((h @ layer[name]).reshape(heads) for name in ("q", "k", "v"))
    out = _attend(sizes, q, k, v).reshape(x.shape)
    x = constrain(x + out @ layer["o"])
    h = _normalize(x, layer["norm_feed_forward"])
    up = h @ layer["up"]
    inner = jax.nn.silu(h @ layer["gate"]) * up if sizes.gated else jax.nn.gelu(up)
    return constrain(x + inner @ layer["down"])


def make_step(sizes: Decoder) -> tuple[Callable[..., Any], tuple[Any, jax.Array]]:
    """Makes a step ``(state, tokens, constrain) -> (state, loss)`` and its arguments.

    ``constrain`` is applied to the activations between layers, shape [batch, tokens,
    width]; without it they are left alone. The arguments are shapes.
    """
    n, ff = sizes.width, sizes.feed_forward

    def weight(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {name: weight(n, n) for name in "qkvo"}
    layer |= {"up": weight(n, ff), "down": weight(ff, n)}
    layer |= {"norm_attention": weight(n), "norm_feed_forward": weight(n)}
    if sizes.gated:
        layer["gate"] = weight(n, ff)
    params = {
        "embedding": weight(sizes.vocabulary, n),
        "head": weight(n, sizes.vocabulary),
        "norm": weight(n),
        "layers": [dict(layer) for _ in range(sizes.layers)],
    }
    optimizer = optax.adamw(1e-4)

    def loss_of(params: Any, tokens: jax.Array, constrain: Constrain) -> jax.Array:
        x = constrain(params["embedding"].astype(jnp.bfloat16)[tokens])
        for weights in params["layers"]:
            x = partial(_layer, sizes, constrain)(x, weights)
        head = params["head"].astype(jnp.bfloat16)
        logits = (_normalize(x, params["norm"]) @ head).astype(jnp.float32)
        targets = jnp.roll(tokens, -1, 1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    def train_step(
        state: Any, tokens: jax.Array, constrain: Constrain = lambda x: x
    ) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, constrain)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    state = params, jax.eval_shape(optimizer.init, params)
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.tokens), jnp.int32)
    return train_step, (state, tokens)
