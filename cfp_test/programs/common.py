"""Parts that the example programs share: arrays, losses and a training step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def normal(seed: int, *shape: int, scale: float = 0.3) -> jax.Array:
    """Random float32 numbers."""
    found = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(found, jnp.float32)


def integers(seed: int, high: int, *shape: int) -> jax.Array:
    """Random int32 numbers in ``[0, high)``."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)


def initialise(init: Callable[..., Any], *args: Any) -> Any:
    """Variables of a model's shapes, made without compiling its initialisation."""
    shapes = jax.eval_shape(init, *args)
    paths, tree = jax.tree.flatten_with_path(shapes)
    found = []
    for seed, (path, leaf) in enumerate(paths):
        value = normal(seed, *leaf.shape)
        name = jax.tree_util.keystr(path)
        found.append(
            1 + value if "scale" in name else abs(value) if "var" in name else value
        )
    return jax.tree.unflatten(tree, found)


def squares(x: jax.Array, y: jax.Array | float = 0.0) -> jax.Array:
    """The mean squared difference."""
    return jnp.mean((x - y) ** 2)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of integer labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def adam() -> optax.GradientTransformation:
    """Adam with an epsilon that keeps tiny gradients from deciding by their sign."""
    return optax.adam(1e-2, eps=1e-2)


def training(
    loss: Callable[..., jax.Array],
    params: Any,
    batch: Any,
    optimizer: optax.GradientTransformation | None = None,
) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A training step of ``loss(params, batch)``, and its arguments."""
    tx = optimizer or adam()

    def train_step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, value

    return train_step, ({"params": params, "opt": tx.init(params)}, batch)


def on_mesh(**sizes: int) -> Callable[[Callable], Callable]:
    """Marks an example that names a mesh itself, and runs on no other."""

    def mark(make: Callable) -> Callable:
        make.mesh = tuple(sizes.items())
        return make

    return mark
