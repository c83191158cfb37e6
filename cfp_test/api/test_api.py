"""The library from the outside: plan, save, load, apply, and what is refused."""

import dataclasses
import functools
import inspect
import json
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cfp
from cfp.context import PlannerSettings
from cfp.program.graph import path_matches

QUICK = PlannerSettings(per_kind=2, race=False)


@pytest.fixture(scope="module")
def quick(mesh, cache):
    """Plans with few measurements, and without a race."""
    return functools.partial(cfp.plan, mesh=mesh, cache_dir=cache, settings=QUICK)


OPTIMIZER = optax.adamw(1e-2)


def loss(params, batch):
    h = jax.nn.relu(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean((h @ params["down"]["kernel"] - batch["y"]) ** 2)


def train_step(state, batch):
    params, opt = state
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, opt = OPTIMIZER.update(gradients, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": value}


def init(key):
    a, b = jax.random.split(key)
    params = {
        "up": {"kernel": jax.random.normal(a, (16, 32)) * 0.1, "bias": jnp.zeros(32)},
        "down": {"kernel": jax.random.normal(b, (32, 8)) * 0.1},
    }
    return params, OPTIMIZER.init(params)


def make_batch(key):
    a, b = jax.random.split(key)
    return {"x": jax.random.normal(a, (64, 16)), "y": jax.random.normal(b, (64, 8))}


def shapes():
    key = jax.random.key(0)
    return jax.eval_shape(init, key), jax.eval_shape(make_batch, key)


def assert_same(found, expected):
    differences = cfp.compare(found, expected)
    assert differences[0].relative_l2 < 1e-5, differences[:3]


@pytest.mark.smoke
def test_parallelize_plans_once_and_runs(mesh, cache):
    step = cfp.parallelize(
        train_step, mesh=mesh, donate_argnums=0, cache_dir=cache, settings=QUICK
    )
    assert not hasattr(step, "plan")
    with pytest.raises(cfp.NotBound, match="first call"):
        _ = step.plan
    state, expected = init(jax.random.key(0)), init(jax.random.key(0))
    for turn in range(3):
        batch = make_batch(jax.random.key(turn))
        state, metrics = step(state, batch)
        expected, wanted = jax.jit(train_step)(expected, batch)
    assert_same((state, metrics), (expected, wanted))
    leaves = jax.tree.leaves(state)
    assert all(leaf.sharding.device_set == set(mesh.devices.flat) for leaf in leaves)
    assert step.__name__ == "train_step"


def test_parallelize_is_a_decorator_and_replans_for_other_shapes(mesh, cache):
    traced = []

    @cfp.parallelize(mesh=mesh, cache_dir=cache, settings=QUICK)
    def double(x):
        """Doubles."""
        traced.append(x.shape)
        return 2 * x

    assert double.__doc__ == "Doubles."
    np.testing.assert_array_equal(double(jnp.arange(8.0)), 2 * np.arange(8.0))
    first = double.plan
    with pytest.warns(UserWarning, match="'double' is planned again, for x of type"):
        np.testing.assert_array_equal(double(jnp.arange(12.0)), 2 * np.arange(12.0))
    assert double.plan is first and double.plans[0] is first
    assert [p.arg_types for p in double.plans] == [("float32[8]",), ("float32[12]",)]
    double(jnp.arange(8.0))
    with pytest.warns(UserWarning, match="'double' is planned again, for x of type"):
        double(jnp.arange(16.0))
    assert double.plan is first
    assert traced == [(8,), (12,), (16,)], "a deep step takes seconds to trace"


@pytest.mark.explained("The step is planned again, or the mesh does not divide a batch")
def test_a_smaller_last_batch_leaves_the_state_where_it_is(mesh, cache):
    """Its plan stores the state as the first one; pinned, so that others would not."""
    pins = {"up/kernel": "x", "down/kernel": jax.P(None, "x")}
    step = cfp.parallelize(
        train_step,
        mesh=mesh,
        donate_argnums=0,
        quiet=True,  # Hides progress, and no warning.
        cache_dir=cache,
        settings=QUICK,
    )
    step._options["pins"] = pins
    state, expected = init(jax.random.key(0)), init(jax.random.key(0))
    batch = make_batch(jax.random.key(1))
    state, _ = step(state, batch)
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    del step._options["pins"]
    last = jax.tree.map(lambda leaf: leaf[:6], batch)
    with pytest.warns(UserWarning) as warned:
        state, metrics = step(state, last)
        state, _ = step(state, jax.tree.map(lambda leaf: leaf[:6], batch))
    texts = [str(one.message) for one in warned]
    assert len(texts) == 2, texts
    assert "Drop or pad a smaller last batch" in texts[0]
    assert "The mesh does not divide batch/x (6 over x=4)" in texts[1]
    first, second = step.plans
    assert step.plan is first
    assert "pinned in all candidates, by pins= (--pin): " in str(first)
    assert "pinned in all candidates, as in the step's first plan: " in str(second)
    assert first.arg_specs[: len(where)] == second.arg_specs[: len(where)]
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == where
    for one in (batch, last):
        expected, wanted = jax.jit(train_step)(expected, one)
    assert_same(metrics, wanted)


class Stepped(NamedTuple):
    state: tuple[jax.Array, ...]
    loss: jax.Array


def scaled_step(state, rate):
    """Returns each leaf strongly typed one call later than the one before it."""
    scale, moment, kept = state
    loss = jnp.sum(scale * moment)
    return Stepped((scale - rate * jnp.float32(1), scale * 0.9, kept), loss)


def weak_state():
    return tuple(jnp.full((8,), value) for value in (0.5, 0.25, 2.0))


def test_state_of_weak_types_is_planned_once_as_it_is_returned(mesh, cache, tmp_path):
    state, rate = weak_state(), jnp.asarray(0.1)
    assert all(leaf.weak_type for leaf in (*state, rate))
    options = {"mesh": mesh, "cache_dir": cache, "settings": QUICK}
    step = cfp.parallelize(scaled_step, donate_argnums=0, **options)
    expected, plans = weak_state(), []
    for _ in range(3):
        state, loss = step(state, rate)
        expected, wanted = jax.jit(scaled_step)(expected, rate)
        plans.append(step.plan)
        assert_same((state, loss), (expected, wanted))
    assert all(plan is plans[0] for plan in plans) and len(step.plans) == 1
    avals = plans[0].step.avals
    # What is not returned stays weak.
    assert [aval.weak_type for aval in avals] == [False, False, False, True]
    plans[0].save(tmp_path / "plan.json")
    kept = cfp.parallelize(scaled_step, plan=tmp_path / "plan.json", mesh=mesh)
    state = weak_state()
    for _ in range(3):
        state, loss = kept(state, rate)
    assert_same((state, loss), (expected, wanted))


def counted_step(state, scale):
    """Counts its calls, as a state that begins with ``0`` does."""
    count, weights = state
    return (count + 1, weights * scale), jnp.sum(weights)


def decayed_step(state, scale):
    """Computes in bfloat16, but with a strongly typed counter in float32."""
    count, weights = state
    decayed = (weights * (1 / (count + 1)) * scale).astype(weights.dtype)
    return (count + 1, decayed), None


def scheduled_step(state, scale):
    """Clips its counter, as a schedule does: what is weakly typed is converted."""
    count, weights = state
    part = jnp.where(count < 9, 0.1 * jnp.clip(count, 0, 9), 0.1)
    return (count + 1, weights * scale * part.astype(weights.dtype)), None


@pytest.mark.parametrize(
    "step, is_weak",
    [(counted_step, False), (scheduled_step, False), (decayed_step, True)],
)
@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
def test_a_counter_that_begins_as_a_number_is_taken_as_restored(
    mesh, cache, step, is_weak
):
    """A checkpoint has it as an array: the plan's executable takes both."""
    weights, scale = np.ones((8, 4), jnp.bfloat16), jnp.bfloat16(0.5)
    planned = cfp.parallelize(
        step, donate_argnums=0, mesh=mesh, cache_dir=cache, settings=QUICK
    )
    state, expected = (0, weights), (0, weights)
    for _ in range(2):
        state, _ = planned(state, scale)
        expected, _ = jax.jit(step)(expected, scale)
    first = planned.plan
    assert first.step.avals[0].weak_type is is_weak
    np.testing.assert_array_equal(state[1], expected[1])
    restored = jnp.asarray(np.asarray(state[0])), jnp.asarray(np.asarray(state[1]))
    assert not restored[0].weak_type
    (count, found), _ = planned(restored, scale)
    assert count == 3 and len(planned.plans) == 1 + is_weak
    wanted = jax.jit(step)((jnp.int32(2), expected[1]), scale)[0][1]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "scale", [2.0**15, jnp.asarray(2.0**15)], ids=["number", "array"]
)
def test_a_saved_plan_takes_restored_state_as_it_was_planned(
    mesh, cache, tmp_path, scale
):
    """A loss scale without a type of its own; as an array it would make others."""

    def step(state, x):
        scale, weights = state

        def loss(weights):
            return (x @ weights.astype(jnp.bfloat16)).mean() * scale

        value, grads = jax.value_and_grad(loss)(weights)
        fits = jnp.isfinite(value)
        return (jnp.where(fits, scale * 2, scale / 2), weights - grads / scale), value

    def begun():
        return scale + 0, jnp.ones((8, 16))

    x = jnp.full((4, 8), 1.01, jnp.bfloat16)
    plan = cfp.plan(
        step, begun(), x, mesh=mesh, cache_dir=cache, settings=QUICK, donate_argnums=0
    )
    assert plan.weak == (0,)
    plan.save(tmp_path / "plan.json")
    run = cfp.parallelize(step, plan=tmp_path / "plan.json", mesh=mesh)
    state, _ = run(begun(), x)
    stored = jax.tree.map(np.asarray, state)
    wanted = jax.tree.map(np.asarray, run(state, x))
    again = cfp.parallelize(step, plan=tmp_path / "plan.json", mesh=mesh)
    restored = jax.tree.map(jnp.asarray, stored)
    assert not restored[0].weak_type
    found = again(restored, x)
    assert_same(found, wanted)
    assert found[0][0] == 2.0**17 and found[1].dtype == jnp.bfloat16
    strong = jax.eval_shape(step, jax.tree.map(jnp.asarray, stored), x)
    assert strong[1].dtype == jnp.float32


class Sized:
    """A container that reads its leaf when it is made."""

    def __init__(self, x):
        self.x, self.count = x, x.shape[0]


jax.tree_util.register_pytree_node(
    Sized, lambda one: ((one.x,), None), lambda _, leaves: Sized(*leaves)
)


def test_weak_types_that_no_call_replaces_stay(mesh, cache):
    """Gradients have the parameters' structure, and are not their next values."""
    traced = []

    def loss(params, batch):
        traced.append(params)
        hidden = batch.x * params["a"] + params["b"]
        return jnp.sum(hidden).astype(jnp.float32)

    grads = cfp.parallelize(jax.grad(loss), mesh=mesh, cache_dir=cache, settings=QUICK)
    params = {"a": jnp.full((8,), 1.01), "b": jnp.full((8,), 0.1)}
    batch = Sized(jnp.full((16, 8), 1.01, jnp.bfloat16))
    expected = jax.jit(jax.grad(loss))(params, batch)
    traced.clear()
    for _ in range(3):
        found = grads(params, batch)
    assert len(traced) == 1
    assert grads.plan.step.avals[0].weak_type
    np.testing.assert_array_equal(found["a"], expected["a"])


def test_a_plan_traces_the_step_that_it_is_applied_to_once(quick, mesh):
    traced = []

    def double(x):
        traced.append(x.shape)
        return 2 * x

    x = jnp.arange(8.0)
    plan = quick(double, x)
    assert len(traced) == 1
    np.testing.assert_array_equal(plan.apply(double)(x), 2 * np.arange(8.0))
    assert len(traced) == 2
    np.testing.assert_array_equal(plan.compile_bound()(x), 2 * np.arange(8.0))
    assert len(traced) == 2
    loaded = cfp.Plan.from_json(json.loads(plan.to_json()), mesh=mesh)
    with pytest.raises(cfp.PlanMismatch, match="bind"):
        loaded.compile_bound()


def test_only_what_the_plan_says_is_given_away(mesh, cache):
    """A result of as many elements, but another shape, takes no argument's place."""

    def step(state, x):
        return state + x.sum(), x.T * 2

    def arguments():
        return jnp.ones((8, 8)), jnp.arange(64.0).reshape(16, 4)

    options = {"mesh": mesh, "cache_dir": cache, "settings": QUICK}
    run = cfp.parallelize(step, donate_argnums=(0, 1), **options)
    state, x = arguments()
    for _ in range(3):
        state, doubled = run(state, x)
        np.testing.assert_array_equal(doubled, 2 * x.T)
    assert run.plan.donated == (True, False)
    plan = cfp.plan(step, *arguments(), donate_argnums=(0, 1), **options)
    alike = plan.compile_bound(), plan.compile(step, *arguments())
    assert [one.step.donated for one in alike] == [plan.donated] * 2
    made, expected = (one.compiled.memory_analysis() for one in alike)
    assert made.alias_size_in_bytes == expected.alias_size_in_bytes


def test_a_plan_survives_saving(quick, mesh, tmp_path):
    state, batch = shapes()
    plan = quick(train_step, state, batch, donate_argnums=(0,))
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    assert loaded == plan

    step = loaded.apply(train_step)
    state = loaded.init(init, jax.random.key(0))
    batch = make_batch(jax.random.key(1))
    expected = jax.jit(train_step)(init(jax.random.key(0)), batch)
    assert_same(step(state, batch), expected)

    with pytest.raises(cfp.PlanMismatch, match="bind"):
        _ = loaded.in_shardings
    bound = loaded.bind(train_step, *shapes())
    assert bound.in_shardings == plan.in_shardings
    assert bound.out_shardings == plan.out_shardings


def test_shardings_are_pytrees_like_arguments_and_results(quick):
    plan = quick(train_step, *shapes(), preset="data_parallel")
    state, batch = plan.in_shardings
    assert batch["x"].spec == jax.P("x")
    assert state[0]["up"]["kernel"].is_fully_replicated
    new_state, metrics = plan.out_shardings
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert jax.tree.leaves(new_state) == jax.tree.leaves(state)
    assert metrics["loss"].is_fully_replicated


def test_state_is_initialised_in_the_plans_shardings(quick):
    plan = quick(train_step, *shapes(), preset="fully_sharded")
    state = plan.init(init, jax.random.key(3))
    found = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    wanted = jax.tree.map(lambda sharding: sharding.spec, plan.in_shardings[0])
    assert found == wanted
    assert_same(state, init(jax.random.key(3)))
    batch, again = plan.init(lambda k: (make_batch(k), init(k)), jax.random.key(3))
    assert batch["x"].sharding.spec == plan.in_shardings[1]["x"].spec == jax.P("x")
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, again) == wanted
    assert_same((batch, again), (make_batch(jax.random.key(3)), state))
    for wrong in (jnp.zeros(3), (state, state), (state, None, 1.0)):
        with pytest.raises(cfp.PlanMismatch, match="matches no argument of"):
            plan.init(lambda wrong=wrong: wrong)


