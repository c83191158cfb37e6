"""Functions of the host in a planned step: called, named, and heard when they raise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import cfp


class TooLargeError(Exception):
    """Exception that the user's own function raises."""


def checked(value):
    if value > 1e6:
        raise TooLargeError(f"got {float(value)}")
    return np.float32(value)


SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
CALLS = {
    "pure_callback": lambda v: jax.pure_callback(checked, SCALAR, v),
    "io_callback": lambda v: io_callback(checked, SCALAR, v),
    "debug_callback": lambda v: [jax.debug.callback(checked, v), v][1],
    "in a loop": lambda v: jax.lax.scan(
        lambda c, _: (jax.pure_callback(checked, SCALAR, c), None), v, length=2
    )[0],
    "in a branch": lambda v: jax.lax.cond(
        v > 0, lambda c: jax.pure_callback(checked, SCALAR, c), lambda c: c, v
    ),
}


@pytest.fixture(scope="module")
def how(tmp_path_factory):
    return {
        "mesh": jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]),
        "preset": "data_parallel",
        "cache_dir": tmp_path_factory.mktemp("cache"),
        "settings": cfp.PlannerSettings(race=False),
    }


@pytest.mark.parametrize("name", CALLS)
def test_an_exception_ends_the_step_and_not_the_process(name, how):
    """On virtual CPU devices the others would wait for 40 s, and abort."""

    def step(w, x):
        y = x @ w
        total = CALLS[name](y.sum())
        # What waits for all devices after the call.
        return w - 1e-9 * total * y.mean(0, keepdims=True), total

    run = cfp.parallelize(step, **how)
    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    with pytest.raises(TooLargeError, match="got"):
        run(w, 1e6 * x)
    # The step goes on as if nothing had been.
    new, total = run(w, x)
    assert float(total) == 1024.0
    np.testing.assert_allclose(new, w - 1e-9 * 1024 * 8, rtol=1e-6)


def test_a_step_without_functions_of_the_host_is_not_waited_for(how):
    plan = cfp.plan(lambda x: x * 2, jnp.ones(8), **how)
    assert plan.compile_bound().alarm is None
    assert plan.host_callbacks_skipped == ()


def test_those_that_are_silenced_while_measuring_are_named(how, tmp_path):
    def step(w, x):
        total = jax.pure_callback(checked, SCALAR, (x @ w).sum())
        jax.debug.print("{}", total)
        return w * total

    args = jnp.ones((8, 8)), jnp.ones((16, 8))
    plan = cfp.plan(step, *args, **how)
    assert len(plan.host_callbacks_skipped) == 2
    assert all(
        "test_host_functions.py:" in name for name in plan.host_callbacks_skipped
    )
    assert any("pure_callback" in name for name in plan.host_callbacks_skipped)
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json")
    assert loaded.host_callbacks_skipped == plan.host_callbacks_skipped
    assert "host callbacks that measuring did not call: " in repr(loaded)


@pytest.mark.parametrize(
    "call", [*CALLS.values(), lambda v: [jax.debug.print("{}", v), v][1]]
)
def test_it_is_planned_for_gpus_that_are_not_here(call, how):
    """Their runtime is not asked for; nor is anything called."""

    def step(w, x):
        y = x @ w
        # This sum is too large: the function would raise.
        return w - 1e-9 * y.mean(0, keepdims=True), call(y.sum())

    args = jnp.ones((8, 8)), 1e6 * jnp.ones((16, 8))
    there = cfp.plan(step, *args, **how | {"mesh": cfp.described("4xh100", x=4)})
    here = cfp.plan(step, *args, **how)
    assert len(there.host_callbacks_skipped) == 1
    assert there.host_callbacks_skipped == here.host_callbacks_skipped
    assert there.arg_specs == here.arg_specs
