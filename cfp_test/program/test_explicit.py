"""Steps with a shard_map of the user's own, on meshes of any kind of axes."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cfp
from cfp.context import DetailedSettings
from cfp_test.support.covering import cover_values

HALVES = jax.devices()[:2], jax.devices()[2:4]


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((4,), ("x",), (request.param,), devices=jax.devices()[:4])


def step_on(mesh):
    @jax.shard_map(mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    def layer(x, weights):
        return jnp.tanh(x @ weights)

    def step(weights, x):
        def loss(weights):
            hidden = layer(x, weights["up"])
            return jnp.mean((hidden @ weights["down"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    return step


@cover_values(
    preset=["data_parallel", "fully_sharded", None], shapes_only=[False, True]
)
def test_arguments_are_traced_with_their_shardings(preset, shapes_only, mesh, tmp_path):
    random = np.random.default_rng(0)

    def placed(spec):
        array = jnp.asarray(random.normal(size=(8, 8)), jnp.float32)
        return jax.device_put(array, NamedSharding(mesh, spec))

    args = {"up": placed(P()), "down": placed(P())}, placed(P("x"))
    step, planned_for = step_on(mesh), args
    if shapes_only:
        planned_for = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), args
        )
    plan = cfp.plan(
        step,
        *planned_for,
        mesh=mesh,
        preset=preset,
        cache_dir=tmp_path,
        quiet=True,
        settings=DetailedSettings(race=False, per_kind=1, in_context=False),
    )
    run = plan.compile_bound()
    weights, loss = run(*args)
    expected, expected_loss = jax.jit(step)(*args)
    np.testing.assert_allclose(np.asarray(loss), np.asarray(expected_loss), rtol=1e-5)
    for name in expected:
        found, wanted = np.asarray(weights[name]), np.asarray(expected[name])
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    run(weights, args[1])
    if preset == "data_parallel":
        assert plan.arg_specs[-1] == (("x",), ())
    if preset == "fully_sharded":
        assert all(any(spec) for spec in plan.arg_specs)
        text = run.as_text()
        assert "all-gather" in text and "all-reduce" in text


def test_shardings_that_explicit_axes_refuse_are_no_obstacle(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:4])
    x, weights = (
        jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec))
        for spec in (P("x"), P(None, "x"))
    )

    def step(weights, x):
        return jnp.sum(x @ weights)

    with pytest.raises(Exception, match="dot_general"):
        jax.jit(step)(weights, x)
    settings = DetailedSettings(race=False, per_kind=1, in_context=False)
    how = {"mesh": mesh, "cache_dir": tmp_path, "settings": settings, "quiet": True}
    assert cfp.plan(step, weights, x, **how).compile_bound()(weights, x) == 8**3


@pytest.mark.parametrize("inside", [True, False])
def test_a_plan_holds_inside_and_outside_of_set_mesh(inside, mesh, tmp_path):
    """JAX's explicit mode would trace lookups and sums to other operations."""

    def step(table, tokens):
        def loss(table):
            logits = jnp.tanh(table[tokens]) @ table.T
            return -jax.nn.log_softmax(logits)[jnp.arange(8), tokens].mean()

        value, gradient = jax.value_and_grad(loss)(table)
        return table - gradient, value

    args = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16), np.arange(8)
    expected, expected_loss = jax.jit(step)(*args)
    how = {"mesh": mesh, "preset": "data_parallel", "cache_dir": tmp_path}
    with jax.set_mesh(mesh) if inside else nullcontext():
        plan = cfp.plan(step, *args, **how)
    with nullcontext() if inside else jax.set_mesh(mesh):
        table, loss = plan.apply(step)(*args)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(table, expected, rtol=1e-5)


def test_plans_use_the_devices_of_set_mesh(tmp_path):
    """Also a plan from a file, and a later plan for other devices."""
    first, other = (jax.make_mesh((2,), ("x",), devices=d) for d in HALVES)
    how = {"preset": "data_parallel", "cache_dir": tmp_path, "quiet": True}
    x = np.ones((4, 8), np.float32)
    cfp.plan(jnp.tanh, x, mesh=first, **how).save(tmp_path / "plan.json")
    loaded = cfp.parallelize(jnp.tanh, plan=tmp_path / "plan.json", quiet=True)
    anew = cfp.parallelize(jnp.tanh, **how)
    assert anew(x).sharding.device_set == {*jax.devices()}
    with jax.set_mesh(other):
        assert loaded(x).sharding.device_set == {*HALVES[1]}
        with pytest.warns(UserWarning, match="planned again"):
            assert anew(x).sharding.device_set == {*HALVES[1]}


