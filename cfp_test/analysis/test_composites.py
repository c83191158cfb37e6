"""Composites, which run whole, with results of several ranks among what is sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.profiling.builder import Built, build
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.requests import whole_job
from cfp.settings import ConstraintLevel
from cfp_test.programs.common import normal, squares, training
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

SIZES = (("x", 4),)


def forward(x, scale):
    mean, spread = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    return (x - mean) / spread * scale, mean[..., 0], spread[..., 0], scale.sum()


def backward(x, scale, mean, spread, total, grad):
    own = (x - mean[..., None]) / spread[..., None]
    return grad * scale / spread[..., None] + 0 * total, (grad * own).sum((0, 1))


def norm():
    made, unmade = (
        jax.lax.composite(fn, f"a.{fn.__name__}") for fn in (forward, backward)
    )
    found = jax.custom_vjp(lambda x, scale: made(x, scale)[0])

    def keep(x, scale):
        y, *rest = made(x, scale)
        return y, (x, scale, *rest)

    found.defvjp(keep, lambda kept, grad: unmade(*kept, grad))
    return found


def step():
    layer = norm()

    def loss(w, x):
        return squares(
            x + jnp.tanh(layer(x @ w["in"], w["scale"]) @ w["up"]) @ w["out"]
        )

    shapes = {"in": (16, 16), "scale": (16,), "up": (16, 32), "out": (32, 16)}
    weights = {name: normal(i, *s) for i, (name, s) in enumerate(shapes.items())}
    return training(loss, weights, normal(9, 8, 4, 16))


@pytest.mark.parametrize("name", ["data_parallel", *at_night(["tensor_parallel"])])
@pytest.mark.parametrize("level", [*ConstraintLevel])
def test_they_compute_what_they_do_alone(name, level):
    fn, args = step()
    mesh, flat = make_mesh(SIZES), flatten_step(fn, args)
    program, _ = trace(flat, mesh)
    assert sum(op.kind == "composite" for op in program.ops) == 2
    analysis = analyze(program, SIZES)
    job = whole_job(analysis, presets(analysis.frame)[name], (), "test", level)
    built = build(program, mesh, job)
    assert isinstance(built, Built)
    compiled = built.compiled
    leaves = flat.flatten(args, {})
    found = compiled(*jax.device_put(leaves, list(compiled.input_shardings[0])))
    expected = jax.tree.leaves(jax.jit(flat.flat_fn)(*leaves))
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
