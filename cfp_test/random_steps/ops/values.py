"""Elementwise ops, reductions, normalisations, windows and transforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from cfp_test.random_steps.ops.contracting import _windows as windows
from cfp_test.random_steps.ops.draft import Draft, Node, Shape, op, rank

_UNARY = (
    jnp.tanh,
    jnp.sin,
    lax.logistic,
    lax.erf,
    jax.nn.gelu,
    jax.nn.silu,
    jax.nn.softplus,
    lambda x: x * lax.rsqrt(1 + x * x),
    lambda x: jnp.log1p(x * x),
    lambda x: jnp.exp(-x * x),
    lambda x: jnp.arctan2(x, 1 + x * x),
)
_BINARY = (
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x - y,
    lambda x, y: x / (1 + y * y),
    lambda x, y: jnp.maximum(x, 1.1 * y + 0.01),
    lambda x, y: jnp.where(x > y, x, y + jnp.sin(x - y)),
)
_REDUCTIONS = (
    lambda x, dims, n: x.sum(dims) / n**0.5,
    lambda x, dims, n: x.mean(dims),
    lambda x, dims, n: x.max(dims),
    lambda x, dims, n: x.min(dims),
    lambda x, dims, n: jax.nn.logsumexp(x, dims),
    lambda x, dims, n: jnp.prod(1 + 0.1 * jnp.tanh(x), dims),
    lambda x, dims, n: jnp.sqrt(x.var(dims) + 0.1),
)
_CUMULATIVE = (
    lambda x, dim: jnp.cumsum(x, dim) / x.shape[dim] ** 0.5,
    lambda x, dim: jnp.cumprod(1 + 0.1 * jnp.tanh(x), dim),
    lambda x, dim: lax.cummax(x, dim),
    lambda x, dim: lax.cumlogsumexp(x, dim, reverse=True),
    lambda x, dim: lax.associative_scan(lambda a, b: a * 0.9 + b * 0.5, x, axis=dim),
)


@op()
def unary(d: Draft, shape: Shape) -> Node:
    f = d.pick(_UNARY)
    return lambda e, x: f(x)


@op()
def binary(d: Draft, shape: Shape) -> Node:
    f, other = d.pick(_BINARY), d.tensor(shape)
    return lambda e, x: f(x, e[other])


@op(rank())
def scale_shift(d: Draft, shape: Shape) -> Node:
    dim = d.dim(shape)
    sizes = tuple(n if i == dim else 1 for i, n in enumerate(shape))
    scale, shift = d.weight(*sizes), d.weight(*sizes)
    return lambda e, x: x * e[scale] + e[shift]


@op()
def where_mask(d: Draft, shape: Shape) -> Node:
    """A mask from the batch, or one that the program computes."""
    other = d.tensor(shape)
    if d.flip():
        mask = d.numbers(2, *shape)
        return lambda e, x: jnp.where(e[mask] > 0, x, e[other])
    return lambda e, x: lax.select(x > 0, x, jnp.sin(x)) + 0.1 * e[other]


@op(rank(2, 4))
def triangle(d: Draft, shape: Shape) -> Node:
    shift = d.integer(-1, 1)
    return lambda e, x: jnp.tril(x, shift) + 0.1 * x


@op()
def clip(d: Draft, shape: Shape) -> Node:
    return lambda e, x: jnp.clip(x, -1.01, 1.03)


@op(rank())
def reduce(d: Draft, shape: Shape) -> Node:
    f = d.pick(_REDUCTIONS)
    dims = d.order(len(shape))[: d.integer(1, len(shape))]
    count = 1
    for dim in dims:
        count *= shape[dim]
    return lambda e, x: f(x, dims, count)


@op(rank())
def softmax(d: Draft, shape: Shape) -> Node:
    f, dim = d.pick((jax.nn.softmax, jax.nn.log_softmax)), d.dim(shape)
    return lambda e, x: f(x, axis=dim)


@op(rank())
def layer_norm(d: Draft, shape: Shape) -> Node:
    """Over one dim or several; with the mean taken off, or not."""
    dims = d.order(len(shape))[: d.integer(1, len(shape))]
    scale, centred = d.weight(shape[-1]), d.flip()

    def run(e, x):
        if centred:
            x = x - x.mean(dims, keepdims=True)
        return x * lax.rsqrt((x * x).mean(dims, keepdims=True) + 0.1) * e[scale]

    return run


@op(rank())
def cumulative(d: Draft, shape: Shape) -> Node:
    f, dim = d.pick(_CUMULATIVE), d.dim(shape)
    return lambda e, x: f(x, dim)


@op(rank(2, 4))
def reduce_window(d: Draft, shape: Shape) -> Node:
    """Pooling, over any dims."""
    moves = windows(d, shape)
    if d.flip():
        return lambda e, x: lax.reduce_window(
            x, -jnp.inf, lax.max, moves["window"], moves["strides"], moves["padding"]
        )
    return lambda e, x: (
        0.5
        * lax.reduce_window(
            x, 0.0, lax.add, moves["window"], moves["strides"], moves["padding"]
        )
    )


@op(rank())
def fft(d: Draft, shape: Shape) -> Node:
    """A filter in the frequencies of the last dim, or the spectrum itself."""
    size = shape[-1]
    if d.flip():
        return lambda e, x: jnp.abs(jnp.fft.fft(x, norm="ortho")) ** 2
    w = d.weight(size // 2 + 1)
    return lambda e, x: jnp.fft.irfft(jnp.fft.rfft(x) * (e[w] + 0.5j), n=size)
