"""LLaMA 2: rotary positions, grouped-query attention and gated MLPs, in plain JAX.

Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023. Layers are
functions of nested dicts of parameters, all float32, and need nothing but jax.numpy.
Activations are constrained by the logical names of their dims (`cfp.models.layers`),
which is without effect unless someone shards the model by hand.

Shapes use: batch, seq, hidden, heads, kv_heads, group (query heads that share a key
and value head), head_dim, ffn, vocab.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from cfp.models.layers import (
    HEADS,
    INNER,
    LOGITS,
    RESIDUAL,
    attention_kernel,
    constrain,
)
from cfp.models.options import TransformerConfig, option
from cfp.models.train import Batch, Network, random_text

Params = dict[str, Any]

# Names of the dims of keys and values: there may be fewer heads of them than devices.
KV_HEADS = ("act_batch", "act_seq", "act_kv_heads", "act_head_dim")

INIT_STDDEV = 0.02
NORM_EPSILON = 1e-5
ROTARY_BASE = 10000.0
FFN_MULTIPLE = 256

# LLaMA-2-7B as keywords of `LlamaConfig`, and of `registry.build`.
LLAMA_7B: Mapping[str, int] = MappingProxyType(
    {
        "vocab": 32000,
        "hidden": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 32,
        "ffn": 11008,
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(TransformerConfig):
    """The shape of a LLaMA, by default of LLaMA-2-7B."""

    vocab: int = option(LLAMA_7B["vocab"], "tokens in the vocabulary")
    hidden: int = option(LLAMA_7B["hidden"], "width of the residual stream")
    layers: int = option(LLAMA_7B["layers"], "decoder layers")
    heads: int = option(
        LLAMA_7B["heads"], "attention heads; they divide hidden into even parts"
    )
    kv_heads: int | None = option(
        None, "heads of keys and values; they divide heads, and are as many by default"
    )
    ffn: int | None = option(
        None, "width inside the MLP; 8/3 * hidden, up to a multiple of 256, by default"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(
                f"hidden / heads must be even, as rotary embedding turns pairs, got "
                f"hidden={self.hidden} and heads={self.heads}"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be divisible by kv_heads, got heads={self.heads} and "
                f"kv_heads={self.kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def default_ffn(hidden: int) -> int:
    """With three kernels instead of two, about as many parameters as 4 * hidden."""
    return -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


# ----------------------------------------------------------------------- parameters


def init_params(config: LlamaConfig, key: jax.Array) -> Params:
    """Draws all parameters, the same ones with and without scan."""
    c = config
    embedding_key, head_key, layers_key = jax.random.split(key, 3)
    layer_keys = jax.random.split(layers_key, c.layers)
    init_layer = functools.partial(_init_layer, c)
    layers = (
        {"layers": jax.vmap(init_layer)(layer_keys)}
        if c.scan
        else {f"layer_{i}": init_layer(k) for i, k in enumerate(layer_keys)}
    )
    return {
        "embedding": _kernel(embedding_key, c.vocab, c.hidden),
        **layers,
        "final_norm": jnp.ones(c.hidden),
        "head": _kernel(head_key, c.hidden, c.vocab),
    }


def _init_layer(c: LlamaConfig, key: jax.Array) -> Params:
    kv_heads = c.kv_heads or c.heads
    ffn = c.ffn or default_ffn(c.hidden)
    q, k, v, out, gate, up, down = jax.random.split(key, 7)
    return {
        "attention_norm": jnp.ones(c.hidden),
        "attention": {
            "query": _kernel(q, c.hidden, c.heads, c.head_dim),
            "key": _kernel(k, c.hidden, kv_heads, c.head_dim),
            "value": _kernel(v, c.hidden, kv_heads, c.head_dim),
            "out": _kernel(out, c.heads, c.head_dim, c.hidden),
        },
        "mlp_norm": jnp.ones(c.hidden),
        "mlp": {
            "gate": _kernel(gate, c.hidden, ffn),
            "up": _kernel(up, c.hidden, ffn),
            "down": _kernel(down, ffn, c.hidden),
        },
    }


def _kernel(key: jax.Array, *shape: int) -> jax.Array:
    return INIT_STDDEV * jax.random.normal(key, shape)


def param_names(config: LlamaConfig) -> Params:
    """The logical names of the parameters' dims: a tree like the parameters."""
    spec = PartitionSpec
    heads = spec("embed", "heads", "head_dim")
    kv_heads = spec("embed", "kv_heads", "head_dim")
    layer = {
        "attention_norm": spec("norm"),
        "attention": {
            "query": heads,
            "key": kv_heads,
            "value": kv_heads,
            "out": spec("heads", "head_dim", "embed"),
        },
        "mlp_norm": spec("norm"),
        "mlp": {
            "gate": spec("embed", "mlp"),
            "up": spec("embed", "mlp"),
            "down": spec("mlp", "embed"),
        },
    }
    layers = (
        {"layers": jax.tree.map(lambda names: spec("layers", *names), layer)}
        if config.scan
        else {f"layer_{i}": layer for i in range(config.layers)}
    )
    return {
        "embedding": spec("vocab", "embed"),
        **layers,
        "final_norm": spec("norm"),
        "head": spec("embed", "vocab"),
    }