@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
def test_static_arguments_keys_and_keywords(mesh, cache):
    def step(x, mode, key, *, scale):
        noise = jax.random.normal(key, x.shape)
        return (x @ x.T if mode == "gram" else x) * scale, noise

    x, key = jnp.arange(64.0).reshape(8, 8), jax.random.key(7)
    run = cfp.parallelize(
        step, mesh=mesh, static_argnums=(1,), cache_dir=cache, settings=QUICK
    )
    for mode in ("gram", "plain"):
        found = run(x, mode, key, scale=2.0)
        assert_same(found, step(x, mode, key, scale=2.0))
    with pytest.warns(UserWarning, match="for static arguments") as warned:
        run(x, "twice", key, scale=2.0)
    assert not any("batch" in str(one.message) for one in warned)


@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
def test_arguments_are_known_by_position_and_by_name(mesh, cache):
    def step(state, batch, mode="plus"):
        return {"w": state["w"] + batch.T @ batch * (1 if mode == "plus" else -1)}

    state, w = {"w": X}, X.T @ X
    run = functools.partial(cfp.plan, step, mesh=mesh, cache_dir=cache, settings=QUICK)
    for options in (
        {"donate_argnums": 0, "static_argnums": 2},
        {"donate_argnames": "state", "static_argnames": ("mode",)},
    ):
        made = run(state=state, batch=X, mode="minus", **options)
        assert made.arg_names == ("state/w", "batch")
        assert made.donated == (True, False) and made.static == (2,)
        planned = made.apply(step)
        for found in (
            planned(state={"w": X + 0}, batch=X, mode="minus"),
            planned({"w": X + 0}, X, "minus"),
            planned({"w": X + 0}, mode="minus", batch=X),
        ):
            np.testing.assert_allclose(found["w"], X - w, rtol=1e-6)
        same = run(state, X, "minus", **options)
        assert (same.fingerprint, same.arg_names) == (made.fingerprint, made.arg_names)

    step = cfp.parallelize(
        step, mesh=mesh, static_argnames="mode", cache_dir=cache, settings=QUICK
    )
    np.testing.assert_allclose(step(state, X)["w"], X + w, rtol=1e-6)
    np.testing.assert_allclose(step(state, X, mode="minus")["w"], X - w, rtol=1e-6)


