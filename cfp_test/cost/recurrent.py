"""A training step of a small recurrent model, mapped over examples and over time.

Its biases have sums over one dim after another, and the gradient of its table is made
in the backward pass of the first layer.
"""

from itertools import repeat

import jax
import jax.numpy as jnp

LAYERS, WIDTH, WORDS, STEPS = 3, 256, 16384, 64


def step(params, tokens):
    def carry(before, here):
        return before[0] * here[0], here[0] * before[1] + here[1]

    def layer(w, x):
        inputs = jax.vmap(lambda x: w["in"] @ x + w["bias"])(x)
        gates = jax.nn.sigmoid(jax.vmap(lambda x: w["gate"] @ x)(x))
        _, states = jax.lax.associative_scan(carry, (gates, inputs), axis=0)
        return x + jax.vmap(lambda x: w["out"] @ x)(states)

    def example(params, row):
        x = jax.vmap(lambda word: params["table"][word])(row)
        for w in params["layers"]:
            x = layer(w, x * w["scale"])
        return (x**2).mean()

    def loss(params):
        return jax.vmap(lambda row: example(params, row))(tokens).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def arguments(rows):
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    layer = dict.fromkeys(("in", "gate", "out"), shape(WIDTH, WIDTH))
    layer |= dict.fromkeys(("bias", "scale"), shape(WIDTH))
    params = {"table": shape(WORDS, WIDTH), "layers": [*repeat(layer, LAYERS)]}
    return params, jax.ShapeDtypeStruct((rows, STEPS), jnp.int32)
