"""The flax layers that models share, and how a stack of layers is run.

Every layer takes one array and returns one, so that `flax.linen.remat` and
`flax.linen.scan` can wrap it. Parameters are float32; `dtype` is what is computed in.

Shapes use: batch, seq, hidden, heads, head_dim, ffn, vocab.

For what shards a model by hand, every dim of a parameter has a logical name, and so
has every dim of the activations that a person would care to shard. Rules map names to
axes of a mesh, as in MaxText:

    parameters   vocab, position, embed, heads, kv_heads, head_dim, mlp, experts,
                 norm, layers, and a few that are never sharded
    activations  act_batch, act_seq, act_residual_seq, act_embed, act_heads,
                 act_kv_heads, act_head_dim, act_mlp, act_vocab, act_groups,
                 act_group, act_experts, act_expert_groups, act_capacity

The residual stream's sequence has a name of its own, so that it can be sharded where
the one inside attention and MLPs is not (Megatron's sequence parallelism).

Parameters of flax models carry their names by `flax.linen.with_logical_partitioning`,
and activations go through `constrain`. Without rules both are without effect; what
rules leave in a program, cfp's planner takes out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from cfp.models.options import TransformerConfig
from cfp.models.train import Batch, Network

Axes = str | tuple[str, ...] | None
Rules = Mapping[str, Axes]  # What is not in it stays whole.

TOKENS = ("act_batch", "act_seq")
RESIDUAL = ("act_batch", "act_residual_seq", "act_embed")
HEADS = ("act_batch", "act_seq", "act_heads", "act_head_dim")
INNER = ("act_batch", "act_seq", "act_mlp")
LOGITS = ("act_batch", "act_seq", "act_vocab")


@dataclass(frozen=True, slots=True)
class _Active:
    mesh: Mesh
    rules: Rules
    only: tuple[tuple[str, ...], ...]


_active: ContextVar[_Active | None] = ContextVar("logical_rules", default=None)


@contextlib.contextmanager
def sharded_by(
    mesh: Mesh, rules: Rules, only: tuple[tuple[str, ...], ...] = ()
) -> Iterator[None]:
    """Has all models that are traced meanwhile constrain their activations.

    Args:
      mesh: of axes whose shardings the compiler may choose (AxisType.Auto).
      rules: from names to axes of the mesh.
      only: the activations to constrain, by the names of their dims; all if empty.
    """
    token = _active.set(_Active(mesh, rules, only))
    try:
        yield
    finally:
        _active.reset(token)


def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """An activation, sharded as the active rules say, if there are any.

    As `flax.linen.with_logical_constraint`, which needs a mesh set for the whole
    process, under which flax's own layers then constrain their parameters, too.
    """
    active = _active.get()
    if active is None or (active.only and names not in active.only):
        return x
    spec = mesh_spec(PartitionSpec(*names), active.rules)
    return jax.lax.with_sharding_constraint(x, NamedSharding(active.mesh, spec))


def mesh_spec(names: PartitionSpec, rules: Rules) -> PartitionSpec:
    """The sharding that rules give to a tensor with dims of these names.

    An axis goes to the first dim that asks for it.
    """
    used: set[str] = set()
    found: list[Axes] = []
    for name in names:
        axes = rules.get(name) if isinstance(name, str) else None
        wanted = (axes,) if isinstance(axes, str) else axes or ()
        found.append(axes if used.isdisjoint(wanted) else None)
        if found[-1] is not None:
            used.update(wanted)
    return PartitionSpec(*found)


KERNEL_INIT = nn.initializers.normal(stddev=0.02)
ZEROS_INIT = nn.initializers.zeros


def named(init: Any, names: tuple[str, ...]) -> Any:
    """A parameter's initialiser with the logical names of its dims."""
    return nn.with_logical_partitioning(init, names)


