"""Layers shared by the models: functions of nested dicts of float32 parameters.

Layers compute in the type of their input. Shapes use: batch, seq, hidden, heads,
head_dim, ffn, vocab.

For sharding by hand, dims of parameters and activations have logical names, such as
embed and act_batch. Rules map names to mesh axes, as in MaxText. The residual stream's
sequence has a name of its own, act_residual_seq: rules can shard it but not the
sequence inside attention and MLPs (Megatron's sequence parallelism). The planner
removes the constraints of rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

Axes = str | tuple[str, ...] | None
Rules = Mapping[str, Axes]  # Dims with other names are not sharded.

TOKENS = ("act_batch", "act_seq")
RESIDUAL = ("act_batch", "act_residual_seq", "act_embed")
HEADS = ("act_batch", "act_seq", "act_heads", "act_head_dim")
# For keys and values, which may have fewer heads than there are devices.
KV_HEADS = ("act_batch", "act_seq", "act_kv_heads", "act_head_dim")
INNER = ("act_batch", "act_seq", "act_mlp")
LOGITS = ("act_batch", "act_seq", "act_vocab")

# (query, key, value, causal) -> attention of the query's shape. Arrays are [batch, seq,
# heads, head_dim].
AttentionKernel = Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]

_rules: ContextVar[tuple[Mesh, Rules, Any] | None] = ContextVar("rules", default=None)
_kernel: ContextVar[AttentionKernel | None] = ContextVar("kernel", default=None)


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def sharded_by(
    mesh: Mesh, rules: Rules, only: tuple[tuple[str, ...], ...] = ()
) -> contextlib.AbstractContextManager[None]:
    """Context manager: models traced inside it constrain their activations by rules.

    Args:
      mesh: a mesh with axes of AxisType.Auto.
      rules: {logical name: mesh axes}.
      only: activations to constrain, such as `RESIDUAL`; all if empty.
    """
    return _set(_rules, (mesh, rules, only))


def attending_by(kernel: AttentionKernel) -> contextlib.AbstractContextManager[None]:
    """Context manager: models traced inside it call a kernel for their attention.

    Args:
      kernel: must scale scores by head_dim ** -0.5, and accept keys with fewer heads
        than queries.
    """
    return _set(_kernel, kernel)


def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Constrains an activation by the rules of `sharded_by`, if any are active."""
    mesh, rules, only = _rules.get() or (None, {}, ())
    if mesh is None or (only and names not in only):
        return x
    spec = mesh_spec(PartitionSpec(*names), rules)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def mesh_spec(names: PartitionSpec, rules: Rules) -> PartitionSpec:
    """Maps logical names to mesh axes; a dim whose axis is already used stays whole."""
    used: set[str] = set()
    found: list[Axes] = []
    for name in names:
        axes = rules.get(name) if isinstance(name, str) else None
        wanted = {axes} if isinstance(axes, str) else set(axes or ())
        found.append(axes if wanted and not used & wanted else None)
        used |= wanted
    return PartitionSpec(*found)


Params = Any
NORM_EPSILON = 1e-6
RMS_EPSILON = 1e-5


def inside(
    name: str, layer: Callable[..., Any], params: Params, *args: Any, **options: Any
) -> Any:
    """Calls a layer with params[name], in `jax.named_scope(name)`."""
    with jax.named_scope(name):
        return layer(params[name], *args, **options)


def linear(params: Params, x: jax.Array, axes: int = 1) -> jax.Array:
    """Contracts the last `axes` dims with a kernel, and adds a bias if there is one.

    Args:
      params: a kernel, or a dict with "kernel" and optionally "bias".
    """
    if not isinstance(params, Mapping):
        params = {"kernel": params}
    y = jnp.tensordot(x, params["kernel"].astype(x.dtype), axes=axes)
    if "bias" not in params:
        return y
    bias = params["bias"].astype(x.dtype)
    return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def layer_norm(params: Params, x: jax.Array) -> jax.Array:
    """Layer normalisation over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    square = jnp.square(wide)
    mean, mean_square = wide.mean(-1), square.mean(-1)
    variance = jnp.maximum(0.0, mean_square - jnp.square(mean))
    mean, variance = mean[..., None], variance[..., None]
    y, rates = x - mean, jax.lax.rsqrt(variance + NORM_EPSILON)
    row = (1,) * (x.ndim - 1) + (-1,)
    y = y * (rates * params["scale"].reshape(row)) + params["bias"].reshape(row)
    return y.astype(x.dtype)


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """RMS normalisation over the last dim, in float32; the scale is [hidden]."""
    y = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    return (scale * y * jax.lax.rsqrt(mean_square + RMS_EPSILON)).astype(x.dtype)


def norm(params: Params, x: jax.Array) -> jax.Array:
    """Layer normalisation, or RMS normalisation if `params` is an array (the scale)."""
    if isinstance(params, Mapping):
        return layer_norm(params, x)
    return rms_norm(params, x)


def embed(params: Params, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Embeddings of tokens, [batch, seq] -> [batch, seq, hidden].

    Args:
      params: a table [vocab, hidden], or a dict of tables for tokens and positions.
    """
    # Rows are cast after the look-up, so that gradients of frequent tokens are summed
    # in float32.
    if isinstance(params, Mapping):
        x = inside("token", look_up, params, tokens)
        x = x + params["position"][: tokens.shape[1]]
    else:
        x = jnp.asarray(params)[tokens]
    return constrain(x.astype(dtype), RESIDUAL)


