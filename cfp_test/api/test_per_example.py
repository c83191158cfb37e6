"""Per-example gradients of convolutions (DP-SGD), planned and run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp.context import DetailedSettings
from cfp_test.support.checking import difference, make_mesh
from cfp_test.support.covering import at_night

MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}
SETTINGS = DetailedSettings(per_kind=1, in_context=False, race=False)
EXAMPLES, TAKEN, MADE = 8, 4, 8  # and features before and after
# Of one, two and three dims: input, kernel, result.
LAYOUTS = [
    ("NWC", "WIO", "NCW"),
    ("NCHW", "OIHW", "NHWC"),
    ("NDHWC", "DHWIO", "CDHWN"),
]
WAYS = ("window_strides", "rhs_dilation", "lhs_dilation")  # the last: transposed
CASES = {
    f"{len(taken) - 2}d {way}": (taken, kernel, made, way)
    for taken, kernel, made in LAYOUTS
    for way in WAYS
}


def loss(params, example):
    total = 0.0
    for name, (taken, kernel, made, way) in CASES.items():
        dims = len(taken) - 2
        options = {"window_strides": (1,) * dims, way: (2,) * dims}
        y = jax.lax.conv_general_dilated(
            jnp.expand_dims(example[name], taken.index("N")),
            params[name],
            padding=[(1, 1)] * dims,
            dimension_numbers=(taken, kernel, made),
            **options,
        )
        total += jnp.tanh(y).mean() + jnp.square(y).mean()
    return total


def clip(grads):
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)


def train_step(params, examples, key):
    """Clips each example's gradients, adds noise to their mean, and updates."""
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, examples)
    mean = jax.tree.map(lambda g: g.mean(0), jax.vmap(clip)(grads))
    noise = {
        name: 1e-3 * jax.random.normal(one, params[name].shape)
        for name, one in zip(params, jax.random.split(key, len(params)), strict=True)
    }
    new = jax.tree.map(lambda p, g, n: p - g - n, params, mean, noise)
    return new, jax.tree.map(lambda g: jnp.square(g).sum(), grads)


def arguments():
    params, examples = {}, {}
    for seed, (name, (taken, kernel, _, _)) in enumerate(CASES.items()):
        one, other = jax.random.split(jax.random.key(seed))
        sizes = {"I": TAKEN, "O": MADE, "C": TAKEN}
        shape = [sizes.get(c, 5) for c in taken.replace("N", "")]
        examples[name] = jax.random.normal(one, (EXAMPLES, *shape))
        shape = [sizes.get(c, 3) for c in kernel]
        params[name] = 0.1 * jax.random.normal(other, shape)
    return params, examples, jax.random.key(99)


@pytest.fixture(scope="module")
def expected():
    return jax.jit(train_step)(*arguments())


@pytest.mark.parametrize(
    ("preset", "mesh"),
    [
        (None, "x4"),
        *at_night(
            [(None, "x2y2"), ("data_parallel", "x4"), ("tensor_parallel", "x2y2")]
        ),
    ],
)
def test_per_example_gradients_are_those_of_one_device(mesh, preset, cache, expected):
    plan = cfp.plan(
        train_step,
        *arguments(),
        mesh=make_mesh(MESHES[mesh]),
        preset=preset,
        cache_dir=cache,
        settings=SETTINGS,
        quiet=True,
    )
    run = plan.compile(train_step, *arguments())
    found = run(*arguments())
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    far = [difference(np.asarray(a), np.asarray(b)) for a, b in pairs]
    assert max(far) < 1e-5
    sharded = {
        name
        for name, spec in zip(plan.arg_names, plan.arg_specs, strict=True)
        if any(spec)
    }
    if preset == "data_parallel":
        assert sharded == {n for n in plan.arg_names if n.startswith("examples")}
        assert all(row.strategy for row in plan.rows)
    if preset == "tensor_parallel":
        assert any(name.startswith("params") for name in sharded)