def test_keywords_that_have_no_position_stay(mesh, cache):
    def step(x, /, y, *more, x_scale=1.0, **rest):
        return x * x_scale + y + sum(more) + rest["x"]

    run = functools.partial(cfp.plan, step, mesh=mesh, cache_dir=cache, settings=QUICK)
    made = run(X, y=X, x_scale=jnp.float32(2.0), x=X)
    assert made.arg_names == ("x", "y", "x", "x_scale")
    found = made.apply(step)(X, X, x=X, x_scale=jnp.float32(2.0))
    np.testing.assert_allclose(found, 4 * X, rtol=1e-6)
    made = run(X, X, X, x=X)
    np.testing.assert_allclose(made.apply(step)(X, X, X, x=X), 4 * X, rtol=1e-6)


def test_a_step_is_planned_once_however_it_is_called(mesh, cache):
    def step(x, y):
        return x @ y

    run = cfp.parallelize(step, mesh=mesh, cache_dir=cache, settings=QUICK)
    found = [run(X, X), run(X, y=X), run(y=X, x=X)]
    for one in found:
        np.testing.assert_allclose(one, X @ X, rtol=1e-6)
    assert len(run._steps) == 1


def test_a_second_plan_measures_nothing(mesh, tmp_path):
    run = functools.partial(
        cfp.plan, train_step, *shapes(), mesh=mesh, cache_dir=tmp_path
    )
    settings = PlannerSettings(per_kind=2, measure=True)
    first = run(settings=settings)
    assert first.search["strategies_measured"] > 0
    assert first.search["race_cached"] == 0
    second = run(settings=settings)
    assert second.search["strategies_measured"] == 0
    assert second.search["strategies_cached"] == first.search["strategies_measured"]
    assert second.search["race_cached"] == 1
    assert second.winner == first.winner
    assert second.measured_ms == first.measured_ms
    # The answer is the fastest of all that were timed.
    times = [row.time_ms for row in first.race if row.time_ms is not None]
    assert first.measured_ms == min(times)
    assert {"planned", "data_parallel", "fully_sharded"} <= {r.name for r in first.race}


