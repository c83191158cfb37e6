"""Steps with other constants than those that were planned: a learning rate, a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp.context import DetailedSettings
from cfp.profiling.store import ProfileStore, store_path

MEASURING = DetailedSettings(
    measure=True, per_kind=1, in_context=False, compiler_options={}, reach=1.0
)
STEPS = 3
X = jnp.ones((8, 16))
# More numbers than are taken for part of a program's text.
TABLE = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)
# The second rate equals the share of the gradient in the mean of gradients.
FIRST, SECOND = {"rate": 0.01, "table": TABLE}, {"rate": 0.1, "table": 2 * TABLE}


def make_step(
    rate=0.01, table=TABLE, trips=2, activation=jnp.tanh, precision=None, eps=1e-3
):
    def loss(w, x):
        h = activation(jnp.dot(x, w, precision=precision))
        h = jax.lax.fori_loop(0, trips, lambda _, h: 0.9 * h + 0.1, h)
        return jnp.mean((h @ table) ** 2)

    def train_step(state, x):
        w, mean = state
        value, gradient = jax.value_and_grad(loss)(w, x)
        mean = 0.9 * mean + 0.1 * gradient
        return (w - rate * mean / (jnp.abs(mean) + eps), mean), value

    return train_step


def make_state(dtype=jnp.float32):
    w = jax.random.normal(jax.random.key(0), (16, 16), dtype) / 4
    return w, jnp.zeros_like(w)


def losses(step):
    state, found = make_state(), []
    for _ in range(STEPS):
        state, loss = step(state, X)
        found.append(float(loss))
    return found


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def expected():
    """The losses by plain jit; those of the new constants are other ones."""
    first, second = (losses(jax.jit(make_step(**one))) for one in (FIRST, SECOND))
    assert not np.isclose(first, second, rtol=1e-2).any()
    return {"first": first, "second": second}


@pytest.fixture(scope="module")
def planned(mesh, cache):
    """A plan from a race, which holds the compiled program of the first constants."""
    plan = cfp.plan(
        make_step(**FIRST),
        make_state(),
        X,
        mesh=mesh,
        cache_dir=cache,
        settings=MEASURING,
    )
    assert plan.search["strategies_measured"] > 0
    assert plan.raced is not None
    return plan


def test_a_saved_plan_applies_to_new_constants(planned, mesh, expected, tmp_path):
    planned.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    found = losses(loaded.apply(make_step(**SECOND)))
    np.testing.assert_allclose(found, expected["second"], rtol=1e-4)


def test_what_raced_runs_its_own_constants_only(planned, expected):
    same, other = (
        planned.compile(make_step(**one), make_state(), X) for one in (FIRST, SECOND)
    )
    assert same.raced and not other.raced
    np.testing.assert_allclose(losses(same), expected["first"], rtol=1e-4)
    np.testing.assert_allclose(losses(other), expected["second"], rtol=1e-4)


def test_new_constants_are_planned_without_measuring(planned, mesh, cache, expected):
    def records():
        with ProfileStore(store_path(cache)) as store:
            return sorted((r.key, r.created) for r in store.records())

    before = records()
    step = cfp.parallelize(
        make_step(**SECOND), mesh=mesh, cache_dir=cache, settings=MEASURING
    )
    found = losses(step)
    counts = step.plan.search
    assert counts["strategies_measured"] == 0
    assert counts["strategies_cached"] == planned.search["strategies_measured"]
    assert counts["race_cached"] == 1
    assert records() == before
    assert step.plan.constraints == planned.constraints
    np.testing.assert_allclose(found, expected["second"], rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"trips": 3},
        {"activation": jnp.sin},
        {"precision": "highest"},
        {"table": TABLE[:, :64]},
        {"table": TABLE.astype(jnp.bfloat16)},
    ],
    ids=["trips", "activation", "attribute", "shape", "dtype"],
)
def test_another_structure_is_refused(planned, change):
    step = make_step(**(FIRST | change))
    with pytest.raises(cfp.PlanMismatch, match="not the one that was planned"):
        planned.compile(step, make_state(), X)


def test_other_arguments_are_refused(planned):
    with pytest.raises(cfp.PlanMismatch, match="do not fit"):
        planned.compile(make_step(), make_state(jnp.bfloat16), X)
