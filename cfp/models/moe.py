"""GShard's mixture of experts: every second decoder layer routes its tokens.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and
Automatic Sharding", 2020. A token goes to the two experts with the largest gate
probabilities, unless they are full. GShard draws the second at random; this does not.

Shapes use: groups, group (tokens in a group), experts, capacity (an expert's seats for
a group, 2 * group / experts rounded up), hidden, ffn.
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
      combine: the seats' weights. A token's weights sum to 1, less those of full
        experts.
      balance: [], 1 if load and gates are even, more otherwise.
    """

    dispatch: jax.Array
    combine: jax.Array
    balance: jax.Array


def route_top2(gates: jax.Array, capacity: int) -> Routing:
    """Gives each token seats at its two most probable experts, in token order.

    All first choices are seated before any second choice. A full expert adds nothing.

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
                # A name of its own keeps rules for "experts" off this small kernel.
                "gate": {"kernel": "embed gate_experts"},
                "expert_up": {"kernel": "experts embed mlp", "bias": "experts mlp"},
                "expert_down": {"kernel": "experts mlp embed", "bias": "experts embed"},
            },
        },
    },
    apply=_moe,
)
