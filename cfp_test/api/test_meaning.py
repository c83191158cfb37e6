"""A step under another configuration of JAX is another step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp.program.jaxprs import trace_context_key

SETTINGS = cfp.PlannerSettings(race=False)


@pytest.fixture(scope="module")
def how(tmp_path_factory):
    return {
        "mesh": jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]),
        "preset": "data_parallel",
        "cache_dir": tmp_path_factory.mktemp("cache"),
        "settings": SETTINGS,
    }


def step(x):
    return x @ x.T + np.float64(1) / 3 * jnp.arange(8.0), jnp.sum(x, dtype=float)


X = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)


@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
def test_types_of_64_bits(how):
    run = cfp.parallelize(step, **how)
    narrow = run(X)
    plan = run.plan
    with jax.enable_x64(True):
        wide, expected = run(X), jax.jit(step)(X)
        assert [w.dtype for w in wide] == [e.dtype for e in expected]
        assert wide[1].dtype == jnp.float64
        np.testing.assert_allclose(wide[1], expected[1], rtol=1e-14)
    assert narrow[1].dtype == jnp.float32
    assert run(X)[1].dtype == jnp.float32
    assert run.plan is plan and len(run.plans) == 2, "and no plan is made twice"


@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
def test_precision_of_matrix_products(how):
    run = cfp.parallelize(step, **how)
    run(X)
    plan = run.plan
    with jax.default_matmul_precision("highest"):
        run(X)
        assert run.plans[1].fingerprint != plan.fingerprint
    run(X)
    assert run.plan is plan and len(run.plans) == 2


@pytest.mark.explained("The program is another one inside of jax.enable_x64(True)")
def test_a_plan_is_not_applied_to_another_program(how):
    planned = cfp.plan(step, X, **how).apply(step)
    planned(X)
    with (
        jax.enable_x64(True),
        pytest.raises(cfp.PlanMismatch, match="jax_enable_x64"),
    ):
        planned(X)
    assert planned(X)[1].dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "value", "matters"),
    [
        ("jax_enable_x64", True, True),
        ("jax_default_matmul_precision", "float32", True),
        ("jax_numpy_dtype_promotion", "strict", True),
        ("jax_numpy_rank_promotion", "raise", True),
        ("jax_default_prng_impl", "rbg", True),
        ("jax_threefry_partitionable", False, True),
        ("jax_softmax_custom_jvp", True, True),
        ("jax_debug_nans", True, False),
        ("jax_optimization_level", "O1", True),
        ("jax_log_compiles", True, False),
        ("jax_traceback_filtering", "off", False),
        ("jax_compilation_cache_dir", "/tmp/nowhere", False),
    ],
)
def test_which_settings_count(name, value, matters):
    before, old = trace_context_key(None), getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        assert (trace_context_key(None) != before) == matters
    finally:
        jax.config.update(name, old)
    assert trace_context_key(None) == before


@jax.tree_util.register_static
class ByIdentity:
    def __init__(self, factor):
        self.factor = factor


@jax.tree_util.register_static
class ByValue(ByIdentity):
    def __eq__(self, other):
        return isinstance(other, ByValue) and other.factor == self.factor

    def __hash__(self):
        return hash(self.factor)


@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
@pytest.mark.parametrize("kind", [ByIdentity, ByValue])
def test_a_static_node_counts_as_under_jit(kind, how):
    """A change in place is not seen; an object that differs by == is another step."""

    def results(wrap):
        run, one = wrap(lambda one, x: x * one.factor), kind(2.0)
        found = [run(one, X)]
        one.factor = 3.0
        return [*found, run(one, X), run(kind(4.0), X)]

    def planned(step):
        return cfp.plan(step, kind(2.0), X, **how).apply(step)

    wanted = results(jax.jit)
    np.testing.assert_array_equal(wanted, [2 * X, 2 * X, 4 * X])
    for wrap in (planned, lambda step: cfp.parallelize(step, **how)):
        np.testing.assert_array_equal(results(wrap), wanted)


@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
def test_nothing_in_place_of_an_array_is_another_step(how):
    run = cfp.parallelize(lambda x, y=None: x if y is None else x + y, **how)
    np.testing.assert_array_equal(run(X, jnp.ones(4)), X + 1)
    np.testing.assert_array_equal(run(X, None), X)
    np.testing.assert_array_equal(run(X, y=jnp.ones(4)), X + 1)
