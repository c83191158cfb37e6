"""An axis's choices in its role are found once for sizes that have the same."""

from math import prod

import jax
import jax.numpy as jnp
import pytest

from cfp import described
from cfp.passes.pipeline import analyze_step
from cfp.presets.roles import ROLES, axis_walk
from cfp.program.step import flatten_step

BATCH, WIDTH = 16, 12


def step(params, x):
    def loss(params):
        made = x
        for up, down in params:
            made = jnp.tanh(made @ up) @ down
        return jnp.mean(made**2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def frame_of(**axes):
    layer = jnp.ones((WIDTH, 2 * WIDTH)), jnp.ones((2 * WIDTH, WIDTH))
    flat = flatten_step(step, ([layer, layer], jnp.ones((BATCH, WIDTH))))
    mesh = described(f"{prod(axes.values())}xh200", **axes)
    return analyze_step(flat, mesh).analysis.frame


@pytest.mark.parametrize("role", ROLES)
def test_a_size_does_what_it_does_alone(role):
    """Whatever other sizes were asked for before: 16 and 24 split by some of them."""
    # By 13 a batch of 16 would be padded by too much, and by 17 a width of 24.
    shared = frame_of(x=2, y=8)
    for size in (2, 8, 13, 17, 2):
        alone = frame_of(x=size)
        assert axis_walk(shared, role, size) == axis_walk(alone, role, size), size


def test_sizes_that_do_the_same_share_one_walk():
    frame = frame_of(x=2, y=8)
    walks = [axis_walk(frame, "data", size) for size in (2, 8, 2)]
    assert walks[0] is walks[1] is walks[2]
    assert any(choice.inner >= 0 for choice in walks[0])
    # Nothing here has a matrix for each of some experts.
    assert axis_walk(frame, "expert", 4) is walks[0]
    assert axis_walk(frame, "data", 13) != walks[0]
    assert axis_walk(frame, "tensor", 17) != axis_walk(frame, "tensor", 2)