def dense(
    features: int, names: tuple[str, str], dtype: DTypeLike, **options: Any
) -> nn.Dense:
    """A dense layer whose kernel has dims of these names."""
    return nn.Dense(
        features,
        dtype=dtype,
        kernel_init=named(KERNEL_INIT, names),
        bias_init=named(ZEROS_INIT, names[1:]),
        **options,
    )


def layer_norm(dtype: DTypeLike, name: str) -> nn.LayerNorm:
    """Layer normalisation over the residual stream's width."""
    return nn.LayerNorm(
        dtype=dtype,
        scale_init=named(nn.initializers.ones, ("norm",)),
        bias_init=named(ZEROS_INIT, ("norm",)),
        name=name,
    )


# From query, key and value, [batch, seq, heads, head_dim] each, and whether the
# attention is causal, to what is attended to, as the query.
AttentionKernel = Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]

_kernel: ContextVar[AttentionKernel | None] = ContextVar("kernel", default=None)


def attention_kernel() -> AttentionKernel | None:
    """Returns what computes attention; None if it is written out."""
    return _kernel.get()


@contextlib.contextmanager
def attending_by(kernel: AttentionKernel) -> Iterator[None]:
    """Has all models that are traced meanwhile call a kernel for their attention.

    Args:
      kernel: scales by the root of head_dim; keys may have fewer heads than queries.
    """
    token = _kernel.set(kernel)
    try:
        yield
    finally:
        _kernel.reset(token)


class Embedding(nn.Module):
    """Token embedding plus a learned embedding of the position."""

    vocab: int
    seq: int
    hidden: int
    dtype: DTypeLike

    def setup(self) -> None:
        table_init = named(KERNEL_INIT, ("vocab", "embed"))
        self.token = nn.Embed(self.vocab, self.hidden, embedding_init=table_init)
        position_init = named(KERNEL_INIT, ("position", "embed"))
        self.position = self.param("position", position_init, (self.seq, self.hidden))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, seq] int32 -> [batch, seq, hidden]."""
        # Rows are looked up in float32 and cast after, so that the gradients of a
        # token that occurs often are also added up in float32.
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return constrain(x.astype(self.dtype), RESIDUAL)

    def attend(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> [batch, seq, vocab], with the token table."""
        return constrain(x @ self.token.embedding.astype(self.dtype).T, LOGITS)


class Attention(nn.Module):
    """Self-attention.

    Query, key and value have kernels of their own, [hidden, heads, head_dim], so that
    heads are a dim of the program from the first to the last op.

    Attributes:
      causal: a token sees itself and those before it; otherwise it sees all.
    """

    heads: int
    dtype: DTypeLike
    causal: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        seq, hidden = x.shape[1:]
        head_dim = hidden // self.heads
        project = functools.partial(
            nn.DenseGeneral,
            features=(self.heads, head_dim),
            dtype=self.dtype,
            kernel_init=named(KERNEL_INIT, ("embed", "heads", "head_dim")),
            bias_init=named(ZEROS_INIT, ("heads", "head_dim")),
        )
        query = constrain(project(name="query")(x), HEADS)
        # A bias of the keys shifts all scores of a query alike, which softmax takes
        # away: its gradient is rounding noise, which Adam would blow up.
        key = constrain(project(name="key", use_bias=False)(x), HEADS)
        value = constrain(project(name="value")(x), HEADS)

        if kernel := attention_kernel():
            mixed = kernel(query, key, value, self.causal)
        else:
            with jax.named_scope("scores"):
                scores = jnp.einsum("bqhd,bkhd->bhqk", query * head_dim**-0.5, key)
            scores = scores.astype(jnp.float32)
            if self.causal:
                past = jnp.tril(jnp.ones((seq, seq), dtype=bool))
                scores = jnp.where(past, scores, -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1).astype(self.dtype)
            with jax.named_scope("mix"):
                mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)

        return nn.DenseGeneral(
            hidden,
            axis=(-2, -1),
            dtype=self.dtype,
            kernel_init=named(KERNEL_INIT, ("heads", "head_dim", "embed")),
            bias_init=named(ZEROS_INIT, ("embed",)),
            name="out",
        )(constrain(mixed, HEADS))


