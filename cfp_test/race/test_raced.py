"""Steps run as their race compiled them; those that must not are compiled again."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp.context import DetailedSettings
from cfp.plan import execute
from cfp.profiling.hlo import compile_right
from cfp.program.constrain import Constraints
from cfp_test.support.covering import at_night

ROWS, WIDTH = 8, 16


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])


def descend(weights, x):
    """One step of gradient descent: what is made in one layer, and the loss."""

    def loss(weights):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradients), value


def arguments():
    up, down, x = jax.random.split(jax.random.key(0), 3)
    weights = {
        "up": jax.random.normal(up, (WIDTH, 2 * WIDTH)),
        "down": jax.random.normal(down, (2 * WIDTH, WIDTH)),
    }
    return weights, jax.random.normal(x, (ROWS, WIDTH))


def unread(weights, x, count):
    """The count is not read."""
    return descend(weights, x)


def keyed(weights, x, key):
    """The key is a type of JAX's, which programs know as integers."""
    key, noise = jax.random.split(key)
    return *descend(weights, x + jax.random.normal(noise, x.shape)), key


def counted(weights, x, count):
    """The count, a number of Python's, has the type of whatever it meets."""
    return *descend(weights, x), count + 1


def handed_back(weights, x):
    """The data are a result, too."""
    return *descend(weights, x), x


def given_twice(weights, x):
    new, loss = descend(weights, x)
    return new, loss, loss


def keyed_by_many(weights, x, keys):
    """One key for each of some rows; other keys are returned."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
    return *descend(weights, x + noise.sum(0)), jax.random.clone(keys)


def weak(weights, x, flag, number):
    """Numbers of Python's of other types."""
    return *descend(weights, x), flag, 2 * number, flag


def twice_donated(weights, x):
    """Two weights become the same."""
    new, loss = descend(weights, x)
    down = new["down"] + new["up"].T
    return {"up": down.T, "down": down, "more": down}, down, loss


def with_constants(weights, x):
    """Results that depend on nothing."""
    return *descend(weights, x), jnp.arange(WIDTH), jnp.zeros((ROWS, WIDTH)), 3


def overwriting(weights, x, y):
    """The results take the places of weights and of x, or of y, which is not read."""
    return *descend(weights, x), 2 * x


def planned(step, args, mesh, cache, preset="fully_sharded", **options):
    """A plan from a race of one, if a preset is named."""
    settings = DetailedSettings(
        per_kind=1, in_context=False, measure=True if preset else None
    )
    options |= {"preset": preset, "settings": settings}
    return cfp.plan(step, *args, mesh=mesh, cache_dir=cache, **options)


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = map(jax.random.key_data, (one, other))
        assert one.weak_type == other.weak_type
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "step, more, preset",
    [(descend, (), None), (unread, (jnp.ones(3),), "fully_sharded")],
    ids=["descend", "unread"],
)
def test_what_won_a_race_is_not_compiled_again(step, more, preset, mesh, tmp_path):
    args = (*arguments(), *more)
    plan = planned(step, args, mesh, tmp_path, preset, donate_argnums=0)
    assert plan.raced is not None
    run = plan.compile(step, *args)
    assert run.compiled is plan.raced.built.compiled

    # The first step may share its arguments' memory, and take it.
    weights, wanted = jax.tree.map(jnp.copy, args[0]), args[0]
    for step_number in range(3):
        before = weights
        weights, loss = run(weights, *args[1:])
        wanted, expected = jax.jit(step)(wanted, *args[1:])
        assert_same((weights, loss), (wanted, expected))
        if step_number:
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (weights, loss))
        assert shardings == plan.out_shardings


@pytest.fixture
def compiled_again(monkeypatch):
    """Lists programs that are compiled to be run, in place of what raced."""
    found = []

    def compile_and_count(lowered, options):
        found.append(lowered)
        return compile_right(lowered, options)

    monkeypatch.setattr(execute, "compile_right", compile_and_count)
    return found


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    "step, more, donated",
    [
        (keyed, (jax.random.key(1),), (0, 2)),
        (keyed_by_many, (jax.random.split(jax.random.key(1, impl="rbg"), 4),), (0, 2)),
        (counted, (1,), 0),
        (weak, (True, 1j), 0),
        (handed_back, (), (0, 1)),
        (given_twice, (), 0),
        (twice_donated, (), 0),
        (with_constants, (), 0),
        (overwriting, (jnp.ones((ROWS, WIDTH)),), (0, 1, 2)),
        (unread, (jnp.ones(3),), (0, 2)),
        *at_night(
            [
                (keyed, (jax.random.key(1),), 0),
                (handed_back, (), 0),
                (overwriting, (jnp.ones((ROWS, WIDTH)),), (0, 2)),
            ]
        ),
    ],
)
def test_what_raced_has_the_types_of_the_step(
    step, more, donated, mesh, tmp_path, compiled_again
):
    args = (*arguments(), *more)
    plan = planned(step, args, mesh, tmp_path, donate_argnums=donated)
    run = plan.compile_bound()
    assert run.raced and not compiled_again
    wanted = jax.jit(step)(*args)
    given = jax.tree.map(jnp.copy, args)
    if step is weak or step is counted:
        given = (*given[:2], *more)
    found = run(*given)
    assert_same(found, wanted)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, found)
    assert shardings == plan.out_shardings
    assert not compiled_again