def test_plans_use_the_order_of_set_mesh(tmp_path):
    """JAX refuses devices of another order; a mesh of other devices is named."""
    first = jax.make_mesh((2,), ("x",), devices=HALVES[0])
    back = Mesh(np.array(HALVES[0][::-1]), ("x",))
    how = {"preset": "data_parallel", "cache_dir": tmp_path, "quiet": True}
    x = np.ones((4, 8), np.float32)
    cfp.plan(jnp.tanh, x, mesh=first, **how).save(tmp_path / "plan.json")
    loaded = cfp.parallelize(jnp.tanh, plan=tmp_path / "plan.json", quiet=True)
    anew = cfp.parallelize(jnp.tanh, **how)
    with jax.set_mesh(first):
        anew(x)
    with jax.set_mesh(back):
        assert [*loaded(x).sharding.mesh.devices] == [*back.devices]
        with pytest.warns(UserWarning, match="planned again"):
            assert [*anew(x).sharding.mesh.devices] == [*back.devices]
    four, said = jax.make_mesh((4,), ("x",)), r"these are 4 .* Use the plan's devices"
    with jax.set_mesh(four), pytest.raises(cfp.PlanMismatch, match=said):
        cfp.Plan.load(tmp_path / "plan.json").apply(jnp.tanh)(x)


def test_a_step_follows_set_mesh_to_other_devices_of_equal_axes(tmp_path):
    """JAX's own key has axes, and no devices. A mesh that is given stays."""
    meshes = [jax.make_mesh((2,), ("x",), devices=d) for d in HALVES]
    how = {"preset": "data_parallel", "cache_dir": tmp_path, "quiet": True}
    x = np.ones((4, 8), np.float32)
    cfp.plan(jnp.tanh, x, mesh=meshes[0], **how).save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json")
    anew = cfp.parallelize(jnp.tanh, **how)
    moving = [loaded.apply(jnp.tanh), cfp.parallelize(jnp.tanh, plan=loaded), anew]
    given = cfp.parallelize(jnp.tanh, mesh=meshes[0], **how)
    staying = [given, loaded.on(meshes[0]).apply(jnp.tanh)]
    with jax.set_mesh(meshes[0]):
        for run in [*moving, *staying]:
            assert run(x).sharding.device_set == {*HALVES[0]}
    with jax.set_mesh(meshes[1]):
        for run in moving:
            warns = pytest.warns(UserWarning, match="or mesh of jax.set_mesh")
            with warns if run is anew else nullcontext():
                assert run(x).sharding.device_set == {*HALVES[1]}
        for run in staying:
            assert run(x).sharding.device_set == {*HALVES[0]}
    with jax.set_mesh(meshes[0]):  # Both plans are kept.
        for run in moving:
            assert run(x).sharding.device_set == {*HALVES[0]}
    assert (len(anew.plans), len(given.plans)) == (2, 1)


def test_set_mesh_of_other_devices_than_the_plans_mesh_is_named(tmp_path):
    one, other = (jax.make_mesh((2,), ("x",), devices=d) for d in HALVES)
    how = {"preset": "data_parallel", "cache_dir": tmp_path, "quiet": True}
    x = np.ones((4, 8), np.float32)
    plan = cfp.plan(jnp.tanh, x, mesh=one, **how)
    with jax.set_mesh(other), pytest.raises(cfp.CfpError, match=r"\njax.set_mesh, or"):
        plan.apply(jnp.tanh)(x)


def test_a_loaded_plan_is_used_while_jax_traces(tmp_path):
    """JAX then refuses to name the devices of `jax.set_mesh`."""
    x = np.ones((4, 8), np.float32)
    how = {"preset": "data_parallel", "cache_dir": tmp_path}
    cfp.plan(jnp.tanh, x, **how).save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json")
    shape = jax.eval_shape(lambda: loaded.init(lambda: jnp.ones((4, 8))))
    assert shape.shape == (4, 8)


@pytest.mark.parametrize("preset", ["fully_sharded", None])
def test_results_have_the_axis_types_of_the_callers_mesh(preset, mesh, tmp_path):
    def step(weights, x):
        def loss(weights):
            return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    def init():
        return {"up": jnp.ones((16, 32)) / 16, "down": jnp.ones((32, 16)) / 32}

    x = np.ones((8, 16), np.float32)
    with jax.set_mesh(mesh):
        given = mesh if preset else None  # By default that of set_mesh.
        plan = cfp.plan(
            step, jax.eval_shape(init), x, mesh=given, preset=preset, cache_dir=tmp_path
        )
        assert dict(plan.mesh_axes) == dict(mesh.shape)
        run = plan.apply(step)
        weights = plan.init(init)
        batch = plan.place(x, "x")
        for _ in range(2):
            arrays = [*weights.values(), batch]
            assert {a.sharding.mesh.axis_types for a in arrays} == {mesh.axis_types}
            weights, loss = run(weights, batch)
        assert plan.out_shardings[0] == {k: w.sharding for k, w in weights.items()}
        assert loss + 0.0 >= 0.0
        assert jnp.linalg.norm(weights["up"]) > 0.0
        doubled = jax.jit(lambda w: w["up"] * 2)(weights)
    np.testing.assert_allclose(np.asarray(doubled), 2 * np.asarray(weights["up"]))
    expected = init()
    for _ in range(2):
        expected, _ = jax.jit(step)(expected, x)
    for name, found in weights.items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-5)
