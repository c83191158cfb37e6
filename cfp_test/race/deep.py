"""A program of many layers, of which a race leaves most out."""

import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH, BATCH = 10, 16, 8
ADAM = optax.adam(1e-3)


def step(state, x):
    def loss(params):
        made = x
        for layer in params["layers"]:
            made = made + jnp.tanh(made @ layer["up"]) @ layer["down"]
        return jnp.mean((made @ params["head"]) ** 2)

    params, memory = state
    value, gradients = jax.value_and_grad(loss)(params)
    updates, memory = ADAM.update(gradients, memory)
    return (optax.apply_updates(params, updates), memory), value


def arguments(depth=LAYERS):
    keys = iter(jax.random.split(jax.random.key(0), 99))

    def normal(*shape):
        return 0.1 * jax.random.normal(next(keys), shape)

    layers = [
        {"up": normal(WIDTH, 2 * WIDTH), "down": normal(2 * WIDTH, WIDTH)}
        for _ in range(depth)
    ]
    params = {"layers": layers, "head": normal(WIDTH, WIDTH)}
    return (params, ADAM.init(params)), normal(BATCH, WIDTH)