@pytest.mark.parametrize(
    "within", [lambda call: call, lambda call: jax.lax.composite(call, "cfp.call")]
)
def test_calls_of_the_host_are_compiled_in(within, mesh, tmp_path):
    seen = []

    @within
    def tell(loss):
        jax.debug.callback(lambda value: seen.append(float(value)), loss)
        return loss

    def telling(weights, x):
        new, loss = descend(weights, x)
        return new, tell(loss)

    args = arguments()
    plan = planned(telling, args, mesh, tmp_path)
    assert plan.raced is not None
    run = plan.compile_bound()
    assert not run.raced
    _, loss = run(*args)
    jax.effects_barrier()
    assert set(seen) == {float(loss)}


def test_another_program_is_not_taken_for_what_raced(mesh, tmp_path):
    args = arguments()
    plan = planned(descend, args, mesh, tmp_path)

    def other(weights, x):
        new, loss = descend(weights, x)
        return new, 2 * loss

    with pytest.raises(cfp.PlanMismatch, match="not the one"):
        plan.compile(other, *args)


@pytest.mark.parametrize("made_of", [np.asarray, jnp.asarray])
def test_constants_are_those_of_the_step_that_is_compiled(made_of, mesh, tmp_path):
    """Large ones are no part of what a plan knows a program by."""
    table = np.random.default_rng(0).normal(size=(WIDTH, 8 * WIDTH))

    def with_table(scale):
        captured = made_of(np.float32(scale * table))

        def calling(weights, x):
            new, loss = descend(weights, x)
            return new, loss + jnp.sum(x @ captured)

        return calling

    args = arguments()
    plan = planned(with_table(1.0), args, mesh, tmp_path)
    same, other = (plan.compile(with_table(scale), *args) for scale in (1.0, 2.0))
    assert same.raced and not other.raced
    for run, scale in ((same, 1.0), (other, 2.0)):
        assert_same(run(*args), jax.jit(with_table(scale))(*args))


def test_what_composites_stand_for_is_part_of_a_program(mesh, tmp_path):
    def times(factor):
        scaled = jax.lax.composite(lambda v: v * factor, "cfp.scaled")

        def calling(weights, x):
            new, loss = descend(weights, x)
            return new, loss + scaled(x).sum()

        return calling

    args = arguments()
    plan = planned(times(2.0), args, mesh, tmp_path)
    same, other = (plan.compile(times(factor), *args) for factor in (2.0, 3.0))
    assert same.raced and not other.raced
    assert_same(other(*args), jax.jit(times(3.0))(*args))


def test_changed_plans_are_compiled(mesh, tmp_path):
    args = arguments()
    plan = planned(descend, args, mesh, tmp_path)
    others = plan.on(jax.make_mesh((2,), ("x",), devices=jax.devices()[2:4])).mesh
    options = {"xla_backend_optimization_level": "1"}
    nothing = Constraints({}, {})
    for change in ({"mesh": others}, {"options": options}, {"constraints": nothing}):
        changed = replace(plan, **change).compile(descend, *args)
        assert not changed.raced
        assert_same(changed(*args), jax.jit(descend)(*args))


def test_a_program_has_the_name_of_its_step(mesh, tmp_path):
    args = arguments()
    run = planned(descend, args, mesh, tmp_path).compile_bound()
    assert run.raced
    assert run.as_text().startswith("HloModule jit_descend,")


def test_neither_files_nor_other_devices_know_what_raced(mesh, tmp_path):
    args = arguments()
    plan = planned(descend, args, mesh, tmp_path)
    plan.save(tmp_path / "plan.json")
    assert cfp.Plan.load(tmp_path / "plan.json").raced is None
    others = jax.make_mesh((2,), ("x",), devices=jax.devices()[2:4])
    moved = plan.on(others)
    assert moved.raced is None
    new, _ = moved.compile(descend, *args)(*args)
    assert new["up"].sharding.device_set == set(others.devices.flat)


def test_an_answered_race_has_compiled_nothing(mesh, tmp_path):
    args = arguments()
    first = planned(descend, args, mesh, tmp_path)
    again = planned(descend, args, mesh, tmp_path)
    assert first.raced is not None and again.raced is None
    assert (again.winner, again.measured_ms) == (first.winner, first.measured_ms)
    assert_same(again.compile_bound()(*args), first.compile_bound()(*args))
