"""Settings of JAX under which cfp plans nothing, and what else it refuses or checks."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cfp
from cfp.context import DetailedSettings
from cfp.profiling.record import environment_parts
from cfp.profiling.store import ProfileStore, store_path
from cfp.program.graph import path_matches
from cfp.program.jaxprs import compiler_settings

SETTINGS = DetailedSettings(per_kind=1, in_context=False)


def step(weights, x):
    new = {"layers[0]": weights["layers[0]"] - jnp.log(x @ weights["layers[0]"]).mean()}
    return new, jnp.sum(x)


WEIGHTS, X = {"layers[0]": jnp.ones((8, 8))}, jnp.ones((8, 8))


@pytest.fixture
def how(tmp_path):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    return {"mesh": mesh, "cache_dir": tmp_path, "settings": SETTINGS, "quiet": True}


@pytest.fixture
def configured():
    """Sets a setting of JAX for one test."""
    before = {}

    def update(name, value):
        before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)

    yield update
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.explained("A setting of JAX is in the way")
def test_without_shardy_nothing_is_planned_nor_stored(how, configured, tmp_path):
    good = cfp.plan(step, WEIGHTS, X, **how | {"cache_dir": tmp_path / "good"})
    configured("jax_use_shardy_partitioner", False)
    for call in (
        lambda: cfp.plan(step, WEIGHTS, X, **how),
        lambda: cfp.parallelize(step, **how)(WEIGHTS, X),
        good.compile_bound,
    ):
        with pytest.raises(cfp.CfpError, match="jax_use_shardy_partitioner is off"):
            call()
    path = store_path(how["cache_dir"])
    if path.exists():
        with ProfileStore(path) as store:
            assert not list(store)


def test_without_jit_nothing_is_planned(how):
    with jax.disable_jit(), pytest.raises(cfp.CfpError, match="without cfp"):
        cfp.parallelize(step, **how)(WEIGHTS, X)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_optimization_level", "O1"),
        ("jax_compiler_enable_remat_pass", False),
        ("jax_memory_fitting_level", "O1"),
        ("jax_xla_profile_version", 1),
    ],
)
def test_settings_of_the_compiler_are_in_keys(name, value, configured):
    assert compiler_settings() == ()
    before = dict(environment_parts(jax.devices()[:2]))
    configured(name, value)
    after = dict(environment_parts(jax.devices()[:2]))
    assert "jax_settings" not in before
    assert name in after.pop("jax_settings") and after == before


@pytest.mark.explained("A result has NaN")
def test_what_has_nan_names_the_result(how):
    run = cfp.parallelize(step, donate_argnums=0, **how)
    with jax.debug_nans(True):
        run(jax.tree.map(jnp.copy, WEIGHTS), X)
        assert run.plan.donated == (True, False), "checks change no plan"
        with pytest.raises(FloatingPointError, match=r"layers\[0\].*has NaN"):
            run(jax.tree.map(jnp.copy, WEIGHTS), -X)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="infinity"):
        run(jax.tree.map(jnp.copy, WEIGHTS), 0 * X)


@pytest.mark.explained("The step looks at its own shardings, or takes a jax.Ref")
def test_steps_that_look_at_shardings_are_refused(how):
    def looking(weights, x):
        jax.debug.inspect_array_sharding(x, callback=print)
        return step(weights, x)

    with pytest.raises(cfp.StepNotTraceable, match="Remove the call"):
        cfp.plan(looking, WEIGHTS, X, **how)


def test_references_are_refused(how):
    def adding(total, x):
        total[...] += x
        return x * 2

    with pytest.raises(cfp.StepNotTraceable, match=r"'total' is a jax\.Ref"):
        cfp.plan(adding, jax.new_ref(X), X, **how)


def test_plans_are_copied_with_what_they_run(how):
    plan = cfp.plan(step, WEIGHTS, X, **how)
    other = copy.deepcopy(plan)
    assert other == plan and other.mesh is plan.mesh and other.step is plan.step
    other.search["segments"] = -1
    assert plan.search.get("segments") != -1
    found, wanted = (one.compile_bound()(WEIGHTS, X) for one in (other, plan))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_pins_take_paths_as_plans_write_them(how):
    plan = cfp.plan(step, WEIGHTS, X, pins={"weights/layers[0]": P(None, "x")}, **how)
    name = plan.arg_names[0]
    assert path_matches(name, name) and name.endswith("[0]")
    assert plan.arg_specs[0] == ((), ("x",))
    assert path_matches("state/layers0", "layers[0]"), "globs are as they were"
