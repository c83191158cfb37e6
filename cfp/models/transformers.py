"""GPT, BERT and LLaMA 2.

- GPT: pre-LN decoder layers (Radford et al., 2019).
- BERT: post-LN encoder layers, trained by masked language modelling only (Devlin et
  al., 2019). The vocabulary's last token is [MASK].
- LLaMA 2: rotary positions, grouped-query attention, gated MLPs (Touvron et al., 2023).
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

from cfp.models.layers import (
    ATTENTION,
    EMBEDDING,
    KV_HEADS,
    LOGITS,
    MLP,
    NORM,
    RESIDUAL,
    Params,
    attention,
    constrain,
    embed,
    inside,
    layer_norm,
    linear,
    look_up,
    mlp,
    norm,
    unembed,
)
from cfp.models.model import Config, Layer, Model, run_layers
from cfp.models.train import Batch

Out = tuple[jax.Array, jax.Array]  # Logits and a penalty.

# ------------------------------------------------------------------------------- GPT

LAYER = {"attention_norm": NORM, "attention": ATTENTION, "feed_forward_norm": NORM}
HEAD = {"kernel": "embed vocab"}
ENDS = {"embedding": EMBEDDING, "final_norm": NORM, "head": HEAD}


def decoder_layer(
    params: Params,
    x: jax.Array,
    *,
    attend: Callable[..., jax.Array] = attention,
    second: str = "feed_forward_norm",
    feed_forward: Layer = lambda params, x: (inside("mlp", mlp, params, x), None),
) -> tuple[jax.Array, jax.Array | None]:
    """A pre-norm decoder layer; `second` names the norm before the feed-forward."""
    h = inside("attention_norm", norm, params, x)
    x = constrain(x + inside("attention", attend, params, h), RESIDUAL)
    y, penalty = feed_forward(params, inside(second, norm, params, x))
    return constrain(x + y, RESIDUAL), penalty


def decode(
    config: Config, params: Params, batch: Batch, layers: Mapping[str, Layer]
) -> Out:
    """Logits of each next token [batch, seq, vocab], and the sum of penalties []."""
    x = inside("embedding", embed, params, batch["tokens"], config.dtype)
    x, penalty = run_layers(config, params, x, layers)
    x = inside("final_norm", norm, params, x)
    if config.tied:
        return inside("embedding", unembed, params, x), penalty
    return constrain(inside("head", linear, params, x), LOGITS), penalty


GPT = Model(
    doc="a GPT decoder",
    ends=ENDS,
    layers={"layer": {**LAYER, "mlp": MLP}},
    apply=jax.named_scope("GPT")(partial(decode, layers={"layer": decoder_layer})),
    defaults={"tied": False},
)


# ------------------------------------------------------------------------------ BERT

MASKED_SHARE = 0.15


def encoder_layer(params: Params, x: jax.Array) -> tuple[jax.Array, None]:
    """A post-LN encoder layer: a norm follows each residual sum."""
    y = inside("attention", attention, params, x, causal=False)
    x = constrain(x + y, RESIDUAL)
    x = inside("attention_norm", layer_norm, params, x)
    x = constrain(x + inside("mlp", mlp, params, x), RESIDUAL)
    return inside("mlp_norm", layer_norm, params, x), None


@jax.named_scope("BERT")
def _bert(config: Config, params: Params, batch: Batch) -> Out:
    """Logits of the original tokens at all positions."""
    x = inside("embedding", embed, params, batch["tokens"], config.dtype)
    x = x + inside("type_embedding", look_up, params, batch["types"]).astype(x.dtype)
    x = inside("embedding_norm", layer_norm, params, x)
    x, penalty = run_layers(config, params, x, {"layer": encoder_layer})

    x = jax.nn.gelu(inside("head_dense", linear, params, x))
    x = inside("head_norm", layer_norm, params, constrain(x, RESIDUAL))
    logits = inside("embedding", unembed, params, x)
    return constrain(logits + params["head_bias"].astype(x.dtype), LOGITS), penalty


def random_cloze(key: jax.Array, batch: int, seq: int, vocab: int) -> Batch:
    """Random text with masked tokens.

    Returns:
      Arrays [batch, seq]: "labels", the text; "mask", float32, 1 at masked positions;
      "tokens", the text with [MASK]; "types", 0 in the first half, 1 in the second.
    """
    text_key, mask_key = jax.random.split(key)
    mask_token = vocab - 1
    text = jax.random.randint(text_key, (batch, seq), 0, mask_token, dtype=jnp.int32)
    hidden = jax.random.bernoulli(mask_key, MASKED_SHARE, (batch, seq))
    halves = jnp.arange(seq, dtype=jnp.int32) * 2 // seq
    return {
        "labels": text,
        "mask": hidden.astype(jnp.float32),
        "tokens": jnp.where(hidden, mask_token, text),
        "types": jnp.broadcast_to(halves, (batch, seq)),
    }


BERT = Model(
    doc="a BERT encoder",  # By default, BERT-large.
    defaults={"vocab": 30522, "seq": 512, "layers": 24},
    ends={
        "embedding": EMBEDDING,
        "type_embedding": {"embedding": "type embed"},
        "embedding_norm": NORM,
        # A square kernel: a mesh axis can shard only one dim, so the names differ.
        "head_dense": {"kernel": "embed head_embed", "bias": "head_embed"},
        "head_norm": NORM,
        "head_bias": "vocab",
    },
    layers={
        "layer": {"attention": ATTENTION, "attention_norm": NORM}
        | {"mlp": MLP, "mlp_norm": NORM}
    },
    apply=_bert,
    random_batch=random_cloze,
)


# ----------------------------------------------------------------------------- LLaMA

ROTARY_BASE = 10000.0
FFN_MULTIPLE = 256


def gated_ffn(hidden: int) -> int:
    """Width 8 / 3 * hidden: a gated MLP has three kernels, for two at 4 * hidden."""
    return -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding: rotates pairs of features by angles proportional to position.

    Feature i of head_dim is paired with feature i + head_dim / 2.
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


_LLAMA_LAYER = partial(
    decoder_layer,
    attend=partial(attention, kv_names=KV_HEADS, turn=rotate),
    second="mlp_norm",
)
LLAMA = Model(
    doc="a LLaMA 2 decoder",  # By default, of 7 billion parameters.
    defaults={"vocab": 32000, "hidden": 4096, "layers": 32, "heads": 32}
    | {"kv_heads": None},
    ends={"embedding": "vocab embed", "final_norm": "norm", "head": "embed vocab"},
    layers={
        "layer": {
            "attention_norm": "norm",
            "attention": {
                "query": "embed heads head_dim",
                "key": "embed kv_heads head_dim",
                "value": "embed kv_heads head_dim",
                "out": "heads head_dim embed",
            },
            "mlp_norm": "norm",
            "mlp": {"gate": "embed mlp", "up": "embed mlp", "down": "mlp embed"},
        }
    },
    apply=jax.named_scope("Llama")(partial(decode, layers={"layer": _LLAMA_LAYER})),
    ffn=gated_ffn,
    refusal=lambda c: (
        "hidden / heads must be even, as rotary embedding turns pairs, got "
        f"hidden={c.hidden} and heads={c.heads}"
        if c.head_dim % 2
        else ""
    ),
)
