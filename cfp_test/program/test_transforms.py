"""Fourier transforms: whole on each device where XLA does not partition them."""

import re

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.profiling.hlo import collectives_in

ROWS, TIMES, WIDTH = 64, 64, 32


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def filtered(params, x):
    """Trains a filter over times between two products."""

    def loss(params):
        seen = jnp.fft.rfft(jnp.tanh(x @ params["in"]), axis=1) * params["filter"]
        made = jnp.fft.irfft(seen, n=TIMES, axis=1)
        return ((made @ params["out"] - x) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


SQUARE = of(WIDTH, WIDTH)
PARAMS = {"in": SQUARE, "filter": of(TIMES // 2 + 1, 1), "out": SQUARE}
ARGS = PARAMS, of(ROWS, TIMES, WIDTH)


@pytest.mark.parametrize("preset", [None, "data_parallel"])
def test_a_transform_is_whole_in_the_plan_where_it_is_in_the_program(preset):
    plan = cfp.plan(
        filtered,
        *ARGS,
        mesh=jax.make_mesh((4,), ("x",)),
        donate_argnums=0,
        preset=preset,
        settings=cfp.PlannerSettings(race=False),
        quiet=True,
    )
    text = plan.compile(filtered, *ARGS, donate_argnums=0).as_text()
    shapes = re.findall(r"= \w+\[(\d+),.*?\]\S* fft\(", text)
    assert len(shapes) == 4 and len(set(shapes)) == 1
    is_whole = shapes[0] == str(ROWS)
    named = [one for one in plan.replicated_ops if "fft" in one]
    assert bool(named) == is_whole
    if is_whole and preset is None:
        assert all("ms by estimate" in one for one in named)
    gathered = [one for one in collectives_in(text) if one.kind == "all-gather"]
    # What enters the first transform, and the gradient that enters the last one.
    expected = [4 * ROWS * TIMES * WIDTH] * 2 if is_whole else []
    assert [one.bytes for one in gathered for _ in range(one.count)] == expected
