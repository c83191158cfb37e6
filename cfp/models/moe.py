"""GShard's mixture of experts: every second decoder layer routes its tokens.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and
Automatic Sharding", 2020. Each token goes to the two experts that its gate likes best,
unless they are full; the second expert is chosen without a draw.

Shapes use: groups (of tokens), group (tokens in one), experts, capacity (tokens that
one expert takes from one group), hidden, ffn.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from cfp.models.layers import (
    KERNEL_INIT,
    LOGITS,
    MLP,
    ZEROS_INIT,
    DecoderLayer,
    Embedding,
    constrain,
    dense,
    flax_network,
    layer_norm,
    named,
    remat_layer,
    scan_layers,
)
from cfp.models.options import SCAN_DOC, TransformerConfig, dtype_option, option
from cfp.models.train import Network, random_text

BALANCE_WEIGHT = 0.01

# Names of the dims of tokens in groups; of tokens with seats, still where their groups
# are; of the same where their experts are; and of what is inside an expert.
_GROUPS = ("act_groups", "act_group", "act_embed")
_LEAVING = (None, "act_groups", "act_capacity", "act_embed")
_SEATED = ("act_experts", "act_expert_groups", "act_capacity", "act_embed")
_INNER = ("act_experts", "act_expert_groups", "act_capacity", "act_mlp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(TransformerConfig):
    """The shape of a mixture of experts."""

    vocab: int = option(32000, "tokens in the vocabulary")
    hidden: int = option(1280, "width of the residual stream")
    layers: int = option(4, "decoder layers; those of odd index have experts")
    heads: int = option(4, "attention heads; they divide hidden")
    ffn: int | None = option(
        None, "width inside the MLP and each expert; 4 * hidden if not given"
    )
    experts: int = option(32, "experts in an expert layer, two or more")
    expert_group_size: int = option(
        2048, "tokens that are routed together; it divides batch * seq"
    )
    dtype: str = dtype_option("parameters and gates")
    scan: bool = option(False, f"{SCAN_DOC}; two layers a round")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts < 2:
            raise ValueError(
                f"experts must be at least 2, as each token goes to two, got "
                f"{self.experts}"
            )
        if self.scan and self.layers % 2:
            raise ValueError(
                f"layers must be even with scan, which runs a dense and an expert "
                f"layer in each round, got {self.layers}"
            )


class Routing(NamedTuple):
    """Dispatch tensors: the places of tokens, and weights of results.

    Attributes:
      dispatch: [groups, group, experts, capacity] of 0 and 1: the seat of each token.
      combine: the same with each seat's weight. A token's weights add up to 1, less
        those of the experts that had no seat for it.
      balance: [], 1 when the load is even and the gates are, and more otherwise.
    """

    dispatch: jax.Array
    combine: jax.Array
    balance: jax.Array


def expert_capacity(group: int, experts: int) -> int:
    """Seats that an expert has for one group: as many as an even load takes."""
    return -(-2 * group // experts)


def route_top2(gates: jax.Array, capacity: int) -> Routing:
    """Seats each token at its two best experts, in the order of the tokens.

    All first choices are seated before any second choice. What finds no seat is
    dropped: that expert adds nothing to the token.

    Args:
      gates: [groups, group, experts], each token's probabilities.
    """
    experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts, dtype=jnp.int32)
    others = jnp.where(first == 1, -1.0, gates)
    second = jax.nn.one_hot(jnp.argmax(others, axis=-1), experts, dtype=jnp.int32)

    # one_hot gives zeros for an index out of range: for -1, and for a full expert.
    seat = functools.partial(jax.nn.one_hot, num_classes=capacity, dtype=gates.dtype)
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


class ExpertDense(nn.Module):
    """A dense layer per expert, in one contraction batched over the experts.

    Attributes:
      names: of the last two dims of the kernel.
    """

    features: int
    names: tuple[str, str]
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[experts, groups, capacity, in] -> [experts, groups, capacity, features]."""
        experts, size = x.shape[0], x.shape[-1]
        kernel_init = named(KERNEL_INIT, ("experts", *self.names))
        bias_init = named(ZEROS_INIT, ("experts", self.names[1]))
        kernel = self.param("kernel", kernel_init, (experts, size, self.features))
        bias = self.param("bias", bias_init, (experts, self.features))
        y = jnp.einsum("egci,eio->egco", x, kernel.astype(self.dtype))
        return y + bias.astype(self.dtype)[:, None, None, :]


