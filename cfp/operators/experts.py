"""Matrix products of groups, and experts: tokens to experts, two products, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cfp.operators import probe
from cfp.operators.norms import tokamaxes
from cfp.operators.operator import Argument, Implementation, Operator, Reason

# ----------------------------------------------------------- matrix products of groups

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _one_by_one(x: jax.Array, kernels: jax.Array, groups: jax.Array) -> jax.Array:
    """Every product of all rows, of which those of the group are taken."""
    ends = jnp.cumsum(groups)
    rows = jnp.arange(x.shape[0])[:, None]
    found = jnp.zeros((x.shape[0], kernels.shape[2]), x.dtype)
    for i in range(kernels.shape[0]):
        mine = (rows < ends[i]) & (rows >= ends[i] - groups[i])
        found = jnp.where(mine, x @ kernels[i], found)
    return found


def _ragged_dot(x: jax.Array, kernels: jax.Array, groups: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, kernels, groups)


def _tokamax(
    x: jax.Array, kernels: jax.Array, groups: jax.Array, *, backend: str
) -> jax.Array:
    return probe.load_tokamax().ragged_dot(x, kernels, groups, implementation=backend)


_TOKAMAX = ("xla", "triton", "mosaic_gpu")

GROUPED_MATMUL = Operator(
    name="grouped_matmul",
    summary="rows of x in groups, each group with a kernel of its own",
    arguments=(
        Argument(name="x", dims="t h"),
        Argument(name="kernels", dims="e h w", spread="fan_in"),
        Argument(name="groups", dims="e", kind="groups", below="t"),
    ),
    oracle=_one_by_one,
    flops=lambda d: 2.0 * d["t"] * d["h"] * d["w"],
    implementations=(
        Implementation(name="ragged_dot", library="jax.lax", call=_ragged_dot),
        Implementation(name="one_by_one", library="XLA", call=_one_by_one),
        *tokamaxes(_tokamax, _TOKAMAX),
    ),
)

# ----------------------------------------------------------------------------- experts


def _gates(scores: jax.Array, choices: int) -> tuple[jax.Array, jax.Array]:
    """Weights and experts of each token, [tokens, choices]."""
    best, experts = jax.lax.top_k(scores.astype(jnp.float32), choices)
    return jax.nn.softmax(best), experts


def _every_expert(x, scores, up, down, *, choices: int) -> jax.Array:
    """Every expert computes every token; most of it is multiplied by zero."""
    weights, experts = _gates(scores, choices)
    hot = jax.nn.one_hot(experts, up.shape[0], dtype=jnp.float32)
    share = jnp.einsum("tk,tke->te", weights, hot)
    inner = jax.nn.gelu(jnp.einsum("th,ehf->etf", x, up))
    made = jnp.einsum("etf,efh->eth", inner, down)
    mixed = jnp.einsum("te,eth->th", share, made.astype(jnp.float32))
    return mixed.astype(x.dtype)


def _sorted(x, scores, up, down, *, choices: int, multiply: GroupedMatmul) -> jax.Array:
    """Tokens in the order of their experts, so that each multiplies one block."""
    weights, experts = _gates(scores, choices)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    groups = jnp.bincount(experts.reshape(-1), length=up.shape[0]).astype(jnp.int32)
    rows = x[order // choices]
    made = multiply(jax.nn.gelu(multiply(rows, up, groups)), down, groups)
    back = made[jnp.argsort(order)].reshape(x.shape[0], choices, -1)
    mixed = jnp.einsum("tk,tkh->th", weights, back.astype(jnp.float32))
    return mixed.astype(x.dtype)


def _sorted_tokamax(x, scores, up, down, *, choices: int, backend: str) -> jax.Array:
    multiply = functools.partial(_tokamax, backend=backend)
    return _sorted(x, scores, up, down, choices=choices, multiply=multiply)


def _refuses(x, scores, up, down, *, choices: int) -> Reason:
    if 1 <= choices <= scores.shape[1]:
        return None
    return f"choices={choices} of {scores.shape[1]} experts"


MOE_DISPATCH = Operator(
    name="moe_dispatch",
    summary="each token through the MLPs of its best experts, weighted",
    arguments=(
        Argument(name="x", dims="t h"),
        Argument(name="scores", dims="t e"),
        Argument(name="up", dims="e h w", spread="fan_in"),
        Argument(name="down", dims="e w h", spread="fan_in"),
    ),
    oracle=_every_expert,
    flops=lambda d: 8.0 * d["t"] * d["h"] * d["w"],
    options={"choices": 2},
    implementations=(
        Implementation(
            name="ragged_dot",
            library="jax.lax",
            call=functools.partial(_sorted, multiply=_ragged_dot),
            refuses=_refuses,
        ),
        Implementation(
            name="every_expert", library="XLA", call=_every_expert, refuses=_refuses
        ),
        *tokamaxes(_sorted_tokamax, _TOKAMAX),
    ),
)