def test_pins_are_kept_exactly(quick):
    pins = {"up/kernel": jax.P(None, "x"), "down/*": jax.P("x"), "batch/x": jax.P()}
    plan = quick(train_step, *shapes(), pins=pins, donate_argnums=(0,))
    state, batch = plan.in_shardings
    assert state[0]["up"]["kernel"].spec == jax.P(None, "x")
    assert state[0]["down"]["kernel"].spec == jax.P("x")
    assert batch["x"].is_fully_replicated
    ends = "up/kernel", "down/kernel", "down/bias", "batch/x"
    named = [name for name in plan.arg_names if name.endswith(ends)]
    assert [plan.arg_names[i] for i in plan.pinned] == named
    assert "pinned in all candidates, by pins= (--pin): " in repr(plan)
    real = plan.init(init, jax.random.key(0)), make_batch(jax.random.key(1))
    expected = jax.jit(train_step)(init(jax.random.key(0)), real[1])
    assert_same(plan.apply(train_step)(*real), expected)


def test_a_string_is_one_axis_and_a_whole_path_is_one_argument(mesh, cache):
    def step(w, state):
        return state["w"] @ w

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    mesh = jax.make_mesh((4,), ("data",), devices=mesh.devices.flat)
    plan = cfp.plan(
        step,
        shape,
        {"w": shape},
        mesh=mesh,
        cache_dir=cache,
        settings=QUICK,
        pins={"w": "data", "state/w": jax.P()},
    )
    assert plan.arg_specs == ((("data",), ()), ((), ()))


