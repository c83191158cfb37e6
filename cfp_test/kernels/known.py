"""Attentions of public models, as these write them, in small sizes.

Shapes use: batch, tokens, hidden, heads, kv_heads, head_dim; layers in scans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, TOKENS, HEADS, HEAD_DIM, LAYERS = 2, 128, 4, 64, 2
HIDDEN = 128
Array = jax.Array
# Makes the output of parameters, inputs, and what else enters.
Attend = Callable[..., Array]
Made = tuple[Attend, dict[str, Any], dict[str, Any]]


def _drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Random weights, of which products of normal inputs are normal."""
    random = np.random.default_rng([seed, *shape])
    return random.normal(size=shape).astype(np.float32) * shape[-2] ** -0.5


def _weights(heads: int = HEADS, kv_heads: int = HEADS, layers: int = 0) -> Any:
    lead = (layers,) if layers else ()
    wide, narrow = heads * HEAD_DIM, kv_heads * HEAD_DIM
    shapes = {"q": (HIDDEN, wide), "k": (HIDDEN, narrow), "v": (HIDDEN, narrow)}
    shapes["o"] = (wide, HIDDEN)
    return {
        name: _drawn(*lead, *shape, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def _inputs(tokens: int = TOKENS, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(BATCH, tokens, HIDDEN))


def _heads(x: Array, weight: Array) -> Array:
    """[batch, tokens, heads, head_dim]."""
    return (x @ weight).reshape(*x.shape[:2], -1, HEAD_DIM)


def _joined(out: Array, weight: Array) -> Array:
    return out.reshape(*out.shape[:2], -1) @ weight


def _plain(
    x: Array,
    w: Any,
    mask: Callable[[Array], Array],
    scale: float | None = HEAD_DIM**-0.5,
) -> Array:
    """Adds an attention whose scores a function masks."""
    q, k, v = (_heads(x, w[name]) for name in "qkv")
    scores = jnp.einsum("bqnd,bknd->bnqk", q if scale is None else q * scale, k)
    scores = mask(scores)
    weighed = _softmax(scores, x.dtype)
    return x + _joined(jnp.einsum("bnqk,bknd->bqnd", weighed, v), w["o"])


def _softmax(scores: Array, dtype: Any) -> Array:
    """In float32, as models in 16 bits have it."""
    return jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(dtype)


def _rotated(x: Array) -> Array:
    """Rotary embeddings: a half of each head with the other."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def gpt2() -> Made:
    """Queries, keys and values of one product; a causal buffer; layers unrolled."""
    causal = jnp.tril(jnp.ones((1, 1, TOKENS, TOKENS), bool))

    def attend(weights, x):
        for layer in weights:
            parts = jnp.split(x @ layer["qkv"] + layer["bias"], 3, axis=-1)
            q, k, v = (z.reshape(*z.shape[:2], HEADS, -1).swapaxes(1, 2) for z in parts)
            scores = (q @ k.swapaxes(-1, -2)) / HEAD_DIM**0.5
            scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
            out = (_softmax(scores, x.dtype) @ v).swapaxes(1, 2)
            x = x + _joined(out, layer["o"])
        return x

    wide = HEADS * HEAD_DIM
    layers = [
        {
            "qkv": _drawn(HIDDEN, 3 * wide, seed=i),
            "bias": 0.1 * _drawn(1, 3 * wide, seed=i)[0],
            "o": _drawn(wide, HIDDEN, seed=i),
        }
        for i in range(LAYERS)
    ]
    return attend, {"weights": layers}, {"x": _inputs()}


def _scanned(layer: Any) -> Attend:
    """Layers in a scan, each computed again in the backward pass."""

    def attend(weights, x, **given):
        body = jax.checkpoint(lambda x, one: (layer(x, *one), None))
        return lax.scan(body, x, (weights, *given.values()))[0]

    return attend


def _llama(mask: Callable[[Array, Array], Array], hidden: float) -> Made:
    def layer(x, w):
        q, k = _rotated(_heads(x, w["q"])), _rotated(_heads(x, w["k"]))
        v = _heads(x, w["v"])
        k, v = (jnp.repeat(z, HEADS // 2, axis=2) for z in (k, v))
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / HEAD_DIM**0.5
        places = jnp.arange(TOKENS)
        scores = jnp.where(mask(places[:, None], places), scores, hidden)
        out = jnp.einsum("bnqk,bknd->bqnd", _softmax(scores, x.dtype), v)
        return x + _joined(out, w["o"])

    weights = _weights(kv_heads=2, layers=LAYERS)
    return _scanned(layer), {"weights": weights}, {"x": _inputs()}


def llama() -> Made:
    """Rotary embeddings, and query heads that share a key head."""
    return _llama(lambda q, k: q >= k, -1e9)


def mistral() -> Made:
    """A window."""
    return _llama(lambda q, k: (q >= k) & (q - k < 32), -jnp.inf)


def gemma() -> Made:
    """Soft caps; every second layer of a scan has a window."""

    def layer(x, w, is_local):
        q, k = _rotated(_heads(x, w["q"])), _rotated(_heads(x, w["k"]))
        v = _heads(x, w["v"])
        q = (q * HEAD_DIM**-0.5).reshape(BATCH, TOKENS, 2, HEADS // 2, HEAD_DIM)
        scores = jnp.einsum("btkgd,bskd->btkgs", q, k)
        scores = 50.0 * jnp.tanh(scores / 50.0)
        places = jnp.arange(TOKENS)
        causal = places[:, None] >= places
        local = causal & (places[:, None] - places < 32)
        mask = jnp.where(is_local, local, causal)
        scores = jnp.where(mask[None, :, None, None], scores, -2.3819763e38)
        out = jnp.einsum("btkgs,bskd->btkgd", _softmax(scores, x.dtype), v)
        return x + _joined(out, w["o"])

    weights = _weights(kv_heads=2, layers=LAYERS)
    flags = np.arange(LAYERS) % 2 == 0
    return _scanned(layer), {"weights": weights}, {"x": _inputs(), "is_local": flags}


VALID = (np.arange(TOKENS) < np.array([[TOKENS], [TOKENS - 40]])).astype(np.int32)


def _unrolled() -> list[Any]:
    return [_weights() for _ in range(LAYERS)]


def _bert(hide: Callable[[Array, Array], Array]) -> Made:
    def attend(weights, x, valid):
        for w in weights:
            x = _plain(x, w, lambda s: hide(s, valid[:, None, None]))
        return x

    return attend, {"weights": _unrolled()}, {"x": _inputs(), "valid": VALID}


def bert() -> Made:
    """Padded keys are selected by a mask of integers."""
    return _bert(lambda s, m: jnp.where(m > 0, s, jnp.finfo(s.dtype).min))


def bert_added() -> Made:
    """Padded keys have a large negative number added, as in the first BERT."""
    return _bert(lambda s, m: s + (1.0 - m.astype(s.dtype)) * -10_000.0)


def t5() -> Made:
    """A learnt bias of bucketed distances, no scale, and padding."""
    away = np.arange(TOKENS) - np.arange(TOKENS)[:, None]
    far = 8 + (np.log(np.maximum(abs(away), 1) / 8) / np.log(16) * 8).astype(int)
    buckets = np.where(abs(away) < 8, abs(away), np.minimum(far, 15)) + 16 * (away > 0)

    def attend(weights, table, x, valid):
        bias = jnp.asarray(table)[buckets].transpose(2, 0, 1)[None]
        hidden = jnp.where(valid[:, None, None] > 0, 0.0, -1e9).astype(bias.dtype)
        for w in weights:
            x = _plain(x, w, lambda s: s + (bias + hidden), scale=None)
        return x

    learnt = {"weights": _unrolled(), "table": _drawn(32, HEADS) * 5}
    return attend, learnt, {"x": _inputs(), "valid": VALID}


def vit() -> Made:
    """No mask; an odd number of tokens."""

    return lambda w, x: _plain(x, w, lambda s: s), {"w": _weights()}, {"x": _inputs(65)}


def whisper() -> Made:
    """Cross attention: fewer queries than keys, of another sequence."""

    def attend(w, x, audio):
        q = _heads(x, w["q"]) * HEAD_DIM**-0.25
        k = _heads(audio, w["k"]) * HEAD_DIM**-0.25
        v = _heads(audio, w["v"])
        scores = q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1)
        out = _softmax(scores, x.dtype) @ v.swapaxes(1, 2)
        return x + _joined(out.swapaxes(1, 2), w["o"])

    return attend, {"w": _weights()}, {"x": _inputs(48), "audio": _inputs(seed=8)}


def alibi() -> Made:
    """Slopes times distances, by head."""
    slopes = 2.0 ** -(8 / HEADS * np.arange(1, HEADS + 1, dtype=np.float32))

    def attend(w, x):
        places = jnp.arange(TOKENS)
        away = places - places[:, None]
        bias = (slopes[:, None, None] * away).astype(x.dtype)
        least = jnp.finfo(x.dtype).min
        return _plain(x, w, lambda s: jnp.where(away <= 0, s + bias, least))

    return attend, {"w": _weights()}, {"x": _inputs()}


def packed() -> Made:
    """Several documents in a sequence; a query sees its own, causally."""
    ids = np.searchsorted([30, 75, 110], np.arange(TOKENS), side="right")
    ids = np.stack([ids, (ids + 1) // 2]).astype(np.int32)

    def attend(w, x, ids):
        mask = jnp.tril(ids[:, :, None] == ids[:, None, :])[:, None]
        return _plain(x, w, lambda s: jnp.where(mask, s, jnp.finfo(s.dtype).min))

    return attend, {"w": _weights()}, {"x": _inputs(), "ids": ids}


def mla() -> Made:
    """Keys and values of a latent; rotated dims that all heads share."""
    latent, rotary = 32, 32
    shapes = {
        "q": (HIDDEN, HEADS * (HEAD_DIM + rotary)),
        "down": (HIDDEN, latent + rotary),
        "k": (latent, HEADS * HEAD_DIM),
        "v": (latent, HEADS * HEAD_DIM),
        "o": (HEADS * HEAD_DIM, HIDDEN),
    }

    def attend(w, x):
        q = (x @ w["q"]).reshape(*x.shape[:2], HEADS, -1)
        q = jnp.concatenate([q[..., :HEAD_DIM], _rotated(q[..., HEAD_DIM:])], -1)
        down = x @ w["down"]
        shared = _rotated(down[..., None, latent:])
        k, v = (_heads(down[..., :latent], w[name]) for name in "kv")
        k = jnp.concatenate([k, jnp.repeat(shared, HEADS, axis=2)], -1)
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k) * (HEAD_DIM + rotary) ** -0.5
        causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
        weighed = _softmax(jnp.where(causal, scores, -jnp.inf), x.dtype)
        return x + _joined(jnp.einsum("bnqk,bknd->bqnd", weighed, v), w["o"])

    weights = {
        name: _drawn(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())
    }
    return attend, {"w": weights}, {"x": _inputs()}


def differential() -> Made:
    """The weights of one attention less a learnt share of another's."""

    def attend(w, share, x):
        q, k = (_heads(x, w[n]).reshape(BATCH, TOKENS, 2, HEADS // 2, -1) for n in "qk")
        v = (x @ w["v"]).reshape(BATCH, TOKENS, HEADS // 2, -1)
        scores = jnp.einsum("bqcnd,bkcnd->bcnqk", q, k) * HEAD_DIM**-0.5
        causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
        weighed = _softmax(jnp.where(causal, scores, -1e9), x.dtype)
        weighed = weighed[:, 0] - share * weighed[:, 1]
        return x + _joined(jnp.einsum("bnqk,bknd->bqnd", weighed, v), w["o"])

    return attend, {"w": _weights(), "share": np.float32(0.3)}, {"x": _inputs()}


MODELS: dict[str, Callable[[], Made]] = {
    "GPT-2": gpt2,
    "LLaMA": llama,
    "Gemma": gemma,
    "Mistral": mistral,
    "BERT": bert,
    "BERT, added": bert_added,
    "T5": t5,
    "ViT": vit,
    "Whisper": whisper,
    "ALiBi": alibi,
    "packed documents": packed,
    "MLA": mla,
    "differential": differential,
}


def training_step(model: str, dtype: Any) -> tuple[Any, tuple[Any, Any]]:
    """A step with gradients of all that is learnt, and its arguments."""
    attend, learnt, given = MODELS[model]()

    def loss(learnt: Any, given: Any) -> Array:
        out = attend(**learnt, **given).astype(jnp.float32)
        places = jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)
        return jnp.mean(jnp.square(out - jnp.cos(places)))

    def cast(x: Any) -> Array:
        x = jnp.asarray(x)
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.value_and_grad(loss), (
        jax.tree.map(cast, learnt),
        jax.tree.map(cast, given),
    )
