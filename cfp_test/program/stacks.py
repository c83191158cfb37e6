"""A stack of layers that keeps something for its backward pass."""

import jax.numpy as jnp

from cfp.analysis.segments import find_segments
from cfp.cost.memory import turning_point
from cfp.program.constrain import rematerializable
from cfp_test.programs.common import normal, squares, training


def stack_step():
    """Four layers of two products, and a head."""
    params = {
        "layers": [
            {"a": normal(2 * i, 16, 32), "b": normal(2 * i + 1, 32, 16)}
            for i in range(4)
        ],
        "head": normal(20, 16, 8),
    }

    def loss(p, x):
        for w in p["layers"]:
            x = x + jnp.tanh(x @ w["a"]) @ w["b"]
        return squares(x @ p["head"])

    return training(loss, params, normal(21, 8, 16))


def rematerializations(frame):
    """Rematerializes each segment that can be."""
    turn = turning_point(frame)
    found = [rematerializable(frame.program, s.ops, turn) for s in find_segments(frame)]
    return tuple(one for one in found if one is not None)
