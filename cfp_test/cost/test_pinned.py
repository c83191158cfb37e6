"""Estimates with pins: a pin takes choices away, so it makes no plan faster."""

from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P

import cfp
from cfp.passes import PlanOptions, analyze_step, estimate
from cfp_test.support.covering import at_night


def updated(loss, optimizer, state, *batch):
    gradients = jax.grad(loss)(state["params"], *batch)
    changes, moments = optimizer.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], changes), "opt": moments}


def tied():
    """A table that is read twice, weights in bfloat16, biases and moments."""
    optimizer, shapes = optax.adam(1e-3), {"table": (128, 32), "up": (32, 64)}
    shapes |= {"bias": (64,), "down": (64, 32), "gain": (32,)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def loss(params, tokens):
        p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        x = p["table"][tokens] * p["gain"]
        x += jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]
        return jnp.square((x @ p["table"].T).astype(jnp.float32)).mean()

    def step(state, tokens):
        return updated(loss, optimizer, state, tokens)

    state = {"params": params, "opt": optimizer.init(params)}
    return step, (state, jnp.zeros((16, 8), jnp.int32))


def scanned():
    """Stacked layers in a loop, and a head behind it."""
    optimizer, shapes = optax.sgd(0.1), {"up": (3, 64, 128), "down": (3, 128, 64)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    params["head"] = jnp.ones((64, 16))

    def loss(params, x):
        def layer(x, p):
            return x + jnp.tanh(x @ p["up"]) @ p["down"], None

        x, _ = jax.lax.scan(layer, x, {name: params[name] for name in shapes})
        return jnp.square(x @ params["head"]).mean()

    def step(state, x):
        return updated(loss, optimizer, state, x)

    return step, ({"params": params, "opt": optimizer.init(params)}, jnp.ones((16, 64)))


def every_pin(shape, mesh):
    """All shardings of a leaf: each axis along a dim that it divides, or along none."""
    for places in product((None, *range(len(shape))), repeat=len(mesh)):
        pairs = [*zip(mesh, places, strict=True)]
        dims = [tuple(n for n, at in pairs if at == d) for d in range(len(shape))]
        ways = (prod(mesh[name] for name in names) for names in dims)
        if not any(size % n for size, n in zip(shape, ways, strict=True)):
            yield P(*(names or None for names in dims))


@pytest.mark.parametrize(
    "program, gathered", [(tied, {"params", "opt", "tokens"}), (scanned, {"params"})]
)
@pytest.mark.parametrize("described", [False, *at_night([True])])
def test_no_pin_makes_a_plan_faster(program, gathered, described, tmp_path):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    mesh = cfp.described("2x2xh100", x=2, y=2) if described else mesh
    options = PlanOptions(donate_argnums=0, cache_dir=tmp_path)
    step = options.flatten(*program(), {})
    found, dear = {}, set()
    with options.context(mesh) as context:

        def priced(pins):
            return estimate(context, analyze_step(step, mesh, pins).analysis).time_ms

        free_ms = priced(None)
        for name, aval in zip(step.arg_names, step.avals, strict=True):
            for spec in every_pin(aval.shape, mesh.shape):
                found[name, spec] = priced({name: spec})
                if found[name, spec] > 1.001 * free_ms:
                    dear |= {*name.split("/")}
    assert min(found.values()) >= (1.0 - 1e-9) * free_ms, (free_ms, found)
    assert dear >= gathered