class MLP(nn.Module):
    """Two dense layers with a GELU between."""

    ffn: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden] -> [..., hidden]."""
        up = dense(self.ffn, ("embed", "mlp"), self.dtype, name="up")
        down = dense(x.shape[-1], ("mlp", "embed"), self.dtype, name="down")
        return down(constrain(nn.gelu(up(x)), INNER))


class DecoderLayer(nn.Module):
    """A pre-LN decoder layer: attention, then the given feed-forward module.

    Attributes:
      feed_forward: makes the second half's module; it names it too.
    """

    heads: int
    feed_forward: Callable[[], nn.Module]
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        norm = functools.partial(layer_norm, self.dtype)
        attention = Attention(self.heads, self.dtype, name="attention")
        x = constrain(x + attention(norm(name="attention_norm")(x)), RESIDUAL)
        feed_forward = self.feed_forward()
        y = feed_forward(norm(name="feed_forward_norm")(x))
        return constrain(x + y, RESIDUAL)


def remat_layer(layer: type[nn.Module], *, remat: bool, scan: bool) -> type[nn.Module]:
    """The class of a layer, rematerialised if `remat` says so."""
    if not remat:
        return layer
    # A loop's backward pass is another loop: the compiler cannot find that what is
    # computed there was computed before. Elsewhere a barrier has to keep it from that.
    return nn.remat(layer, prevent_cse=not scan)


def scan_layers(layer: type[nn.Module], length: int) -> type[nn.Module]:
    """The class of a loop over layers, their variables stacked on dim 0.

    Args:
      layer: maps an array to one like it.

    Returns:
      A class with the attributes of `layer`; it maps (array, None) to (array, None).
    """

    # A subclass: a function around a layer would show in the names of all scopes.
    class Loop(layer):
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return super().__call__(x), None

    return nn.scan(
        Loop,
        variable_axes={"params": 0, "losses": 0},
        split_rngs={"params": True},
        length=length,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )


def run_layers(
    config: TransformerConfig,
    layer: type[nn.Module],
    attributes: tuple[Any, ...],
    x: jax.Array,
) -> jax.Array:
    """Runs as many layers as a configuration says, in a loop if it says so.

    Args:
      layer: the class of all, which maps an array to one like it.
      attributes: of each layer.
    """
    kind = remat_layer(layer, remat=config.remat, scan=config.scan)
    if config.scan:
        return scan_layers(kind, config.layers)(*attributes, name="layers")(x, None)[0]
    for i in range(config.layers):
        x = kind(*attributes, name=f"layer_{i}")(x)
    return x


def flax_network(
    module: nn.Module,
    random_batch: Callable[[jax.Array, int], Batch],
    inputs: Sequence[str] = ("tokens",),
) -> Network:
    """Wraps a module that gives logits.

    Its penalty is all that it sows into the collection "losses", such as the balancing
    losses of expert layers.

    Args:
      module: takes the batch's entries named by `inputs`, in that order.
      inputs: keys of a batch.
    """

    def boxed(key: jax.Array, batch: Batch) -> Any:
        return module.init(key, *(batch[name] for name in inputs))["params"]

    def init(key: jax.Array, batch: Batch) -> Any:
        return nn.meta.unbox(boxed(key, batch))

    def names(batch: Batch) -> Any:
        shapes = jax.eval_shape(boxed, jax.random.key(0), batch)
        return nn.get_partition_spec(shapes)

    def apply(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        args = (batch[name] for name in inputs)
        logits, sown = module.apply({"params": params}, *args, mutable=["losses"])
        # Layers in a loop sow one array with an entry for each.
        penalties = (jnp.sum(leaf) for leaf in jax.tree.leaves(sown))
        return logits, sum(penalties, start=jnp.float32(0.0))

    return Network(init=init, apply=apply, random_batch=random_batch, param_names=names)
