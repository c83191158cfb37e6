"""What the example programs share: arrays, losses and a training step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def normal(seed: int, *shape: int, scale: float = 0.3) -> jax.Array:
    """Random float32 numbers."""
    return jax.random.normal(jax.random.key(seed), shape) * scale


def integers(seed: int, high: int, *shape: int) -> jax.Array:
    """Random int32 numbers in ``[0, high)``."""
    return jax.random.randint(jax.random.key(seed), shape, 0, high)


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
