"""Layers and train step of all models: functions of nested dicts of float32 parameters.

Layers multiply in the type of their input, and return it; norms and softmax compute in
float32. Shapes use: batch, seq, hidden, heads, head_dim, ffn, vocab.

For sharding by hand, dims of parameters and activations have logical names, such as
embed and act_batch. Rules map names to mesh axes, as in MaxText. The residual stream's
sequence has a name of its own, act_residual_seq: rules can shard it without the
sequence inside attention and MLPs (Megatron's sequence parallelism). The planner
removes the constraints of rules.

The train step, cross-entropy and AdamW, is a plain function,
`(state, batch) -> (state, metrics)`. Callers jit it and choose donated arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

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
      rules: {logical name: mesh axes}; dims of other names are not sharded.
      only: names of activations to constrain, such as `(RESIDUAL,)`; all if empty.
    """
    return _set(_rules, (mesh, rules, only))


def attending_by(kernel: AttentionKernel) -> contextlib.AbstractContextManager[None]:
    """Context manager: models traced inside it attend by kernel(q, k, v, causal).

    The kernel must scale scores by head_dim ** -0.5. k and v may have fewer heads.
    """
    return _set(_kernel, kernel)


def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Constrains an activation by the rules of `sharded_by`, if these apply to it."""
    mesh, rules, only = _rules.get() or (None, {}, ())
    if mesh is None or (only and names not in only):
        return x
    spec = mesh_spec(PartitionSpec(*names), rules)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def mesh_spec(names: PartitionSpec, rules: Rules) -> PartitionSpec:
    """Maps names to axes; None if a name has no rule, or an earlier name's axis."""
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
    """Contracts the last `axes` dims of x with a kernel's first; adds a bias, if any.

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
    """Layer normalisation over the last dim; float32 inside, returns x's dtype."""
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
    """RMS normalisation over the last dim; float32 inside, returns x's dtype."""
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
      params: a table [vocab, hidden], or a dict of a token and a position table, whose
        rows are added.
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


def attention(
    params: Params,
    x: jax.Array,
    *,
    causal: bool = True,
    kv_names: tuple[str, ...] = HEADS,
    turn: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Self-attention by einsums or the kernel of `attending_by`; keeps `x`'s shape.

    Args:
      causal: True masks the tokens after a query.
      kv_names: logical names of keys' and values' dims. With KV_HEADS, a key head
        serves heads / kv_heads consecutive query heads.
      turn: function applied to queries and to keys, such as a rotary embedding.
    """
    query, key, value = (
        constrain(inside(name, linear, params, x), names)
        for name, names in (("query", HEADS), ("key", kv_names), ("value", kv_names))
    )
    group = "g" if kv_names == KV_HEADS else ""
    kernel = _kernel.get() or partial(_attend, group=group)
    mixed = kernel(turn(query), turn(key), value, causal)
    return inside("out", linear, params, constrain(mixed, HEADS), 2)


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, group: str
) -> jax.Array:
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


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """Two linear layers with a GELU between, [..., hidden] -> [..., hidden].

    If `params` has "gate", the MLP is SiLU-gated: Shazeer, "GLU Variants Improve
    Transformer", 2020.
    """
    if "gate" in params:
        gate, up = (inside(name, linear, params, x) for name in ("gate", "up"))
        h = jax.nn.silu(gate) * up
    else:
        h = jax.nn.gelu(inside("up", linear, params, x))
    return inside("down", linear, params, constrain(h, INNER))


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


Batch = dict[str, Any]


class TrainState(NamedTuple):
    """Float32 parameters, and the optimizer's state: AdamW's for models by name."""

    params: Any
    opt_state: Any


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]
# (parameters, batch) -> logits [batch, seq, vocab], and a penalty [] that is added to
# the loss.
Apply = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


def cross_entropy(
    logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Mean negative log-likelihood, in float32; 0 if no position counts.

    Args:
      logits: [batch, seq, vocab].
      labels: [batch, seq] int32.
      mask: [batch, seq] float32, 1 for positions that count and 0 for others; by
        default all count.
    """
    logits = logits.astype(jnp.float32)
    # A comparison and a sum, instead of a gather, let vocab stay sharded.
    vocab = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    picked = jnp.sum(jnp.where(vocab == labels[..., None], logits, 0.0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    if mask is None:
        return jnp.mean(losses)
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def make_train_step(apply: Apply, optimizer: Any, microbatches: int = 1) -> TrainStep:
    """Makes a train step from a network and an optax optimizer.

    The loss is the cross-entropy plus the network's penalty. A "mask" in the batch
    selects the positions of the cross-entropy.

    With microbatches, a loop runs parts of the batch and sums their gradients, so only
    one part's activations are kept. Loss and gradients are the whole batch's, but for
    rounding, if sequences do not interact and the penalty is a mean over sequences.
    """

    def loss_fn(
        params: Any, batch: Batch, share: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """(loss, cross-entropy) of a batch; by `share` a part's contributions."""
        logits, penalty = apply(params, batch)
        entropy = cross_entropy(logits, batch["labels"], batch.get("mask"))
        if share is None:
            return entropy + penalty, entropy
        return share * entropy + penalty / microbatches, share * entropy

    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def accumulate(params: Any, batch: Batch) -> Any:
        def add(total: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, *part)), None

        zero = jnp.zeros(())
        nothing = (zero, zero), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, nothing, _split(batch, microbatches))[0]

    def train_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, Any]]:
        """One step; metrics: loss and cross_entropy, before the update."""
        whole = accumulate if microbatches > 1 else gradient
        (loss, entropy), grads = whole(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        return TrainState(params, opt_state), {"loss": loss, "cross_entropy": entropy}

    return train_step


def _split(batch: Batch, parts: int) -> tuple[Batch, jax.Array]:
    """The batch's parts, stacked on a new dim 0, and their weights in the mean loss."""
    # A part takes every parts-th sequence. So each device of a batch sharded over
    # devices holds a share of every part, and no sequence moves.
    split = {
        key: leaf.reshape(-1, parts, *leaf.shape[1:]).swapaxes(0, 1)
        for key, leaf in batch.items()
    }
    if "mask" not in split:
        return split, jnp.full(parts, 1 / parts)
    counts = split["mask"].sum(axis=(1, 2))
    return split, counts / jnp.maximum(counts.sum(), 1.0)


def random_text(key: jax.Array, batch: int, seq: int, vocab: int) -> Batch:
    """Random tokens, and the next tokens as labels, both [batch, seq] int32."""
    text = jax.random.randint(key, (batch, seq + 1), 0, vocab, dtype=jnp.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}