class ExpertLayer(nn.Module):
    """A routed MLP. Sows its weighted balancing loss into the collection "losses"."""

    experts: int
    group: int
    ffn: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        batch, seq, hidden = x.shape
        if batch * seq % self.group:
            raise ValueError(
                f"batch * seq must be divisible by expert_group_size, got batch={batch}"
                f", seq={seq} and expert_group_size={self.group}"
            )
        tokens = constrain(x.reshape(-1, self.group, hidden), _GROUPS)

        # Its experts have a name of their own: a gate is too small to be sharded.
        names = ("embed", "gate_experts")
        gate = dense(self.experts, names, jnp.float32, use_bias=False, name="gate")
        routing = route_top2(
            jax.nn.softmax(gate(tokens), axis=-1),
            expert_capacity(self.group, self.experts),
        )
        self.sow("losses", "balance", BALANCE_WEIGHT * routing.balance)

        with jax.named_scope("dispatch"):
            seated = jnp.einsum(
                "gsec,gsh->egch", routing.dispatch.astype(self.dtype), tokens
            )
        expert = functools.partial(ExpertDense, dtype=self.dtype)
        up = expert(self.ffn, ("embed", "mlp"), name="expert_up")
        down = expert(hidden, ("mlp", "embed"), name="expert_down")
        seated = constrain(constrain(seated, _LEAVING), _SEATED)
        h = constrain(nn.gelu(up(seated)), _INNER)
        y = constrain(constrain(down(h), _SEATED), _LEAVING)
        with jax.named_scope("combine"):
            y = jnp.einsum("gsec,egch->gsh", routing.combine.astype(self.dtype), y)
        return constrain(y, _GROUPS).reshape(batch, seq, hidden)


class DecoderPair(nn.Module):
    """A dense decoder layer and an expert one: a round of the loop over layers.

    Attributes:
      dense: makes the first, given its name.
      expert: makes the second, given its name.
    """

    dense: Callable[..., nn.Module]
    expert: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        return self.expert(name="expert")(self.dense(name="dense")(x))


class MoE(nn.Module):
    """Maps tokens to the logits of the token that follows each."""

    config: MoEConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, seq] int32 -> [batch, seq, vocab]."""
        c = self.config
        ffn = c.ffn or 4 * c.hidden
        mlp = functools.partial(MLP, ffn, c.dtype, name="mlp")
        moe = functools.partial(
            ExpertLayer, c.experts, c.expert_group_size, ffn, c.dtype, name="moe"
        )
        layer = remat_layer(DecoderLayer, remat=c.remat, scan=c.scan)
        dense_layer = functools.partial(layer, c.heads, mlp, c.dtype)
        expert_layer = functools.partial(layer, c.heads, moe, c.dtype)

        x = Embedding(c.vocab, c.seq, c.hidden, c.dtype, name="embedding")(tokens)
        if c.scan:
            loop = scan_layers(DecoderPair, c.layers // 2)
            x, _ = loop(dense_layer, expert_layer, name="pairs")(x, None)
        else:
            for i in range(c.layers):
                x = (expert_layer if i % 2 else dense_layer)(name=f"layer_{i}")(x)
        x = layer_norm(c.dtype, name="final_norm")(x)
        head = dense(c.vocab, ("embed", "vocab"), c.dtype, use_bias=False, name="head")
        return constrain(head(x), LOGITS)


def moe(config: MoEConfig) -> Network:
    """A mixture of experts that learns to foretell the next token."""
    return flax_network(
        MoE(config), lambda key, n: random_text(key, n, config.seq, config.vocab)
    )
