"""Targets for the command line's tests, good and bad."""

import jax
import jax.numpy as jnp
import numpy as np


def toy():
    """Two layers, updated by plain gradient descent."""

    def train_step(weights, x, y):
        def loss_fn(weights):
            hidden = jnp.tanh(x @ weights["up"])
            return ((hidden @ weights["down"] - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return new, {"loss": loss}

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    weights = {"up": shape(32, 64), "down": shape(64, 32)}
    return train_step, (weights, shape(16, 32), shape(16, 32))


def in_parts(microbatches=1):
    """The toy, its gradients summed over parts of the batch."""
    whole, args = toy()
    rows = args[1].shape[0]
    if rows % microbatches:
        raise ValueError(f"{rows} rows in {microbatches} parts")
    if microbatches == 1:
        return whole, args

    def train_step(weights, x, y):
        def loss_fn(weights, x, y):
            hidden = jnp.tanh(x @ weights["up"])
            return ((hidden @ weights["down"] - y) ** 2).mean() / microbatches

        def add(total, part):
            found = jax.value_and_grad(loss_fn)(weights, *part)
            return jax.tree.map(jnp.add, total, found), None

        nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
        parts = [
            data.reshape(-1, microbatches, data.shape[1]).swapaxes(0, 1)
            for data in (x, y)
        ]
        (loss, grads), _ = jax.lax.scan(add, nothing, tuple(parts))
        new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return new, {"loss": loss}

    return train_step, args


def with_static():
    """A step with a static argument and concrete arrays."""

    def train_step(weights, layers, x):
        def loss_fn(weights):
            h = x
            for _ in range(layers):
                h = jnp.tanh(h @ weights)
            return (h**2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return weights - 0.1 * grads, loss

    weights = np.eye(32, dtype=np.float32)
    return train_step, (weights, 2, np.ones((16, 32), np.float32))


def experts():
    """A mixture of experts, each token to one, by ragged products."""
    sizes = {"router": (1024, 32), "up": (32, 1024, 4096), "down": (32, 4096, 1024)}

    def loss_fn(p, x):
        expert = jnp.argmax(x @ p["router"], axis=-1)
        order = jnp.argsort(expert)
        groups = jnp.bincount(expert, length=32).astype(jnp.int32)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], p["up"], groups))
        y = jax.lax.ragged_dot(hidden, p["down"], groups)
        return ((jnp.zeros_like(x).at[order].set(y) - x) ** 2).mean()

    def train_step(weights, x):
        loss, grads = jax.value_and_grad(loss_fn)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    weights = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in sizes.items()}
    return train_step, (weights, jax.ShapeDtypeStruct((512, 1024), jnp.float32))


def half():
    """The toy in bfloat16."""
    train_step, args = toy()

    def cast(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)

    return train_step, jax.tree.map(cast, args)


def talkative():
    """Prints where a result is expected."""
    print("This is no JSON.")
    return toy()


def never_again():
    """Donates what it does not return."""
    return (lambda x: {"twice": 2 * x}), (jax.ShapeDtypeStruct((16, 16), jnp.float32),)


def needs_size(size):
    return toy(), size


def no_step():
    return 3


def raising():
    raise ValueError("no data here")


not_a_function = 3
