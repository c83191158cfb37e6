"""Activations: GELU of a sum, the gated SiLU, and softmaxes of attention scores.

Softmaxes are computed in float32, whatever the scores are.

Experts: tokens to experts, two products of groups, and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cfp.operators import probe
from cfp.operators.norms import tokamaxes
from cfp.operators.operator import Argument, Implementation, Operator, Reason

# ------------------------------------------------------------------- GELU of a sum


def _bias_gelu(x: Array, bias: Array) -> Array:
    y = x + bias
    inner = sqrt(2 / pi) * (y + 0.044715 * y * y * y)
    return 0.5 * y * (1 + jnp.tanh(inner))


def _bias_gelu_jax_nn(x: Array, bias: Array) -> Array:
    return jax.nn.gelu(x + bias, approximate=True)


bias_gelu = Operator(
    name="bias_gelu",
    summary="GELU (tanh) of x + bias, as between the two halves of an MLP",
    arguments=(
        Argument("x", "* f"),
        Argument("bias", "f"),
    ),
    oracle=_bias_gelu,
    implementations=(
        Implementation("jax_nn", "jax.nn", _bias_gelu_jax_nn),
        Implementation("xla", "XLA", _bias_gelu),
        Implementation(
            "rematerialized",
            "jax.nn, jax.checkpoint",
            jax.checkpoint(_bias_gelu_jax_nn),
        ),
    ),
)

# --------------------------------------------------------------------- gated SiLU


def _swiglu(x: Array, gate: Array, up: Array) -> Array:
    return jax.nn.silu(x @ gate) * (x @ up)


def _swiglu_fused(x: Array, gate: Array, up: Array) -> Array:
    both = x @ jnp.concatenate([gate, up], axis=1)
    left, right = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(left) * right


def _swiglu_rematerialized(x: Array, gate: Array, up: Array) -> Array:
    # The products are stored, what is made of them is not.
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(_swiglu, policy=policy)(x, gate, up)


def _swiglu_tokamax(x: Array, gate: Array, up: Array, *, backend: str) -> Array:
    return probe.load_tokamax().gated_linear_unit(
        x, (gate, up), activation=jax.nn.silu, implementation=backend
    )


swiglu = Operator(
    name="swiglu",
    summary="silu(x @ gate) * (x @ up), the first half of a gated MLP",
    arguments=(
        Argument("x", "* h"),
        Argument("gate", "h f", spread="fan_in"),
        Argument("up", "h f", spread="fan_in"),
    ),
    oracle=_swiglu,
    flops=lambda d: 4.0 * d["*"] * d["h"] * d["f"],
    implementations=(
        Implementation("jax_nn", "jax.nn", _swiglu),
        Implementation("fused", "XLA", _swiglu_fused),
        Implementation(
            "rematerialized", "jax.nn, jax.checkpoint", _swiglu_rematerialized
        ),
        *tokamaxes(_swiglu_tokamax, ("xla", "triton", "mosaic")),
    ),
)


_SCORES = Argument("scores", "b n q s", spread=2.0)
_LEAST = -1e30  # Finite: a row without any key has no not-a-number.


def _softmax(scores: Array) -> Array:
    y = scores.astype(jnp.float32)
    powers = jnp.exp(y - jax.lax.stop_gradient(y.max(-1, keepdims=True)))
    return (powers / powers.sum(-1, keepdims=True)).astype(scores.dtype)


def _softmax_jax_nn(scores: Array) -> Array:
    return jax.nn.softmax(scores.astype(jnp.float32)).astype(scores.dtype)


def softmax_pallas(scores: Array, *, interpret: bool = False) -> Array:
    """The kernel of `jax.experimental.pallas.ops.gpu`; on CPUs it is interpreted."""
    return probe.load_pallas("softmax").softmax(scores, interpret=interpret)


softmax = Operator(
    name="softmax",
    summary="softmax over the last dim",
    arguments=(_SCORES,),
    oracle=_softmax,
    implementations=(
        Implementation("jax_nn", "jax.nn", _softmax_jax_nn),
        Implementation("xla", "XLA", _softmax),
        Implementation(
            "pallas",
            "Pallas",
            softmax_pallas,
            probe=probe.pallas("softmax"),
            differentiable=False,
        ),
    ),
)


def _ways_of_mask(mask_of: Callable[..., Array]) -> dict[str, Any]:
    """The oracle and the implementations of a softmax over what a mask shows."""

    def xla(scores: Array, *rest: Array) -> Array:
        seen = mask_of(scores, *rest)
        found = _softmax(jnp.where(seen, scores.astype(jnp.float32), _LEAST))
        return found.astype(scores.dtype)

    def jax_nn(scores: Array, *rest: Array) -> Array:
        wide = scores.astype(jnp.float32)
        found = jax.nn.softmax(wide, where=mask_of(scores, *rest))
        return found.astype(scores.dtype)

    return {
        "oracle": xla,
        "implementations": (
            Implementation("jax_nn", "jax.nn", jax_nn),
            Implementation("xla", "XLA", xla),
        ),
    }


def length_mask(lengths: Array, keys: int) -> Array:
    """[batch] -> [batch, 1, 1, keys]: which keys there are."""
    return jnp.arange(keys) < lengths[:, None, None, None]


masked_softmax = Operator(
    name="masked_softmax",
    summary="softmax over the first keys of each sequence, the others are zero",
    arguments=(
        _SCORES,
        Argument("lengths", "b", kind="lengths", below="s"),
    ),
    **_ways_of_mask(lambda scores, lengths: length_mask(lengths, scores.shape[-1])),
)


def causal_mask(queries: int, keys: int) -> Array:
    """[queries, keys]: a query sees those up to its own place."""
    return jnp.tril(jnp.ones((queries, keys), bool), keys - queries)


causal_softmax = Operator(
    name="causal_softmax",
    summary="softmax over the keys up to each query's own place",
    arguments=(_SCORES,),
    **_ways_of_mask(lambda scores: causal_mask(*scores.shape[-2:])),
)


# ----------------------------------------------------------- matrix products of groups

GroupedMatmul = Callable[[Array, Array, Array], Array]


def _one_by_one(x: Array, kernels: Array, groups: Array) -> Array:
    """Every product of all rows, of which those of the group are taken."""
    ends = jnp.cumsum(groups)
    rows = jnp.arange(x.shape[0])[:, None]
    found = jnp.zeros((x.shape[0], kernels.shape[2]), x.dtype)
    for i in range(kernels.shape[0]):
        mine = (rows < ends[i]) & (rows >= ends[i] - groups[i])
        found = jnp.where(mine, x @ kernels[i], found)
    return found


def _ragged_dot(x: Array, kernels: Array, groups: Array) -> Array:
    return jax.lax.ragged_dot(x, kernels, groups)


def _tokamax(x: Array, kernels: Array, groups: Array, *, backend: str) -> Array:
    return probe.load_tokamax().ragged_dot(x, kernels, groups, implementation=backend)


_TOKAMAX = ("xla", "triton", "mosaic_gpu")

grouped_matmul = Operator(
    name="grouped_matmul",
    summary="rows of x in groups, each group with a kernel of its own",
    arguments=(
        Argument("x", "t h"),
        Argument("kernels", "e h w", spread="fan_in"),
        Argument("groups", "e", kind="groups", below="t"),
    ),
    oracle=_one_by_one,
    flops=lambda d: 2.0 * d["t"] * d["h"] * d["w"],
    implementations=(
        Implementation("ragged_dot", "jax.lax", _ragged_dot),
        Implementation("one_by_one", "XLA", _one_by_one),
        *tokamaxes(_tokamax, _TOKAMAX),
    ),
)

# ----------------------------------------------------------------------------- experts


def _gates(scores: Array, choices: int) -> tuple[Array, Array]:
    """Weights and experts of each token, [tokens, choices]."""
    best, experts = jax.lax.top_k(scores.astype(jnp.float32), choices)
    return jax.nn.softmax(best), experts


def _every_expert(x, scores, up, down, *, choices: int) -> Array:
    """Every expert computes every token; most of it is multiplied by zero."""
    weights, experts = _gates(scores, choices)
    hot = jax.nn.one_hot(experts, up.shape[0], dtype=jnp.float32)
    share = jnp.einsum("tk,tke->te", weights, hot)
    inner = jax.nn.gelu(jnp.einsum("th,ehf->etf", x, up))
    made = jnp.einsum("etf,efh->eth", inner, down)
    mixed = jnp.einsum("te,eth->th", share, made.astype(jnp.float32))
    return mixed.astype(x.dtype)


def _sorted(x, scores, up, down, *, choices: int, multiply: GroupedMatmul) -> Array:
    """Tokens in the order of their experts, so that each multiplies one block."""
    weights, experts = _gates(scores, choices)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    groups = jnp.bincount(experts.reshape(-1), length=up.shape[0]).astype(jnp.int32)
    rows = x[order // choices]
    made = multiply(jax.nn.gelu(multiply(rows, up, groups)), down, groups)
    back = made[jnp.argsort(order)].reshape(x.shape[0], choices, -1)
    mixed = jnp.einsum("tk,tkh->th", weights, back.astype(jnp.float32))
    return mixed.astype(x.dtype)


def _sorted_tokamax(x, scores, up, down, *, choices: int, backend: str) -> Array:
    multiply = functools.partial(_tokamax, backend=backend)
    return _sorted(x, scores, up, down, choices=choices, multiply=multiply)


def _refuses(x, scores, up, down, *, choices: int) -> Reason:
    if 1 <= choices <= scores.shape[1]:
        return None
    return f"choices={choices} of {scores.shape[1]} experts"


moe_dispatch = Operator(
    name="moe_dispatch",
    summary="each token through the MLPs of its best experts, weighted",
    arguments=(
        Argument("x", "t h"),
        Argument("scores", "t e"),
        Argument("up", "e h w", spread="fan_in"),
        Argument("down", "e w h", spread="fan_in"),
    ),
    oracle=_every_expert,
    flops=lambda d: 8.0 * d["t"] * d["h"] * d["w"],
    options={"choices": 2},
    implementations=(
        Implementation(
            "ragged_dot",
            "jax.lax",
            functools.partial(_sorted, multiply=_ragged_dot),
            refuses=_refuses,
        ),
        Implementation("every_expert", "XLA", _every_expert, refuses=_refuses),
        *tokamaxes(_sorted_tokamax, _TOKAMAX),
    ),
)