@pytest.mark.parametrize(
    "path, pattern, hint",
    [
        ("params/up/kernel", "params/*/kernal", "params/*/kernel"),
        ("net/up/kernel/value", "net/*/kernle", "net/*/kernel"),
        ("params/layer_1/kernel", "parms/layer_*/kernel", "params/layer_*/kernel"),
        ("w/up", "w/upp", "w/up"),
        ("state/params/embed", "embd", "state/params/embed"),
        ("net/up/kernel/value", "kernl", "net/up/kernel/value"),
    ],
)
def test_a_hint_keeps_the_wildcard(quick, path, pattern, hint):
    *keys, last = path.split("/")
    tree = {last: jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    for key in reversed(keys[1:]):
        tree = {key: tree}

    def step(tree):
        return jax.tree.map(lambda leaf: leaf @ leaf, tree)

    step.__signature__ = inspect.Signature(
        [inspect.Parameter(keys[0], inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )
    with pytest.raises(cfp.CfpError, match="matches no argument") as refused:
        quick(step, tree, pins={pattern: jax.P("x")})
    assert f"Did you mean {hint!r}?" in str(refused.value)
    assert "`cfp analyze TARGET --json` lists all" in str(refused.value)


def test_the_end_of_nnxs_variables_may_be_left_out():
    for pattern in ("up/kernel", "net/*/kernel", "*/kernel/value", "kernel"):
        assert path_matches("net/up/kernel/value", pattern), pattern
    assert not path_matches("net/up/kernel/values", "net/up/kernel")
    assert not path_matches("net/up/kernel/value", "net/up")


def test_a_method_is_bound_to_its_object(mesh, cache):
    """As `jax.jit` binds one."""
    plan = functools.partial(
        cfp.parallelize, mesh=mesh, quiet=True, cache_dir=cache, settings=QUICK
    )

    class Trainer:
        scale = 3.0

        @functools.partial(plan, static_argnums=0)
        def step(self, w, x):
            return (x @ w).sum() * self.scale

    w, x = jnp.ones((8, 16)), jnp.ones((4, 8))
    trainer = Trainer()
    assert float(trainer.step(w, x)) == 3.0 * 8 * 4 * 16
    assert trainer.step.plan is Trainer.step.plan


def test_a_budget_is_kept_or_refused_with_the_smallest(mesh, cache):
    run = functools.partial(
        cfp.plan,
        train_step,
        *shapes(),
        mesh=mesh,
        donate_argnums=(0,),
        cache_dir=cache,
    )
    with pytest.raises(cfp.MemoryBudgetError, match="is enough for") as caught:
        run(memory_budget="1000B", settings=QUICK)
    assert "That memory is for: " in str(caught.value)
    # Predictions are off by a few percent; what the error names is not.
    least = caught.value.smallest_feasible_bytes
    assert run(memory_budget=least, settings=QUICK).peak_bytes <= least
    plan = run(memory_budget="1MiB", settings=PlannerSettings(per_kind=4))
    assert plan.peak_bytes is not None and plan.peak_bytes <= 2**20


# ------------------------------------------------------------ what a call must fit


def scaled(x, mode="gram", times=2):
    return (x @ x.T if mode == "gram" else x) * times


X = jnp.arange(64.0).reshape(8, 8)


def test_a_plan_refuses_another_static_value(quick):
    made = quick(scaled, X, "gram", static_argnums=1)
    step = made.apply(scaled)
    np.testing.assert_allclose(step(X, "gram"), X @ X.T * 2, rtol=1e-6)
    with pytest.raises(cfp.PlanMismatch, match="Static argument 1 was 'gram'"):
        step(X, "plain")


def test_equal_static_values_of_other_types_are_other_values(quick):
    def typed(x, k):
        return x * (5.0 if isinstance(k, int) else 7.0)

    bound = quick(typed, X, 1, static_argnums=1).bind(typed, X, 1)
    np.testing.assert_allclose(bound.apply(typed)(X, 1.0), X * 7)


def test_a_static_argument_may_be_left_out(quick):
    """The call then has the default, as if it were passed."""
    for planned in ((X,), (X, "gram")):
        step = quick(scaled, *planned, static_argnums=(1, 2)).apply(scaled)
        for args in ((X,), (X + 1,), (X, "gram"), (X, "gram", 2)):
            expected = args[0] @ args[0].T * 2
            np.testing.assert_allclose(step(*args), expected, rtol=1e-6)
        np.testing.assert_allclose(step(X, times=2), X @ X.T * 2, rtol=1e-6)
        # Of the planned structure, as with another value of a constant.
        np.testing.assert_allclose(step(X, times=3), X @ X.T * 3, rtol=1e-6)


def test_a_static_default_may_stand_behind_an_argument_that_is_left_out(mesh, cache):
    def step(x, y=2.0, n=3):
        return x * y * n

    planned = cfp.parallelize(
        step, mesh=mesh, static_argnames="n", cache_dir=cache, settings=QUICK
    )
    for call in (lambda: planned(X), lambda: planned(X, n=3)):
        np.testing.assert_allclose(call(), X * 6)
    assert len(planned.plans) == 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    parts: list = dataclasses.field(default_factory=lambda: [2, 3])


@pytest.mark.parametrize("default", [Sizes(), float("nan")])
def test_any_static_default_may_be_left_out(default, mesh, cache):
    """As in jax.jit: also one that cannot be hashed, or differs from itself."""

    def step(x, n=default):
        return x * (6 if n is default else 1)

    planned = cfp.parallelize(
        step, mesh=mesh, static_argnames="n", cache_dir=cache, settings=QUICK
    )
    for _ in range(2):
        np.testing.assert_allclose(planned(X), X * 6)
    assert len(planned.plans) == 1


@pytest.mark.filterwarnings("ignore:.* is planned again:UserWarning")
def test_static_values_of_equal_worth_are_planned_apart(mesh, cache):
    step = cfp.parallelize(
        lambda x, n: x * n if isinstance(n, int) else x + n,
        mesh=mesh,
        static_argnums=1,
        cache_dir=cache,
        settings=QUICK,
    )
    np.testing.assert_allclose(step(X, 1), X)
    np.testing.assert_allclose(step(X, 1.0), X + 1)


def test_what_a_wrapper_donates_must_be_said(mesh, cache, recwarn):
    """Inside of another program, jax.jit gives nothing away."""
    args = jnp.ones((8, 8)), jnp.ones((8, 8))
    how = {"mesh": mesh, "preset": "data_parallel", "cache_dir": cache}
    how["settings"] = PlannerSettings(race=False)

    def step(w, x):
        return w - (x @ w), x.sum()

    jitted = jax.jit(step, donate_argnums=0)
    with pytest.warns(UserWarning, match="Give cfp donate_argnums"):
        assert cfp.plan(jitted, *args, **how).donated == (False, False)
    recwarn.clear()
    assert cfp.plan(jitted, *args, donate_argnums=0, **how).donated == (True, False)
    cfp.plan(jax.jit(step), *args, **how)
    assert not [w for w in recwarn if w.category is UserWarning]


def test_a_plan_refuses_another_type(quick):
    made = quick(lambda x, n: x * n, X, 1)
    step = made.apply(lambda x, n: x * n)
    np.testing.assert_allclose(step(X, 3), X * 3)
    with pytest.raises(cfp.PlanMismatch, match=r"int32\[\], got float32"):
        step(X, 0.5)


def test_a_saved_plan_knows_its_static_arguments(quick, mesh, tmp_path):
    quick(scaled, X, "gram", 3, static_argnums=(1, 2)).save(tmp_path / "plan.json")
    step = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh).apply(scaled)
    np.testing.assert_allclose(step(X, "gram", 3), X @ X.T * 3, rtol=1e-6)


def test_a_pin_may_name_an_axis_of_size_one(quick):
    mesh = jax.make_mesh((4, 1), ("x", "y"), devices=jax.devices()[:4])
    made = quick(scaled, X, mesh=mesh, pins={"x": jax.P("x", "y")})
    assert made.arg_specs[0] == (("x",), ())


def test_expected_arrays_that_another_step_was_donated(mesh, cache):
    """JAX ends the process where it raises nothing."""
    weights = {"a": X + 1, "b": X + 2}
    step = cfp.parallelize(
        lambda w, x: x @ w["a"].T + (w["b"] @ w["b"].T).sum(),
        mesh=mesh,
        cache_dir=cache,
        settings=QUICK,
    )
    step(weights, X)
    weights = jax.device_put(weights, step.plan.in_shardings[0])
    expected = [step(weights, X) for _ in range(3)][-1]
    gone = dict(weights)
    jax.jit(lambda b: b * 2, donate_argnums=0)(gone["b"])
    assert gone["b"].is_deleted()
    with pytest.raises(cfp.PlanMismatch, match="'w/b' is gone"):
        step(gone, X)
    again = {"a": X + 1, "b": X + 2}
    np.testing.assert_allclose(step(again, X), expected, rtol=1e-6)


def test_a_donated_argument_that_is_not_returned_is_named(quick):
    """The result takes the memory of an argument of equal shape."""

    def step(w, moments, x):
        return w - moments * x.sum()

    made = quick(step, X, X, X, donate_argnums=1)
    run, moments = made.apply(step), jax.device_put(X + 1, made.in_shardings[1])
    w = run(X, moments, X)
    gone = "'moments' is gone: it was donated .* Return its new value from the step"
    with pytest.raises(cfp.PlanMismatch, match=gone):
        run(w, moments, X)


def test_arrays_without_elements(quick):
    def step(w, z):
        return z @ w, w * 2

    args = jnp.ones((16, 8)), jnp.zeros((0, 16))
    made = quick(step, *args)
    empty, doubled = made.apply(step)(*args)
    assert empty.shape == (0, 8)
    np.testing.assert_allclose(doubled, 2 * args[0])


def test_a_planned_step_is_not_traced_again(quick):
    made = quick(scaled, X)
    with pytest.raises(cfp.StepNotTraceable, match="Plan the outer function"):
        jax.jit(made.apply(scaled))(X)
    with pytest.raises(cfp.StepNotTraceable, match="Plan the outer function"):
        jax.grad(lambda x: cfp.parallelize(scaled)(x).sum())(X)
    run = made.apply(scaled)
    run(X)  # Compiled: the tracer arrives at its dispatch.
    with pytest.raises(cfp.StepNotTraceable, match="Plan the outer function"):
        jax.grad(lambda x: run(x).sum())(X)


@pytest.mark.smoke
def test_types_of_less_than_a_byte(mesh, cache):
    def step(w, x):
        return x @ w.astype(jnp.float32), w

    args = jnp.arange(64).reshape(8, 8).astype(jnp.int4), X
    run = functools.partial(cfp.plan, mesh=mesh, cache_dir=cache, settings=QUICK)
    if jax.__version_info__ < (0, 11):  # JAX itself cannot run it.
        with pytest.raises(cfp.StepNotTraceable, match="or newer"):
            run(step, *args)
    else:
        assert_same(run(step, *args).apply(step)(*args), step(*args))


@pytest.mark.parametrize("before", ["cfp.attention; cfp.plan", "pass"])
def test_public_functions_stand_before_packages_of_their_names(before):
    code = f"import cfp; {before}; import cfp.variants\n"
    code += "from cfp.kernels import ring; from cfp.plan.plan import Plan\n"
    code += "assert callable(cfp.attention) and callable(cfp.plan)\n"
    code += "assert cfp.Plan is Plan and ring.__name__ == 'cfp.kernels.ring'\n"
    subprocess.run([sys.executable, "-c", code], check=True)