# --------------------------------------------------------------------------- layers


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """[hidden], [..., hidden] -> [..., hidden], normalised in float32."""
    y = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    return (scale * y * jax.lax.rsqrt(mean_square + NORM_EPSILON)).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Turns each pair of numbers by an angle in proportion to its position.

    A number of the first half of head_dim is paired with its like in the second half.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Args:
      x: [batch, seq, heads, head_dim].
    """
    seq, half = x.shape[1], x.shape[-1] // 2
    rates = ROTARY_BASE ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(params: Params, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Causal self-attention, [batch, seq, hidden] -> [batch, seq, hidden].

    Args:
      params: query [hidden, heads, head_dim]; key and value [hidden, kv_heads,
        head_dim], each for heads / kv_heads query heads in a row; out [heads,
        head_dim, hidden].
    """
    batch, seq = x.shape[:2]
    heads, head_dim = params["query"].shape[1:]
    kv_heads = params["key"].shape[1]
    with jax.named_scope("query"):
        query = jnp.tensordot(x, params["query"].astype(dtype), axes=1)
    with jax.named_scope("key"):
        key = jnp.tensordot(x, params["key"].astype(dtype), axes=1)
    with jax.named_scope("value"):
        value = jnp.tensordot(x, params["value"].astype(dtype), axes=1)
    query = constrain(query, HEADS)
    key, value = (constrain(one, KV_HEADS) for one in (key, value))

    if kernel := attention_kernel():
        mixed = kernel(rotate(query), rotate(key), value, True)
    else:
        grouped = (batch, seq, kv_heads, heads // kv_heads, head_dim)
        query = (rotate(query) * head_dim**-0.5).reshape(grouped)
        with jax.named_scope("scores"):
            scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, rotate(key))
        past = jnp.tril(jnp.ones((seq, seq), dtype=bool))
        scores = jnp.where(past, scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
        with jax.named_scope("mix"):
            mixed = jnp.einsum("bhgqk,bkhd->bqhgd", weights, value)
    mixed = constrain(mixed.reshape(batch, seq, heads, head_dim), HEADS)
    with jax.named_scope("out"):
        return jnp.tensordot(mixed, params["out"].astype(dtype), axes=2)


def mlp(params: Params, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """SwiGLU, [..., hidden] -> [..., hidden].

    Shazeer, "GLU Variants Improve Transformer", 2020.

    Args:
      params: gate and up [hidden, ffn]; down [ffn, hidden].
    """
    with jax.named_scope("gate"):
        gate = x @ params["gate"].astype(dtype)
    with jax.named_scope("up"):
        up = x @ params["up"].astype(dtype)
    with jax.named_scope("down"):
        h = constrain(jax.nn.silu(gate) * up, INNER)
        return h @ params["down"].astype(dtype)


def decoder_layer(params: Params, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A pre-norm decoder layer, [batch, seq, hidden] -> [batch, seq, hidden]."""
    with jax.named_scope("attention"):
        h = rms_norm(params["attention_norm"], x)
        x = constrain(x + attention(params["attention"], h, dtype), RESIDUAL)
    with jax.named_scope("mlp"):
        y = mlp(params["mlp"], rms_norm(params["mlp_norm"], x), dtype)
        return constrain(x + y, RESIDUAL)


# ---------------------------------------------------------------------------- model


@jax.named_scope("Llama")
def apply_llama(config: LlamaConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """[batch, seq] int32 -> logits of the tokens that follow, [batch, seq, vocab]."""
    c = config
    layer = functools.partial(decoder_layer, dtype=c.dtype)
    if c.remat:
        # A loop's backward pass is another loop: the compiler cannot find that what is
        # computed there was computed before. Elsewhere a barrier has to prevent it.
        layer = jax.checkpoint(layer, prevent_cse=not c.scan)

    with jax.named_scope("embedding"):
        # Rows are cast after the lookup: a token's gradients add up in float32.
        x = jnp.asarray(params["embedding"])[tokens].astype(c.dtype)
        x = constrain(x, RESIDUAL)
    if c.scan:
        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])
    else:
        for i in range(c.layers):
            with jax.named_scope(f"layer_{i}"):
                x = layer(params[f"layer_{i}"], x)
    with jax.named_scope("head"):
        logits = rms_norm(params["final_norm"], x) @ params["head"].astype(c.dtype)
        return constrain(logits, LOGITS)


def llama(config: LlamaConfig) -> Network:
    """A LLaMA that learns to foretell the next token."""

    def init(key: jax.Array, batch: Batch) -> Params:
        del batch  # The configuration says all about shapes.
        return init_params(config, key)

    def apply(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return apply_llama(config, params, batch["tokens"]), jnp.float32(0.0)

    return Network(
        init=init,
        apply=apply,
        random_batch=lambda key, n: random_text(key, n, config.seq, config.vocab),
        param_names=lambda batch: param_names(config),
    )
