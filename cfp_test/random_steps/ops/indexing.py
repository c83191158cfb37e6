"""Gathers, scatters, sorting, integers and random numbers."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from cfp_test.random_steps.ops.draft import MAX_ELEMENTS, Draft, Node, Shape, op, rank


@op(rank())
def embedding(d: Draft, shape: Shape) -> Node:
    """Rows of a table, by integers that are computed first."""
    rows = d.size(shape[-1])
    table, ids = d.weight(rows, shape[-1]), d.numbers(64, *shape[:-1])
    f = d.pick(
        (
            lambda i: i % rows,
            lambda i: (i * 5 + 3) % rows,
            lambda i: ((i ^ 9) >> 1) % rows,
            lambda i: lax.population_count(i) % rows,
            lambda i: jnp.clip(i - 7, 0, rows - 1),
        )
    )
    return lambda e, x: x + e[table][f(e[ids])]


@op(rank())
def take(d: Draft, shape: Shape) -> Node:
    dim = d.dim(shape)
    ids = d.numbers(shape[dim], d.size(prod(shape) // shape[dim]))
    return lambda e, x: jnp.take(x, e[ids], axis=dim)


@op(rank(2, 4))
def take_points(d: Draft, shape: Shape) -> Node:
    count = d.size(prod(shape[2:]))
    rows, columns = (d.numbers(n, count) for n in shape[:2])
    return lambda e, x: x[e[rows], e[columns]]


@op(rank())
def scatter_add(d: Draft, shape: Shape) -> Node:
    rows = d.size(prod(shape[1:]))
    base, ids = d.tensor((rows, *shape[1:])), d.numbers(rows, shape[0])
    return lambda e, x: e[base].at[e[ids]].add(x)


@op(rank())
def scatter_set(d: Draft, shape: Shape) -> Node:
    """Overwrites every second row, in an order that the batch gives."""
    count = (shape[0] + 1) // 2
    rows, shift = d.tensor((count, *shape[1:])), d.numbers(shape[0])

    def run(e, x):
        places = (jnp.arange(count) * 2 + e[shift]) % (2 * count)
        return x.at[places].set(e[rows], mode="drop", unique_indices=True)

    return run


@op(rank())
def segment_sum(d: Draft, shape: Shape) -> Node:
    count = d.size(prod(shape[1:]))
    ids = d.numbers(count, shape[0])
    return lambda e, x: jax.ops.segment_sum(x, e[ids], num_segments=count)


@op(rank())
def one_hot(d: Draft, shape: Shape) -> Node:
    """Takes the largest in each row; noise keeps rows from holding equal numbers."""
    noise = d.weight(*shape)

    def run(e, x):
        best = jnp.argmax(x + lax.stop_gradient(e[noise]), axis=-1)
        return x * (0.1 + jax.nn.one_hot(best, shape[-1]))

    return run


@op(rank())
def sort(d: Draft, shape: Shape) -> Node:
    dim, noise = d.dim(shape), d.weight(*shape)
    if d.flip():
        return lambda e, x: jnp.sort(x + e[noise], axis=dim)

    def by_key(e, x):
        keys = lax.stop_gradient(x) + e[noise]
        return lax.sort((keys, x), dimension=dim, num_keys=1)[1]

    return by_key


@op(rank())
def order_by(d: Draft, shape: Shape) -> Node:
    dim, noise = d.dim(shape), d.weight(*shape)

    def run(e, x):
        order = jnp.argsort(e[noise] + 0.1 * lax.stop_gradient(x), axis=dim)
        return jnp.take_along_axis(x, order, axis=dim)

    return run


@op(rank())
def top_k(d: Draft, shape: Shape) -> Node:
    """The largest of each row, weighted by where they stood."""
    count, noise = d.integer(1, shape[-1]), d.weight(*shape)
    w = d.weight(shape[-1])

    def run(e, x):
        largest, places = lax.top_k(x + e[noise], count)
        return largest * e[w][places]

    return run


@op()
def dropout(d: Draft, shape: Shape) -> Node:
    key = d.key()
    return lambda e, x: jnp.where(jax.random.bernoulli(e[key], 0.7, shape), x, 0.0)


@op()
def noise(d: Draft, shape: Shape) -> Node:
    key = d.key()
    draw = d.pick((jax.random.normal, jax.random.uniform))

    def run(e, x):
        first, second = jax.random.split(e[key])
        return x + draw(first, shape) * jax.random.normal(second, shape[-1:])

    return run


@op(lambda s: len(s) <= 3 and prod(s) * 4 <= MAX_ELEMENTS)
def buckets(d: Draft, shape: Shape) -> Node:
    """Counts of integers from the batch as a soft assignment to four bins."""
    ids = d.numbers(16, *shape)
    return lambda e, x: x[..., None] * (e[ids][..., None] % 4 == jnp.arange(4))
