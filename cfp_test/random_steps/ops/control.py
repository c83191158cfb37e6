"""Loops, branches, rematerialization, custom derivatives and manual sharding."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from cfp_test.programs.common import normal
from cfp_test.random_steps.ops.draft import Draft, Env, Node, Shape, op, rank


def _stacked(d: Draft, shape: Shape, layers: int) -> tuple[Node, list[str]]:
    """A body whose new weights are stacked, one for each layer."""
    known = set(d.weights)
    body = d.body(shape)
    own = [name for name in d.weights if name not in known]
    for name in own:
        sizes = d.weights[name].shape
        scale = float(jnp.std(d.weights[name])) if prod(sizes) > 1 else 1.0
        d.weights[name] = normal(len(d.weights) + 7, layers, *sizes, scale=scale)
    return body, own


def _checkpointed(d: Draft, body: Node) -> Node:
    policies = jax.checkpoint_policies
    policy = d.pick(
        (
            None,
            policies.dots_saveable,
            policies.dots_with_no_batch_dims_saveable,
            policies.nothing_saveable,
        )
    )
    return jax.checkpoint(body, policy=policy)


@op(nests=True)
def scan_layers(d: Draft, shape: Shape) -> Node:
    """A loop over layers, perhaps rematerialized, reversed or unrolled."""
    layers = d.integer(2, 4)
    body, own = _stacked(d, shape, layers)
    if d.flip():
        body = _checkpointed(d, body)
    reverse, unroll = d.flip(), d.integer(1, 2)

    def run(e, x):
        def step(x, layer):
            return jnp.tanh(x + body({**e, **layer}, x)), None

        stacks = {name: e[name] for name in own}
        return lax.scan(step, x, stacks, length=layers, reverse=reverse, unroll=unroll)[
            0
        ]

    return run


def _recurrent(d: Draft, shape: Shape) -> Node:
    body = d.body(shape[1:])
    reverse = d.flip()

    def run(e: Env, x: jax.Array) -> jax.Array:
        def step(h, row):
            h = jnp.tanh(row + 0.5 * body(e, h))
            return h, h * row

        last, rows = lax.scan(step, jnp.zeros(shape[1:]), x, reverse=reverse)
        return rows + 0.1 * last

    return run


@op(rank(1, 4), nests=True)
def scan_rows(d: Draft, shape: Shape) -> Node:
    """A recurrence along the first dim."""
    return _recurrent(d, shape)


@op(rank(1, 4), nests=True)
def nested_scan(d: Draft, shape: Shape) -> Node:
    """A recurrence in every layer of a loop over layers."""
    known = set(d.weights)
    inner = _recurrent(d, shape)
    own = [name for name in d.weights if name not in known]
    for name in own:
        d.weights[name] = jnp.stack([d.weights[name], 0.5 * d.weights[name]])

    def run(e, x):
        stacks = {name: e[name] for name in own}
        return lax.scan(
            lambda x, layer: (jnp.tanh(inner({**e, **layer}, x)), None),
            x,
            stacks,
            length=2,
        )[0]

    return run


@op(rank(2, 4), nests=True)
def map_rows(d: Draft, shape: Shape) -> Node:
    """lax.map or vmap over the first dim."""
    body, loop = d.body(shape[1:]), d.flip()
    if loop:
        return lambda e, x: lax.map(lambda row: body(e, row), x)
    return lambda e, x: jax.vmap(lambda row: body(e, row))(x)


@op(nests=True)
def remat(d: Draft, shape: Shape) -> Node:
    body = _checkpointed(d, d.body(shape))
    return lambda e, x: x + body(e, x)


@op(nests=True)
def cond(d: Draft, shape: Shape) -> Node:
    flag = d.numbers(2)
    bodies = [d.body(shape) for _ in range(2)]
    return lambda e, x: lax.cond(
        e[flag] > 0, *(lambda x, b=b: b(e, x) for b in bodies), x
    )


@op(nests=True)
def switch(d: Draft, shape: Shape) -> Node:
    """Three ways: through ops, through other ops, unchanged."""
    number, bodies = d.numbers(3), [d.body(shape) for _ in range(2)]
    branches = [*bodies, lambda e, x: x]
    return lambda e, x: lax.switch(
        e[number], [lambda x, b=b: b(e, x) for b in branches], x
    )


@op(nests=True)
def fori(d: Draft, shape: Shape) -> Node:
    body, count = d.body(shape), d.integer(2, 3)
    return lambda e, x: lax.fori_loop(
        0, count, lambda i, y: 0.7 * y + 0.3 * body(e, y) + 0.01 * i, x
    )


@op(nests=True)
def while_loop(d: Draft, shape: Shape) -> Node:
    """As often as the batch says; no gradient passes."""
    body, count = d.body(shape), d.numbers(4)

    def run(e, x):
        fixed = {name: lax.stop_gradient(value) for name, value in e.items()}
        _, y = lax.while_loop(
            lambda carry: carry[0] < e[count],
            lambda carry: (carry[0] + 1, jnp.tanh(body(fixed, carry[1]))),
            (jnp.int32(0), lax.stop_gradient(x)),
        )
        return x + y

    return run


@op(rank(1, 4))
def custom_vjp(d: Draft, shape: Shape) -> Node:
    """A dense layer with a derivative that is written by hand."""
    n = d.size(prod(shape[:-1]))
    w = d.weight(shape[-1], n, scale=shape[-1] ** -0.5)

    @jax.custom_vjp
    def project(w, x):
        return jnp.tanh(x @ w)

    def forward(w, x):
        y = project(w, x)
        return y, (w, x, y)

    def backward(saved, dy):
        w, x, y = saved
        dz = 0.5 * dy * (1 - y * y)
        rows = x.reshape(-1, shape[-1])
        return rows.T @ dz.reshape(-1, n), dz @ w.T

    project.defvjp(forward, backward)
    return lambda e, x: project(e[w], x)


@op()
def custom_jvp(d: Draft, shape: Shape) -> Node:
    @jax.custom_jvp
    def soft(x, y):
        return jnp.log1p(jnp.exp(x)) * jnp.cos(y)

    @soft.defjvp
    def _soft_jvp(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        return soft(x, y), jax.nn.sigmoid(x) * jnp.cos(y) * dx - dy * jnp.sin(y)

    other = d.tensor(shape)
    return lambda e, x: soft(x, e[other])


@op(nests=True)
def jit_twice(d: Draft, shape: Shape) -> Node:
    """One function called twice, under a name."""
    body = d.body(shape)

    @jax.jit
    def named(e, x):
        with jax.named_scope("layer"):
            return jnp.sin(body(e, x))

    return lambda e, x: named(e, x + named(e, x))


@op()
def barrier(d: Draft, shape: Shape) -> Node:
    other = d.tensor(shape)

    def run(e, x):
        x, y = lax.optimization_barrier((x, e[other]))
        return x * y

    return run


@op()
def stop_gradient(d: Draft, shape: Shape) -> Node:
    return lambda e, x: x * lax.stop_gradient(jnp.sin(x))


@op(lambda s: any(n % 4 == 0 for n in s))
def shard_map(d: Draft, shape: Shape) -> Node:
    """A region sharded by hand over an axis of the mesh, or over all of them."""
    dim = d.pick([i for i, n in enumerate(shape) if n % 4 == 0])
    able = [n for n, size in d.mesh.shape.items() if shape[dim] % size == 0]
    if not able:
        return lambda e, x: x
    name = able[0]
    spec = P(*(name if i == dim else None for i in range(len(shape))))
    w = d.weight(*(1 if i == dim else n for i, n in enumerate(shape)))
    size = d.mesh.shape[name]
    names = {name} if d.flip() else set(d.mesh.axis_names)
    collective = d.pick(
        (
            lambda x: lax.psum(x, name) / size,
            lambda x: x - lax.pmean(x, name),
            lambda x: lax.ppermute(x, name, [(i, (i + 1) % size) for i in range(size)]),
            lambda x: x * lax.axis_index(name),
            lambda x: lax.all_gather(x, name).mean(0),
        )
    )

    def by_hand(x, w):
        return jnp.tanh(x * w) + 0.5 * collective(x)

    mapped = jax.shard_map(
        by_hand,
        mesh=d.mesh,
        in_specs=(spec, P()),
        out_specs=spec,
        axis_names=names,
        check_vma=False,
    )
    return lambda e, x: mapped(x, e[w])