def look_up(params: Params, rows: jax.Array) -> jax.Array:
    """Rows of params["embedding"]."""
    return jnp.take(params["embedding"], rows, axis=0)


def unembed(params: Params, x: jax.Array) -> jax.Array:
    """Logits by the token embedding, [batch, seq, hidden] -> [batch, seq, vocab]."""
    return constrain(x @ params["token"]["embedding"].astype(x.dtype).T, LOGITS)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, group: str
) -> jax.Array:
    """Attention of [batch, seq, heads, head_dim]: einsums, or `attending_by`'s kernel.

    Args:
      causal: True masks the tokens after a query.
      group: "g" for grouped-query attention: a key head serves heads / kv_heads
        consecutive query heads. "" for as many key heads as query heads.
    """
    if kernel := _kernel.get():
        return kernel(query, key, value, causal)
    (batch, seq, _, head_dim), shape = query.shape, query.shape
    with jax.named_scope("scores"):
        query = query * head_dim**-0.5
        if group:
            query = query.reshape(batch, seq, key.shape[2], -1, head_dim)
        scores = jnp.einsum(f"bqh{group}d,bkhd->bh{group}qk", query, key)
    scores = scores.astype(jnp.float32)
    if causal:
        past = jnp.tril(jnp.ones((seq, seq), dtype=bool))
        scores = jnp.where(past, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    with jax.named_scope("mix"):
        mixed = jnp.einsum(f"bh{group}qk,bkhd->bqh{group}d", weights, value)
    return mixed.reshape(shape)


def attention(
    params: Params,
    x: jax.Array,
    *,
    causal: bool = True,
    kv_names: tuple[str, ...] = HEADS,
    turn: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Computes self-attention, [batch, seq, hidden] -> [batch, seq, hidden].

    Args:
      kv_names: logical names of keys' and values' dims; KV_HEADS for grouped queries.
      turn: function of queries and keys, such as a rotary embedding.
    """
    query, key, value = (
        constrain(inside(name, linear, params, x), names)
        for name, names in (("query", HEADS), ("key", kv_names), ("value", kv_names))
    )
    group = "g" if kv_names == KV_HEADS else ""
    mixed = attend(turn(query), turn(key), value, causal, group)
    return inside("out", linear, params, constrain(mixed, HEADS), 2)


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """Two linear layers with a GELU between, [..., hidden] -> [..., hidden].

    If `params` has "gate", the MLP is SiLU-gated: Shazeer, "GLU Variants Improve
    Transformer", 2020.
    """
    if "gate" in params:
        gate, up = (inside(name, linear, params, x) for name in ("gate", "up"))
        h = constrain(jax.nn.silu(gate) * up, INNER)
    else:
        h = constrain(jax.nn.gelu(inside("up", linear, params, x)), INNER)
    return inside("down", linear, params, h)


# Logical names of the dims of the layers' parameters.
NORM = {"scale": "norm", "bias": "norm"}
EMBEDDING = {"token": {"embedding": "vocab embed"}, "position": "position embed"}
_PROJECTION = {"kernel": "embed heads head_dim", "bias": "heads head_dim"}
ATTENTION = {
    "query": _PROJECTION,
    # No bias: it would shift all scores of a query alike, and softmax cancels that. Its
    # gradient would be rounding noise, which Adam amplifies.
    "key": {"kernel": "embed heads head_dim"},
    "value": _PROJECTION,
    "out": {"kernel": "heads head_dim embed", "bias": "embed"},
}
MLP = {
    "up": {"kernel": "embed mlp", "bias": "mlp"},
    "down": {"kernel": "mlp embed", "bias": "embed"},
}
