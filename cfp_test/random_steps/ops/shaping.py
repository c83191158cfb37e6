"""Ops that move data without computing on it."""

from __future__ import annotations

from math import prod

import jax.numpy as jnp
from jax import lax

from cfp_test.random_steps.ops.draft import MAX_ELEMENTS, Draft, Node, Shape, op, rank


def _divisors(size: int) -> list[int]:
    return [n for n in range(2, size) if size % n == 0]


def _room(shape: Shape, times: int = 2) -> bool:
    """Returns True if there is a dim, and place for it to grow."""
    return bool(shape) and prod(shape) * times <= MAX_ELEMENTS


@op(rank(2, 4))
def transpose(d: Draft, shape: Shape) -> Node:
    order = d.order(len(shape))
    return lambda e, x: jnp.transpose(x, order)


@op(lambda s: len(s) <= 3 and any(map(_divisors, s)))
def split_dim(d: Draft, shape: Shape) -> Node:
    dim = d.pick([i for i, n in enumerate(shape) if _divisors(n)])
    major = d.pick(_divisors(shape[dim]))
    target = (*shape[:dim], major, shape[dim] // major, *shape[dim + 1 :])
    return lambda e, x: x.reshape(target)


@op(rank(2, 4))
def merge_dims(d: Draft, shape: Shape) -> Node:
    dim = d.integer(0, len(shape) - 2)
    target = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    return lambda e, x: x.reshape(target)


@op(rank(2, 4))
def regroup(d: Draft, shape: Shape) -> Node:
    """A reshape that respects no dim."""
    major = d.pick(_divisors(prod(shape)) or [1])
    return lambda e, x: x.reshape(major, -1)


@op(rank(1, 3))
def new_dim(d: Draft, shape: Shape) -> Node:
    dim = d.integer(0, len(shape))
    return lambda e, x: jnp.expand_dims(x, dim)


@op(lambda s: len(s) <= 3 and _room(s))
def broadcast(d: Draft, shape: Shape) -> Node:
    count = d.size(prod(shape))
    w = d.weight(count, *(1 for _ in shape))
    return lambda e, x: jnp.broadcast_to(x, (count, *shape)) * e[w]


@op(_room)
def concatenate(d: Draft, shape: Shape) -> Node:
    dim = d.dim(shape)
    other, again = d.tensor(shape), d.flip() and _room(shape, 3)
    return lambda e, x: jnp.concatenate([x, e[other]] + [jnp.sin(x)] * again, dim)


@op(_room)
def stack(d: Draft, shape: Shape) -> Node:
    dim = d.integer(0, len(shape))
    other = d.tensor(shape)
    if len(shape) == 4:
        return lambda e, x: jnp.stack([x, e[other]], dim).sum(dim)
    return lambda e, x: jnp.stack([x, e[other]], dim)


@op(lambda s: _room(s, 4))
def pad(d: Draft, shape: Shape) -> Node:
    """At both ends and in between; negative padding cuts off."""
    dim = d.dim(shape)
    low = -1 if shape[dim] > 2 else 0
    amounts = [(0, 0, 0)] * len(shape)
    amounts[dim] = (d.integer(low, 2), d.integer(low, 2), d.integer(0, 1))
    return lambda e, x: lax.pad(x, jnp.float32(0.5), amounts)


@op(rank())
def slice_dim(d: Draft, shape: Shape) -> Node:
    dim = d.dim(shape)
    start = d.integer(0, shape[dim] - 1)
    end, stride = d.integer(start + 1, shape[dim]), d.integer(1, 3)
    return lambda e, x: lax.slice_in_dim(x, start, end, stride, dim)


@op(rank())
def dynamic_slice(d: Draft, shape: Shape) -> Node:
    dim, start = d.dim(shape), d.numbers(4)
    size = d.integer(1, shape[dim])
    return lambda e, x: lax.dynamic_slice_in_dim(x, e[start], size, dim)


@op(rank())
def dynamic_update(d: Draft, shape: Shape) -> Node:
    dim, start = d.dim(shape), d.numbers(4)
    size = d.integer(1, shape[dim])
    piece = d.tensor((*shape[:dim], size, *shape[dim + 1 :]))
    return lambda e, x: lax.dynamic_update_slice_in_dim(x, e[piece], e[start], dim)


@op(rank())
def reverse(d: Draft, shape: Shape) -> Node:
    dim = d.dim(shape)
    return lambda e, x: jnp.flip(x, dim)


@op(rank())
def roll(d: Draft, shape: Shape) -> Node:
    dim, shift = d.dim(shape), d.integer(1, 3)
    return lambda e, x: jnp.roll(x, shift, dim) + 0.1 * x


@op(_room)
def repeat(d: Draft, shape: Shape) -> Node:
    dim = d.dim(shape)
    if d.flip():
        return lambda e, x: jnp.repeat(x, 2, axis=dim)
    reps = [2 if i == dim else 1 for i in range(len(shape))]
    return lambda e, x: jnp.tile(x, reps)


@op(lambda s: any(n % 2 == 0 for n in s))
def halves(d: Draft, shape: Shape) -> Node:
    """Gated: one half of a dim times the sine of the other."""
    dim = d.pick([i for i, n in enumerate(shape) if n % 2 == 0])

    def run(e, x):
        left, right = jnp.split(x, 2, axis=dim)
        return left * jnp.sin(right)

    return run
