"""GPT, BERT, LLaMA 2, and GShard's mixture of experts (MoE).

- GPT: pre-LN decoder layers (Radford et al., 2019).
- BERT: post-LN encoder layers, trained by masked language modelling only (Devlin et
  al., 2019). The vocabulary's last token is [MASK].
- LLaMA 2: rotary positions, gated MLPs, optional `kv_heads` (Touvron et al., 2023).
- MoE: every second decoder layer routes its tokens (Lepikhin et al., "GShard", 2020).

In the MoE, a token goes to the two experts with the largest gate
probabilities, unless they are full. GShard draws the second at random; this does not.

Shapes use: groups, group (tokens in a group), experts, capacity (an expert's seats for
a group, 2 * group / experts rounded up), hidden, ffn.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cfp.models import layers as nn
from cfp.models.layers import LOGITS, NORM, RESIDUAL, Batch, Params, constrain, inside
from cfp.models.model import Config, Layer, Model, run_layers

Out = tuple[jax.Array, jax.Array]  # Logits and a penalty.

# ------------------------------------------------------------------------------- GPT

LAYER = {"attention_norm": NORM, "attention": nn.ATTENTION, "feed_forward_norm": NORM}
ENDS = {
    "embedding": nn.EMBEDDING,
    "final_norm": NORM,
    "head": {"kernel": "embed vocab"},
}


def decoder_layer(
    params: Params,
    x: jax.Array,
    *,
    attend: Callable[..., jax.Array] = nn.attention,
    second: str = "feed_forward_norm",
    feed_forward: Layer = lambda params, x: (inside("mlp", nn.mlp, params, x), None),
) -> tuple[jax.Array, jax.Array | None]:
    """Output of a pre-norm layer, penalty or None; `second`: key of the second norm."""
    h = inside("attention_norm", nn.norm, params, x)
    x = constrain(x + inside("attention", attend, params, h), RESIDUAL)
    y, penalty = feed_forward(params, inside(second, nn.norm, params, x))
    return constrain(x + y, RESIDUAL), penalty


def decode(
    config: Config, params: Params, batch: Batch, layers: Mapping[str, Layer]
) -> Out:
    """Logits of each next token [batch, seq, vocab], and the sum of penalties []."""
    x = inside("embedding", nn.embed, params, batch["tokens"], config.dtype)
    x, penalty = run_layers(config, params, x, layers)
    x = inside("final_norm", nn.norm, params, x)
    if config.tied:
        return inside("embedding", nn.unembed, params, x), penalty
    return constrain(inside("head", nn.linear, params, x), LOGITS), penalty


GPT = Model(
    doc="a GPT decoder",
    ends=ENDS,
    layers={"layer": {**LAYER, "mlp": nn.MLP}},
    apply=jax.named_scope("GPT")(partial(decode, layers={"layer": decoder_layer})),
    defaults={"tied": False},
)


# ------------------------------------------------------------------------------ BERT

MASKED_SHARE = 0.15


def encoder_layer(params: Params, x: jax.Array) -> tuple[jax.Array, None]:
    """Output of a post-LN layer (a norm follows each residual sum), and no penalty."""
    y = inside("attention", nn.attention, params, x, causal=False)
    x = constrain(x + y, RESIDUAL)
    x = inside("attention_norm", nn.layer_norm, params, x)
    x = constrain(x + inside("mlp", nn.mlp, params, x), RESIDUAL)
    return inside("mlp_norm", nn.layer_norm, params, x), None


@jax.named_scope("BERT")
def _bert(config: Config, params: Params, batch: Batch) -> Out:
    """Logits of the original tokens at all positions, and a penalty of 0."""
    x = inside("embedding", nn.embed, params, batch["tokens"], config.dtype)
    x = x + inside("type_embedding", nn.look_up, params, batch["types"]).astype(x.dtype)
    x = inside("embedding_norm", nn.layer_norm, params, x)
    x, penalty = run_layers(config, params, x, {"layer": encoder_layer})

    x = jax.nn.gelu(inside("head_dense", nn.linear, params, x))
    x = inside("head_norm", nn.layer_norm, params, constrain(x, RESIDUAL))
    logits = inside("embedding", nn.unembed, params, x)
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
        "embedding": nn.EMBEDDING,
        "type_embedding": {"embedding": "type embed"},
        "embedding_norm": NORM,
        # A square kernel: a mesh axis can shard only one dim, so the names differ.
        "head_dense": {"kernel": "embed head_embed", "bias": "head_embed"},
        "head_norm": NORM,
        "head_bias": "vocab",
    },
    layers={
        "layer": {"attention": nn.ATTENTION, "attention_norm": NORM}
        | {"mlp": nn.MLP, "mlp_norm": NORM}
    },
    apply=_bert,
    random_batch=random_cloze,
)


# ----------------------------------------------------------------------------- LLaMA

ROTARY_BASE = 10000.0
FFN_MULTIPLE = 256


def gated_ffn(hidden: int) -> int:
    """Width 8 / 3 * hidden, rounded up to a multiple of `FFN_MULTIPLE`."""
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
    attend=partial(nn.attention, kv_names=nn.KV_HEADS, turn=rotate),
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
    even_heads=True,
)


BALANCE_WEIGHT = 0.01

# Dim names of tokens in groups; of seated tokens sharded by group; of seated tokens
# sharded by expert; of activations inside experts.
_GROUPS = ("act_groups", "act_group", "act_embed")
_LEAVING = (None, "act_groups", "act_capacity", "act_embed")
_SEATED = ("act_experts", "act_expert_groups", "act_capacity", "act_embed")
_INNER = ("act_experts", "act_expert_groups", "act_capacity", "act_mlp")


class Routing(NamedTuple):
    """Routing of tokens to experts.

    Attributes:
      dispatch: [groups, group, experts, capacity], 1 at a token's seats.
      combine: weights, like dispatch. A token's sum to 1, less those of full experts.
      balance: [], 1 if first choices or mean gates are even, usually more otherwise.
    """

    dispatch: jax.Array
    combine: jax.Array
    balance: jax.Array


def route_top2(gates: jax.Array, capacity: int) -> Routing:
    """Gives each token seats at its two most probable experts, in token order.

    All first choices are seated before any second choice. A full expert adds no seat.

    Args:
      gates: [groups, group, experts], each token's probabilities.
    """
    experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts, dtype=jnp.int32)
    others = jnp.where(first == 1, -1.0, gates)
    second = jax.nn.one_hot(jnp.argmax(others, axis=-1), experts, dtype=jnp.int32)

    # one_hot gives zeros for an index out of range: for -1, and for a full expert.
    seat = partial(jax.nn.one_hot, num_classes=capacity, dtype=gates.dtype)
    first_index = jnp.cumsum(first, axis=1) - 1
    second_index = jnp.cumsum(second, axis=1) - 1 + first.sum(axis=1, keepdims=True)
    first_seat = seat(jnp.where(first == 1, first_index, -1))
    second_seat = seat(jnp.where(second == 1, second_index, -1))

    first_gate = jnp.sum(gates * first, axis=-1)[..., None, None]
    second_gate = jnp.sum(gates * second, axis=-1)[..., None, None]
    weighted = first_gate * first_seat + second_gate * second_seat

    load = jnp.mean(first.astype(gates.dtype), axis=1)
    balance = experts * jnp.mean(jnp.sum(load * jnp.mean(gates, axis=1), axis=-1))
    return Routing(
        dispatch=first_seat + second_seat,
        combine=weighted / (first_gate + second_gate),
        balance=balance,
    )


def expert_linear(params: Params, x: jax.Array) -> jax.Array:
    """A linear layer per expert, [experts, groups, capacity, in] -> [..., out]."""
    y = jnp.einsum("egci,eio->egco", x, params["kernel"].astype(x.dtype))
    return y + params["bias"].astype(x.dtype)[:, None, None, :]


def expert_layer(params: Params, x: jax.Array, config: Config) -> Out:
    """Routed MLPs, [batch, seq, hidden] -> the same shape, and a balance penalty []."""
    group, dtype = config.expert_group_size, x.dtype
    tokens = constrain(x.reshape(-1, group, x.shape[-1]), _GROUPS)
    logits = inside("gate", nn.linear, params, tokens.astype(jnp.float32))
    assert config.experts and group, "options of this model"
    routing = route_top2(jax.nn.softmax(logits), -(-2 * group // config.experts))

    with jax.named_scope("dispatch"):
        seated = jnp.einsum("gsec,gsh->egch", routing.dispatch.astype(dtype), tokens)
    seated = constrain(constrain(seated, _LEAVING), _SEATED)
    h = jax.nn.gelu(inside("expert_up", expert_linear, params, seated))
    y = inside("expert_down", expert_linear, params, constrain(h, _INNER))
    y = constrain(constrain(y, _SEATED), _LEAVING)
    with jax.named_scope("combine"):
        y = jnp.einsum("gsec,egch->gsh", routing.combine.astype(dtype), y)
    y = constrain(y, _GROUPS).reshape(x.shape)
    return y, BALANCE_WEIGHT * routing.balance


@jax.named_scope("MoE")
def _moe(config: Config, params: Params, batch: Batch) -> Out:
    routed = partial(inside, "moe", partial(expert_layer, config=config))
    expert = partial(decoder_layer, feed_forward=routed)
    return decode(config, params, batch, {"dense": decoder_layer, "expert": expert})


MOE = Model(
    doc="a GShard mixture of experts",
    defaults={"vocab": 32000, "hidden": 1280, "heads": 4}
    | {"experts": 32, "expert_group_size": 2048},
    ends=ENDS,
    layers={
        "dense": {**LAYER, "mlp": nn.MLP},
        "expert": {
            **LAYER,
            "moe": {
                # A name of its own keeps rules for "experts" off this small kernel.
                "gate": {"kernel": "embed gate_experts"},
                "expert_up": {"kernel": "experts embed mlp", "bias": "experts mlp"},
                "expert_down": {"kernel": "experts mlp embed", "bias": "experts embed"},
            },
        },
    },
    apply=_moe,
)
