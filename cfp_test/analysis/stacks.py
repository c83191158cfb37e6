"""Stacks of layers to leave repeats out of."""

import jax
import jax.numpy as jnp
import optax

from cfp.analysis.analyze import analyze
from cfp.program.step import flatten_step
from cfp.program.trace import trace

WIDTH, BATCH = 8, 4
KEPT = 4


def analysed(step, args, mesh):
    program, _ = trace(step if args is None else flatten_step(step, args, {}), mesh)
    return analyze(program, tuple(mesh.shape.items()))


def plain(params, x):
    for name in sorted(params["layers"], key=lambda name: int(name)):
        layer = params["layers"][name]
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return jnp.mean((x @ params["head"]) ** 2)


def trained(loss, params, optimizer):
    def step(state, x):
        params, memory = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, memory = optimizer.update(gradients, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    memory = jax.eval_shape(optimizer.init, params)
    return step, ((params, memory), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


def stack_of(loss, layers, optimizer):
    def weight(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {
        "up": weight(WIDTH, 2 * WIDTH),
        "bias": weight(2 * WIDTH),
        "down": weight(2 * WIDTH, WIDTH),
    }
    params = {
        "layers": {str(i): layer for i in range(layers)},
        "head": weight(WIDTH, WIDTH),
        "shared": weight(WIDTH),
    }
    return trained(loss, params, optimizer)


ADAM = optax.adam(1e-2)
