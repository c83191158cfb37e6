"""Branches, loops, custom derivatives, callbacks and manual sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from cfp_test.programs.common import normal, on_mesh, squares, training


def cond_step():
    params = {"a": normal(0, 16, 32), "b": normal(1, 32, 16)}

    def loss(p, batch):
        x = batch["x"] @ p["a"]
        x = jax.lax.cond(batch["flag"] > 0, jnp.tanh, lambda y: y * jnp.exp(-y * y), x)
        x = x @ p["b"]
        return squares(
            jax.lax.switch(batch["flag"], [jnp.sin, lambda y: y, jnp.cos], x)
        )

    return training(loss, params, {"x": normal(2, 16, 16), "flag": jnp.int32(2)})


def empty_branches_step():
    """Branches and a loop that pass on what they are given, and compute nothing."""

    def train_step(online, target, count, batch):
        def loss(p):
            best = (batch["next"] @ target["w"]).max(axis=1)
            return squares((batch["x"] @ p["w"]).max(axis=1), 0.9 * best)

        online = jax.tree.map(lambda p, g: p - g, online, jax.grad(loss)(online))
        target = optax.periodic_update(online, target, count, 2)
        turns = jax.lax.while_loop(
            lambda c: c[0], lambda c: (c[1], c[0]), (True, False)
        )
        return online, target, count + 1, turns

    batch = {"x": normal(2, 8, 16), "next": normal(3, 8, 16)}
    online, target = {"w": normal(0, 16, 8)}, {"w": normal(1, 16, 8)}
    return train_step, (online, target, jnp.int32(1), batch)


def while_step():
    """Iterates to a fixed point; the number of steps depends on the data."""

    def train_step(w, x):
        def body(carry):
            y, _, i = carry
            z = jnp.tanh(y @ w + x)
            return z, jnp.max(jnp.abs(z - y)), i + 1

        def unfinished(carry):
            return (carry[1] > 1e-3) & (carry[2] < 20)

        y, gap, count = jax.lax.while_loop(
            unfinished, body, (jnp.zeros_like(x), jnp.float32(1), 0)
        )
        return w + 0.1 * (x.T @ y), gap, count

    return train_step, (normal(0, 16, 16, scale=0.1), normal(1, 8, 16))


def ensemble_step():
    """vmap over models: every contraction has a batch factor for the members."""
    params = {"a": normal(0, 4, 16, 32), "b": normal(1, 4, 32, 8)}

    def loss(p, x):
        def one(p):
            return squares(jnp.tanh(x @ p["a"]) @ p["b"])

        return jax.vmap(one)(p).sum()

    return training(loss, params, normal(2, 16, 16))


@on_mesh(x=4)
def named_computation_step():
    """The user's own sharding constraint and named scopes, which planning removes."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, P("x"))

    def loss(p, x):
        with jax.named_scope("first"):
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ p["a"]), rows)
        with jax.named_scope("second"):
            return squares(x @ p["b"])

    params = {"a": normal(0, 16, 32), "b": normal(1, 32, 16)}
    return training(loss, params, normal(2, 16, 16))


@on_mesh(x=4)
def shard_map_step():
    """A region that is sharded by hand, with a collective of its own."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P())
    )
    def by_hand(x, w):
        y = jnp.tanh(x @ w)
        return y, jax.lax.psum(y.sum(0), "x")

    def loss(p, x):
        y, total = by_hand(x @ p["a"], p["w"])
        return squares(y @ p["b"]) + squares(total)

    params = {"a": normal(0, 16, 16), "w": normal(1, 16, 16), "b": normal(2, 16, 16)}
    return training(loss, params, normal(3, 16, 16))


@on_mesh(x=2, y=2)
def partly_manual_step():
    """shard_map over one of two axes; the other stays with the compiler."""
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("x"), P()),
        out_specs=P("x"),
        axis_names={"x"},
    )
    def by_hand(x, w):
        return jnp.tanh(x @ w) - jax.lax.pmean(x.mean(0), "x")

    def loss(p, x):
        return squares(by_hand(x @ p["a"], p["w"]) @ p["b"])

    params = {"a": normal(0, 16, 16), "w": normal(1, 16, 16), "b": normal(2, 16, 16)}
    return training(loss, params, normal(3, 16, 16))


def debug_callback_step():
    params = {"a": normal(0, 16, 32), "b": normal(1, 32, 16)}
    seen = []

    def loss(p, x):
        x = jnp.tanh(x @ p["a"])
        jax.debug.callback(lambda v: seen.append(v), x.sum())
        return squares(x @ p["b"])

    return training(loss, params, normal(2, 16, 16))


def pure_callback_step():
    """A value that the host computes."""

    def train_step(w, x):
        y = x @ w
        shape = jax.ShapeDtypeStruct((16,), jnp.float32)
        host = jax.pure_callback(lambda v: np.sin(v), shape, y.sum(0))
        return w + 0.1 * x.T @ (y * host), y

    return train_step, (normal(0, 16, 16), normal(1, 8, 16))


def io_callback_step():
    """Effects of the host, in order and not."""
    seen = []

    def train_step(w, x):
        y = x @ w
        io_callback(lambda v: seen.append(v), None, y.sum())
        return w + 0.1 * x.T @ y, y

    return train_step, (normal(0, 16, 16), normal(1, 8, 16))
