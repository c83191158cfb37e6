"""Steps on Equinox modules whose leaves are not all arrays, for several tests."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

TX = optax.adam(1e-2)


class Net(eqx.Module):
    """With a function, a number and a bool among its leaves."""

    up: eqx.nn.Linear
    drop: eqx.nn.Dropout
    down: eqx.nn.Linear
    act: Any
    scale: float

    def __init__(self, key: jax.Array) -> None:
        one, two = jax.random.split(key)
        self.up = eqx.nn.Linear(16, 32, key=one)
        self.drop = eqx.nn.Dropout(0.25)
        self.down = eqx.nn.Linear(32, 16, key=two)
        self.act = jax.nn.relu
        self.scale = 0.5

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return self.scale * self.down(self.drop(self.act(self.up(x)), key=key))


def train_step(net: Net, opt: Any, x: jax.Array, key: jax.Array) -> Any:
    """A step of Adam."""

    def loss_fn(net: Net) -> jax.Array:
        return jnp.mean((jax.vmap(net)(x, jax.random.split(key, len(x))) - x) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(net)
    updates, opt = TX.update(grads, opt, eqx.filter(net, eqx.is_inexact_array))
    return eqx.apply_updates(net, updates), opt, {"loss": loss}


def training() -> tuple[Any, tuple[Any, ...]]:
    """The step and its arguments, as a target of the command line."""
    net = Net(jax.random.key(0))
    opt = TX.init(eqx.filter(net, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(1), (8, 16))
    return train_step, (net, opt, x, jax.random.key(2))


def update_only(net: Net, x: jax.Array) -> Net:
    """A step whose whole result is its state."""

    def loss_fn(net: Net) -> jax.Array:
        keys = jax.random.split(jax.random.key(0), len(x))
        return jnp.mean((jax.vmap(net)(x, keys) - x) ** 2)

    grads = eqx.filter_grad(loss_fn)(net)
    return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grads))


def updating() -> tuple[Any, tuple[Any, ...]]:
    """A step that returns a module and nothing else."""
    _, (net, _, x, _) = training()
    return update_only, (net, x)


def listing() -> tuple[Any, tuple[Any, ...]]:
    """A step that returns arrays of a module's shapes, and no module."""

    def arrays_only(net: Net, x: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(eqx.filter(update_only(net, x), eqx.is_array))

    return arrays_only, updating()[1]


def widening() -> tuple[Any, tuple[Any, ...]]:
    """A step whose state comes back in float32, two leaves of it from bfloat16."""

    def wide(state: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return {name: value + x.sum() for name, value in state.items()}

    narrow = jnp.zeros((4, 8), jnp.bfloat16)
    return wide, ({"a": jnp.zeros((4, 8)), "b": narrow, "c": narrow}, jnp.ones(4))
