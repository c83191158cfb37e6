"""Experts: products of groups of rows, and tokens through their best experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from cfp.operators.operator import Argument, Implementation, Operator, Reason


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
    ),
)


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


def _sorted(x, scores, up, down, *, choices: int) -> Array:
    """Tokens in the order of their experts, so that each multiplies one block."""
    weights, experts = _gates(scores, choices)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    groups = jnp.bincount(experts.reshape(-1), length=up.shape[0]).astype(jnp.int32)
    inner = jax.nn.gelu(_ragged_dot(x[order // choices], up, groups))
    made = _ragged_dot(inner, down, groups)
    back = made[jnp.argsort(order)].reshape(x.shape[0], choices, -1)
    mixed = jnp.einsum("tk,tkh->th", weights, back.astype(jnp.float32))
    return mixed.astype(x.dtype)


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
        Implementation("ragged_dot", "jax.lax", _sorted, refuses=_refuses),
        Implementation("every_expert", "XLA", _every_expert, refuses=_refuses),
    ),
)
