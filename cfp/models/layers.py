"""The layers that models share: functions of nested dicts of float32 parameters.

They compute in the type of what flows through them. Shapes use: batch, seq, hidden,
heads, head_dim, ffn, vocab.

For sharding a model by hand, every dim of a parameter has a logical name, such as embed
or mlp, and so have the dims of activations, such as act_batch. Rules map names to axes
of a mesh, as in MaxText. The residual stream's sequence has a name of its own: it can
be sharded where the one inside attention and MLPs is not (Megatron's sequence
parallelism). The planner removes the constraints of rules.
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
Rules = Mapping[str, Axes]  # What is not in it stays whole.

TOKENS = ("act_batch", "act_seq")
RESIDUAL = ("act_batch", "act_residual_seq", "act_embed")
HEADS = ("act_batch", "act_seq", "act_heads", "act_head_dim")
# Of keys and values: there may be fewer heads of them than devices.
KV_HEADS = ("act_batch", "act_seq", "act_kv_heads", "act_head_dim")
INNER = ("act_batch", "act_seq", "act_mlp")
LOGITS = ("act_batch", "act_seq", "act_vocab")

# From query, key and value, [batch, seq, heads, head_dim] each, and whether the
# attention is causal, to what is attended to, as the query.
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
    """Has all models that are traced meanwhile constrain their activations.

    Args:
      mesh: of axes whose shardings the compiler may choose (AxisType.Auto).
      rules: from names to axes of the mesh.
      only: the activations to constrain, by the names of their dims; all if empty.
    """
    return _set(_rules, (mesh, rules, only))


def attending_by(kernel: AttentionKernel) -> contextlib.AbstractContextManager[None]:
    """Has all models that are traced meanwhile call a kernel for their attention.

    Args:
      kernel: scales by the root of head_dim; keys may have fewer heads than queries.
    """
    return _set(_kernel, kernel)


def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """An activation, sharded as the active rules say, if there are any."""
    mesh, rules, only = _rules.get() or (None, {}, ())
    if mesh is None or (only and names not in only):
        return x
    spec = mesh_spec(PartitionSpec(*names), rules)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def mesh_spec(names: PartitionSpec, rules: Rules) -> PartitionSpec:
    """The sharding by rules of a tensor with named dims; an axis is used once."""
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
    """Calls a layer with its parameters, in a scope of its name."""
    with jax.named_scope(name):
        return layer(params[name], *args, **options)


def linear(params: Params, x: jax.Array, axes: int = 1) -> jax.Array:
    """Multiplies the last axes of an array by a kernel, and adds its bias.

    Args:
      params: a kernel, or a dict of it and perhaps a bias.
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
    """[hidden], [..., hidden] -> [..., hidden], normalised in float32."""
    y = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    return (scale * y * jax.lax.rsqrt(mean_square + RMS_EPSILON)).astype(x.dtype)


def norm(params: Params, x: jax.Array) -> jax.Array:
    """Layer normalisation, or RMS normalisation if the parameter is a scale alone."""
    if isinstance(params, Mapping):
        return layer_norm(params, x)
    return rms_norm(params, x)


def embed(params: Params, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Embeddings of tokens, [batch, seq] -> [batch, seq, hidden].

    Args:
      params: a table, or a dict of tables of tokens and of positions.
    """
    # Rows are looked up in float32 and cast after, so that the gradients of a token
    # that occurs often are also added up in float32.
    if isinstance(params, Mapping):
        x = inside("token", look_up, params, tokens)
        x = x + params["position"][: tokens.shape[1]]
    else:
        x = jnp.asarray(params)[tokens]
    return constrain(x.astype(dtype), RESIDUAL)


def look_up(params: Params, rows: jax.Array) -> jax.Array:
    """Rows of a table."""
    return jnp.take(params["embedding"], rows, axis=0)


def unembed(params: Params, x: jax.Array) -> jax.Array:
    """Logits by the table of tokens, [batch, seq, hidden] -> [batch, seq, vocab]."""
    return constrain(x @ params["token"]["embedding"].astype(x.dtype).T, LOGITS)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, group: str
) -> jax.Array:
    """Attention of [batch, seq, heads, head_dim], written out or by a kernel.

    Args:
      causal: a token sees itself and those before it; otherwise it sees all.
      group: "g" if keys and values may have fewer heads, each for heads / kv_heads
        query heads in a row; else "".
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
      kv_names: of the dims of keys and values; KV_HEADS if they may have fewer heads.
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

    With a kernel "gate" it is gated by SiLU: Shazeer, "GLU Variants Improve
    Transformer", 2020.
    """
    if "gate" in params:
        gate, up = (inside(name, linear, params, x) for name in ("gate", "up"))
        h = constrain(jax.nn.silu(gate) * up, INNER)
    else:
        h = constrain(jax.nn.gelu(inside("up", linear, params, x)), INNER)
    return inside("down", linear, params, h)


# The names of the dims of these layers' parameters.
NORM = {"scale": "norm", "bias": "norm"}
EMBEDDING = {"token": {"embedding": "vocab embed"}, "position": "position embed"}
_PROJECTION = {"kernel": "embed heads head_dim", "bias": "heads head_dim"}
ATTENTION = {
    "query": _PROJECTION,
    # A bias of the keys shifts all scores of a query alike, which softmax takes away:
    # its gradient is rounding noise, which Adam would blow up.
    "key": {"kernel": "embed heads head_dim"},
    "value": _PROJECTION,
    "out": {"kernel": "heads head_dim embed", "bias": "embed"},
}
MLP = {
    "up": {"kernel": "embed mlp", "bias": "mlp"},
    "down": {"kernel": "mlp embed", "bias": "embed"},
}
