"""Feed-forward nets and transformers, their layers unrolled."""

import jax
import jax.numpy as jnp
import numpy as np

from cfp_test.programs.common import (
    cross_entropy,
    integers,
    normal,
    squares,
    training,
)


def mlp_step():
    params = {
        "a": {"w": normal(0, 16, 32), "b": jnp.zeros(32)},
        "b": {"w": normal(1, 32, 16), "b": jnp.zeros(16)},
    }

    def loss(p, batch):
        x = jax.nn.gelu(batch["x"] @ p["a"]["w"] + p["a"]["b"])
        return squares(x @ p["b"]["w"] + p["b"]["b"], batch["y"])

    return training(loss, params, {"x": normal(2, 16, 16), "y": normal(3, 16, 16)})


def odd_sizes_step():
    """Nothing here can be split over four devices but the batch of 12."""
    params = {"a": normal(0, 7, 13), "b": normal(1, 13, 5)}

    def loss(p, batch):
        return squares(jnp.tanh(batch["x"] @ p["a"]) @ p["b"], batch["y"])

    return training(loss, params, {"x": normal(2, 12, 7), "y": normal(3, 12, 5)})


def attention(p, x, memory=None, causal=True):
    """Multi-head attention with one kernel for each projection."""
    memory = x if memory is None else memory
    q = jnp.einsum("bsd,dhe->bshe", x, p["q"])
    k = jnp.einsum("btd,dhe->bthe", memory, p["k"])
    v = jnp.einsum("btd,dhe->bthe", memory, p["v"])
    scores = jnp.einsum("bshe,bthe->bhst", q, k) / np.sqrt(q.shape[-1])
    if causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(mask, scores, -1e9)
    out = jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), v)
    return jnp.einsum("bshe,hed->bsd", out, p["o"])


def attention_params(seed, d=16, h=4):
    shapes = {"q": (d, h, d // h), "k": (d, h, d // h), "v": (d, h, d // h)}
    shapes["o"] = (h, d // h, d)
    return {n: normal(seed + i, *s) for i, (n, s) in enumerate(shapes.items())}


def norm(x, gain):
    y = x - x.mean(-1, keepdims=True)
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * gain


def layer_params(seed, d=16, f=32):
    return {
        "attention": attention_params(seed, d),
        "gain_a": jnp.ones(d),
        "gain_f": jnp.ones(d),
        "up": normal(seed + 5, d, f),
        "down": normal(seed + 6, f, d),
    }


def layer(p, x):
    x = x + attention(p["attention"], norm(x, p["gain_a"]))
    return x + jax.nn.gelu(norm(x, p["gain_f"]) @ p["up"]) @ p["down"]


def attention_step():
    """One attention block alone: the smallest program with all its contractions."""

    def loss(p, batch):
        return squares(attention(p, batch["x"]), batch["y"])

    batch = {"x": normal(8, 8, 4, 16), "y": normal(9, 8, 4, 16)}
    return training(loss, attention_params(0), batch)


def transformer_step():
    params = {
        "embed": normal(90, 64, 16),
        "head": normal(91, 16, 64),
        "layers": [layer_params(10), layer_params(20)],
    }

    def loss(p, tokens):
        x = p["embed"][tokens]
        for w in p["layers"]:
            x = layer(w, x)
        return cross_entropy(x[:, :-1] @ p["head"], tokens[:, 1:])

    return training(loss, params, integers(3, 64, 8, 9))


def tied_head_step():
    params = {"embed": normal(0, 64, 16), "w": normal(1, 16, 16)}

    def loss(p, batch):
        x = jnp.take(p["embed"], batch["tokens"], axis=0)
        return cross_entropy(jnp.tanh(x @ p["w"]) @ p["embed"].T, batch["labels"])

    tokens, labels = integers(2, 64, 8, 4), integers(3, 64, 8, 4)
    return training(loss, params, {"tokens": tokens, "labels": labels})


def encoder_decoder_step():
    params = {
        "encoder": layer_params(0),
        "decoder": layer_params(10),
        "cross": attention_params(20),
        "head": normal(30, 16, 32),
    }

    def loss(p, batch):
        memory = layer(p["encoder"], batch["source"])
        x = layer(p["decoder"], batch["target"])
        x = x + attention(p["cross"], x, memory, causal=False)
        return cross_entropy(x @ p["head"], batch["labels"])

    batch = {
        "source": normal(40, 8, 8, 16),
        "target": normal(41, 8, 4, 16),
        "labels": integers(42, 32, 8, 4),
    }
    return training(loss, params, batch)


def grouped_query_step():
    """Four query heads read two key heads; rotary positions; a gated feed-forward."""
    params = {
        "q": normal(0, 16, 4, 4),
        "k": normal(1, 16, 2, 4),
        "v": normal(2, 16, 2, 4),
        "o": normal(3, 16, 16),
        "gate": normal(4, 16, 32),
        "up": normal(5, 16, 32),
        "down": normal(6, 32, 16),
    }

    def rotate(x):
        angle = jnp.arange(x.shape[1])[:, None] * jnp.array([1.0, 0.1])
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def loss(p, batch):
        x = batch["x"]
        q = rotate(jnp.einsum("bsd,dhe->bshe", x, p["q"]))
        k = rotate(jnp.einsum("bsd,dhe->bshe", x, p["k"]))
        v = jnp.einsum("bsd,dhe->bshe", x, p["v"])
        k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + out.reshape(*x.shape[:2], 16) @ p["o"]
        x = x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]
        return squares(x, batch["y"])

    batch = {"x": normal(8, 8, 4, 16), "y": normal(9, 8, 4, 16)}
    return training(loss, params, batch)
