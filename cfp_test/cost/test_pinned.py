"""Estimates with pins: a pin takes choices away, so it makes no plan faster."""

from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P

import cfp
from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.cost.costs import estimate_segment, segment_candidate
from cfp.cost.terms import Terms
from cfp.passes import PlanOptions, analyze_step, estimate
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.search.made_up import rates_of
from cfp_test.support.checking import make_mesh
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


def frozen(scan, stored, cast):
    """Layers with trained scales, and weights that the step casts and returns not."""

    def loss(scales, weights, x):
        def layer(x, one):
            return jnp.tanh(x @ one[0].astype(cast)) * one[1].astype(cast), None

        layers = (weights, scales)
        for one in [] if scan else zip(*layers, strict=True):
            x, _ = layer(x, one)
        x = jax.lax.scan(layer, x, layers)[0] if scan else x
        return jnp.square(x.astype(jnp.float32)).mean()

    def step(scales, weights, x):
        gradients = jax.grad(loss)(scales, weights, x)
        return jax.tree.map(jnp.subtract, scales, gradients)

    def stack(*shape, dtype):
        of = jax.ShapeDtypeStruct
        return of((3, *shape), dtype) if scan else [of(shape, dtype)] * 3

    weights = stack(1024, 1024, dtype=stored)
    x = jax.ShapeDtypeStruct((512, 1024), cast)
    return step, (stack(1024, dtype=jnp.float32), weights, x)


@pytest.mark.parametrize("scan", [False, True])
def test_a_pinned_parameter_without_update_is_gathered_as_it_is_cast(scan):
    """The compiled program does so, as for parameters with updates."""
    sizes = (("x", 4),)

    def gather_ms(stored, cast):
        step, args = frozen(scan, stored, cast)
        flat, found = flatten_step(step, args), []
        program, _ = trace(flat, make_mesh(sizes))
        names = [i for i, name in enumerate(flat.arg_names) if "weights" in name]
        for pins in (None, dict.fromkeys(names, ((),) * scan + (("x",), ()))):
            analysis = analyze(program, sizes, pins)
            terms = Terms(analysis.frame, rates_of(sizes))
            choice = presets(analysis.frame)["data_parallel"]
            found.append(
                sum(
                    estimate_segment(terms, segment, None).total_ms(
                        segment_candidate(analysis, segment.index, choice)
                    )
                    for segment in analysis.segments
                )
            )
        return found[1] - found[0]

    narrow = gather_ms(jnp.bfloat16, jnp.bfloat16)
    assert gather_ms(jnp.float32, jnp.bfloat16) == pytest.approx(narrow, rel=1e-6)
    assert gather_ms(jnp.float32, jnp.float32) > 1.2 * narrow > 0.0


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
