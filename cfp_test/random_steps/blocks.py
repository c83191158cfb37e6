"""Kinds of blocks that random steps have beside those of `ops/`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from cfp_test.programs.kernels import differentiable, kernel
from cfp_test.random_steps.ops.draft import (
    MAX_ELEMENTS,
    OPS,
    SHAPES,
    Draft,
    Maker,
    Node,
    Shape,
    rank,
    taken_by,
)

Applies = Callable[[Shape], bool]

# Shapes that a block's input is led to where the block does not take it as it is.
ALL_SHAPES = (*SHAPES, (4, 8, 4, 8), (8, 16, 8))
# The prefix of a result in the environment that takes the place of a state's leaf.
NEXT = "next "

_OWN: dict[str, tuple[Maker, Applies]] = {}
# Kinds that compute in less than float32 somewhere.
NARROW = frozenset({"narrow_product", "narrow_values"})


def _own(applies: Applies = lambda shape: True) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        _OWN[maker.__name__] = (maker, applies)
        return maker

    return register


def _fits(low: int, high: int, most: int = MAX_ELEMENTS) -> Applies:
    return lambda shape: low <= len(shape) <= high and prod(shape) <= most


@_own(rank(2, 4))
def batch_norm(d: Draft, shape: Shape) -> Node:
    scale, shift = d.weight(shape[-1]), d.weight(shape[-1])
    dims = tuple(range(len(shape) - 1))

    def run(e, x):
        mean, var = x.mean(dims), x.var(dims)
        return (x - mean) * lax.rsqrt(var + 0.1) * e[scale] + e[shift]

    return run


@_own(_fits(3, 4))
def conv_transpose(d: Draft, shape: Shape) -> Node:
    """A convolution of a dilated input."""
    spatial = len(shape) - 2
    window = tuple(d.integer(1, 3) for _ in range(spatial))
    strides = tuple(d.integer(1, 2) for _ in range(spatial))
    out = d.integer(1, 8)
    w = d.weight(*window, shape[-1], out, scale=(prod(window) * shape[-1]) ** -0.5)
    dims = ("NWC", "WIO", "NWC") if spatial == 1 else ("NHWC", "HWIO", "NHWC")
    padding = d.pick(("SAME", "VALID"))
    return lambda e, x: lax.conv_transpose(
        x, e[w], strides, padding, dimension_numbers=dims
    )


@_own(_fits(3, 4))
def depthwise(d: Draft, shape: Shape) -> Node:
    """A convolution with a group for each channel, or for each two of them."""
    channels, spatial = shape[-1], len(shape) - 2
    groups = channels // 2 if channels % 2 == 0 and d.flip() else channels
    window = tuple(d.integer(1, 3) for _ in range(spatial))
    w = d.weight(*window, channels // groups, groups * d.integer(1, 2), scale=0.4)
    dims = ("NWC", "WIO", "NWC") if spatial == 1 else ("NHWC", "HWIO", "NHWC")
    dilation = tuple(d.integer(1, 2) for _ in window)
    return lambda e, x: lax.conv_general_dilated(
        x,
        e[w],
        (1,) * spatial,
        "SAME",
        rhs_dilation=dilation,
        dimension_numbers=dims,
        feature_group_count=groups,
    )


@_own(rank(2, 3))
def gated_scan(d: Draft, shape: Shape) -> Node:
    """A recurrence with gates along one dim, forwards or backwards."""
    dim, reverse = d.integer(0, len(shape) - 1), d.flip()
    inner = tuple(n for i, n in enumerate(shape) if i != dim)
    w = d.weight(inner[-1], 2 * inner[-1], scale=inner[-1] ** -0.5)

    def run(e, x):
        def step(h, row):
            gate, value = jnp.split(h @ e[w], 2, axis=-1)
            h = jax.nn.sigmoid(gate) * h + jnp.tanh(value + row)
            return h, h

        start = jnp.zeros(inner) + 0.1
        rows = lax.scan(step, start, jnp.moveaxis(x, dim, 0), reverse=reverse)[1]
        return jnp.moveaxis(rows, 0, dim)

    return run


@_own(rank(2, 3))
def cache_update(d: Draft, shape: Shape) -> Node:
    """Writes rows into a state at a position of the batch, and reads all of it."""
    dim = d.integer(0, len(shape) - 1)
    size = 1 if d.flip() else d.integer(1, shape[dim])
    length = max(shape[dim], 8)
    whole = (*shape[:dim], length, *shape[dim + 1 :])
    name, place = d.weight(*whole), d.numbers(length, *())

    def run(e, x):
        rows = lax.slice_in_dim(x, 0, size, axis=dim)
        old = lax.stop_gradient(e[name])
        written = lax.dynamic_update_slice_in_dim(old, rows, e[place], dim)
        e[NEXT + name] = written
        return x + jnp.tanh(written).mean(dim, keepdims=True)

    return run


@_own(rank(2, 4))
def scatter_many(d: Draft, shape: Shape) -> Node:
    """Rows taken off others, or the largest or smallest kept, by indices."""
    rows = d.integer(2, 12)
    ids, base = d.numbers(rows, shape[0]), d.weight(rows, *shape[1:])
    way = d.pick(("max", "min", "subtract"))

    def run(e, x):
        return getattr(e[base].at[e[ids]], way)(x + 0.01)

    return run


@_own(rank(2, 3))
def cross_entropy(d: Draft, shape: Shape) -> Node:
    """A loss for each row over a vocabulary, by integer labels."""
    vocabulary = d.pick((8, 12, 16, 32))
    w = d.weight(shape[-1], vocabulary, scale=shape[-1] ** -0.5)
    labels = d.numbers(vocabulary, *shape[:-1])
    return lambda e, x: optax.softmax_cross_entropy_with_integer_labels(
        x @ e[w], e[labels]
    )


@_own(rank(2, 3))
def routed(d: Draft, shape: Shape) -> Node:
    """Experts, each for the tokens that its gate takes."""
    hidden, experts = shape[-1], d.pick((2, 4, 8))
    gate = d.weight(hidden, experts, scale=1.0)
    w = d.weight(experts, hidden, hidden, scale=hidden**-0.5)

    def run(e, x):
        scores = jax.nn.softmax(x @ e[gate])
        best = jax.nn.one_hot(jnp.argmax(scores, -1), experts)
        share = (scores * best).sum(-1, keepdims=True)
        return share * jnp.einsum("...h,...e,ehk->...k", jnp.tanh(x), best, e[w])

    return run


@_own(rank())
def narrow_product(d: Draft, shape: Shape) -> Node:
    """A product of bfloat16 with results in float32."""
    w = d.weight(shape[-1], d.integer(1, 16), scale=shape[-1] ** -0.5)
    return lambda e, x: jnp.matmul(
        x.astype(jnp.bfloat16),
        e[w].astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )


@_own()
def narrow_values(d: Draft, shape: Shape) -> Node:
    """Values in another float type for a while."""
    kind = d.pick((jnp.bfloat16, jnp.float16))
    other = d.weight(*shape)
    return lambda e, x: (jnp.tanh(x).astype(kind) * e[other].astype(kind)).astype(
        jnp.float32
    )


@_own()
def integer_casts(d: Draft, shape: Shape) -> Node:
    """Integers and bools of the batch, as floats and back."""
    ids = d.numbers(16, *shape)
    kind = d.pick((jnp.int8, jnp.uint8, jnp.int16))

    def run(e, x):
        small = e[ids].astype(kind)
        odd = (small % 2).astype(bool)
        return jnp.where(odd, x, -x) * small.astype(jnp.float32) / 16

    return run


@_own(rank(1, 3))
def kernel_rows(d: Draft, shape: Shape) -> Node:
    """A custom_partitioning op over rows with a rule, and a backward pass."""
    letters = "abcd"[: len(shape)]

    def compute(x, w):
        return x * w / jnp.sqrt(1 + (x * x).sum(-1, keepdims=True))

    def partition(mesh, args, result):
        spec = (*args[0].sharding.spec, *[None] * len(shape))[: len(shape) - 1]
        rows = NamedSharding(mesh, PartitionSpec(*spec, None))
        return mesh, compute, rows, (rows, NamedSharding(mesh, PartitionSpec(None)))

    @custom_partitioning
    def scaled_rows(x, w):
        return compute(x, w)

    scaled_rows.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule=(f"{' '.join(letters)}, {letters[-1]} -> {' '.join(letters)}"),
        need_replication_factors=(letters[-1],),
    )

    @jax.custom_vjp
    def call(x, w):
        return scaled_rows(x, w)

    call.defvjp(
        lambda x, w: (scaled_rows(x, w), (x, w)),
        lambda saved, g: jax.vjp(compute, *saved)[1](g),
    )
    w = d.weight(shape[-1])
    return lambda e, x: call(x, e[w])


@_own(lambda shape: len(shape) == 4 and shape[1] * prod(shape) <= 8 * MAX_ELEMENTS)
def kernel_attention(d: Draft, shape: Shape) -> Node:
    """Attention as a custom_partitioning op, of one of the ways to say how."""
    attend = differentiable(kernel(d.pick(("rule", "strict"))))
    w = d.weight(shape[-1], shape[-1], scale=shape[-1] ** -0.5)
    return lambda e, x: attend(x, jnp.sin(x), x @ e[w])


def makers() -> dict[str, tuple[Maker, Applies]]:
    """Every kind of block: what draws it, and what shapes it takes."""
    return {kind: (OPS[kind], taken_by(kind)) for kind in OPS} | _OWN
