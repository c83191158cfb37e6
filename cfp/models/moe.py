"""GShard's mixture of experts: every second decoder layer routes its tokens.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and
Automatic Sharding", 2020. Each token goes to the two experts that its gate likes best,
unless they are full; the second expert is chosen without a draw.

Shapes use: groups (of tokens), group (tokens in one), experts, capacity (seats that an
expert has for one group: as many as an even load takes), hidden, ffn.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cfp.models.layers import MLP, Params, constrain, inside, linear
from cfp.models.model import Config, Model
from cfp.models.train import Batch
from cfp.models.transformers import ENDS, LAYER, Out, decode, decoder_layer

BALANCE_WEIGHT = 0.01

# Names of the dims of tokens in groups; of tokens with seats, still where their groups
# are; of the same where their experts are; and of what is inside an expert.
_GROUPS = ("act_groups", "act_group", "act_embed")
_LEAVING = (None, "act_groups", "act_capacity", "act_embed")
_SEATED = ("act_experts", "act_expert_groups", "act_capacity", "act_embed")
_INNER = ("act_experts", "act_expert_groups", "act_capacity", "act_mlp")


class Routing(NamedTuple):
    """Seats of tokens and their weights, [groups, group, experts, capacity].

    A token's weights add up to 1, less those of the experts without a seat for it. The
    balance, [], is 1 if load and gates are even, and more otherwise.
    """

    dispatch: jax.Array
    combine: jax.Array
    balance: jax.Array


def route_top2(gates: jax.Array, capacity: int) -> Routing:
    """Seats each token at its two best experts, in the order of the tokens.

    All first choices are seated before any second choice. A choice without a seat adds
    nothing to the token.

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
    """A linear layer per expert, in one contraction batched over the experts.

    Args:
      x: [experts, groups, capacity, in], to [..., features].
    """
    y = jnp.einsum("egci,eio->egco", x, params["kernel"].astype(x.dtype))
    return y + params["bias"].astype(x.dtype)[:, None, None, :]


def expert_layer(params: Params, x: jax.Array, config: Config) -> Out:
    """A routed MLP, [batch, seq, hidden] -> the same, and a penalty for uneven load."""
    group, dtype = config.expert_group_size, x.dtype
    tokens = constrain(x.reshape(-1, group, x.shape[-1]), _GROUPS)
    logits = inside("gate", linear, params, tokens.astype(jnp.float32))
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
        "dense": {**LAYER, "mlp": MLP},
        "expert": {
            **LAYER,
            "moe": {
                # Its experts have a name of their own: it is too small to be sharded.
                "gate": {"kernel": "embed gate_experts"},
                "expert_up": {"kernel": "experts embed mlp", "bias": "experts mlp"},
                "expert_down": {"kernel": "experts mlp embed", "bias": "experts embed"},
            },
        },
    },
    apply=_moe,
)
