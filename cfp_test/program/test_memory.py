"""State in the memory of the host stays there, as it does without cfp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cfp
from cfp.analysis.analyze import analyze
from cfp.analysis.layout import lay_out
from cfp.analysis.presets import presets
from cfp.context import DetailedSettings
from cfp.cost.memory import argument_bytes, results_beside
from cfp.program.constrain import Constraints
from cfp.program.part import cut_part, lower_part
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.covering import cover_values

HOST, Space = "pinned_host", jax.memory.Space
SETTINGS = DetailedSettings(per_kind=1, in_context=False)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(
        (2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )


def state_on(mesh):
    weights = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    everywhere = NamedSharding(mesh, P())
    return {
        "momentum": jax.device_put(0 * weights, everywhere.with_memory_kind(HOST)),
        "weights": jax.device_put(weights, everywhere),
    }


def data():
    return jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), jnp.float32)


def update(weights, momentum, x):
    def loss(weights):
        return jnp.mean((jnp.tanh(x @ weights) @ weights.T - x) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    momentum = 0.9 * momentum + gradient
    return weights - 0.1 * momentum, momentum, value


def to_spaces(mesh):
    def step(state, x):
        momentum = jax.device_put(state["momentum"], Space.Device)
        weights, momentum, loss = update(state["weights"], momentum, x)
        return {
            "momentum": jax.device_put(momentum, Space.Host),
            "weights": weights,
        }, loss

    return step


def to_shardings(mesh):
    device = NamedSharding(mesh, P())

    def step(state, x):
        momentum = jax.device_put(state["momentum"], device)
        weights, momentum, loss = update(state["weights"], momentum, x)
        host = device.with_memory_kind(HOST)
        return {"momentum": jax.device_put(momentum, host), "weights": weights}, loss

    return step


def by_jit(mesh):
    """A jax.jit whose shardings say where state is."""
    device = NamedSharding(mesh, P())
    state = {"momentum": device.with_memory_kind(HOST), "weights": device}

    def step(state, x):
        momentum = jax.device_put(state["momentum"], Space.Device)
        weights, momentum, loss = update(state["weights"], momentum, x)
        return {"momentum": momentum, "weights": weights}, loss

    return jax.jit(step, in_shardings=(state, device), out_shardings=(state, device))


@cover_values(make=[to_spaces, to_shardings, by_jit], preset=["fully_sharded", None])
def test_state_in_the_memory_of_the_host_comes_back_there(make, preset, mesh, tmp_path):
    step, x = make(mesh), data()
    run = cfp.parallelize(
        step,
        mesh=mesh,
        preset=preset,
        cache_dir=tmp_path,
        settings=SETTINGS,
        quiet=True,
        donate_argnums=0 if make is not by_jit else (),
    )
    plain = step if make is by_jit else jax.jit(step)
    found, wanted = state_on(mesh), state_on(mesh)
    for _ in range(3):
        found, loss = run(found, x)
        wanted, expected = plain(wanted, x)
        for name, kind in (("momentum", HOST), ("weights", "device")):
            assert found[name].sharding.memory_kind == kind
            assert wanted[name].sharding.memory_kind == kind
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    plan = run.plan
    shardings = jax.tree.map(lambda leaf: leaf.sharding, found)
    assert plan.out_shardings[0] == shardings == plan.in_shardings[0]
    assert plan.raced is not None and plan.compile_bound().raced


def test_what_is_on_the_device_is_put_where_the_step_takes_it(mesh, tmp_path):
    step, x = to_spaces(mesh), data()
    state = state_on(mesh)
    how = {"mesh": mesh, "preset": "fully_sharded", "cache_dir": tmp_path}
    plan = cfp.plan(step, state, x, settings=SETTINGS, quiet=True, **how)
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    assert loaded.bind(step, state, x).in_shardings == plan.in_shardings
    run = loaded.compile(step, state, x)
    on_device = jax.device_put(
        state, NamedSharding(mesh, P()).with_memory_kind("device")
    )
    found, _ = run(on_device, x)
    assert found["momentum"].sharding.memory_kind == HOST


def test_parts_have_everything_on_the_devices(mesh):
    """GPUs are given such ops; for CPUs JAX writes none."""
    step = flatten_step(to_spaces(mesh), (state_on(mesh), data()))
    program, _ = trace(step, jax.sharding.AbstractMesh((2,), ("x",)))
    moving = [op for op in program.ops if "annotate_device_placement" in op.structure]
    assert len(moving) >= 2 and all(op.rule is not None for op in moving)
    part = cut_part(program, [moving[0].id, moving[0].id + 1])
    specs = [
        [((),) * len(program.values[v].shape) for v in side]
        for side in (part.inputs, part.outputs)
    ]
    nothing = Constraints({}, {})
    lowered = lower_part(program, part, mesh, nothing, *specs)
    assert "annotate_device_placement" not in lowered.as_text()


def test_what_the_host_has_is_no_memory_of_the_devices(mesh):
    step = flatten_step(to_spaces(mesh), (state_on(mesh), data()))
    program, _ = trace(step, mesh)
    analysis = analyze(program, (("x", 2),))
    layout = lay_out(analysis.frame, presets(analysis.frame)["data_parallel"])
    needs = {
        name: argument_bytes(layout, i) for i, name in enumerate(program.arg_names)
    }
    assert needs["state/momentum"] == 0 and needs["state/weights"] == 4 * 8 * 16


RETURNED = {
    # The returned momentum and another result; results with device memory of their own.
    "unchanged": (lambda old, new: (old, None), []),
    "updated": (lambda old, new: (jax.device_put(new, Space.Host), None), []),
    "twice": (lambda old, new: (jax.device_put(new, Space.Host),) * 2, []),
    "on both": (lambda old, new: (jax.device_put(new, Space.Host), new), [2]),
    "on the device": (lambda old, new: (jax.device_put(old, Space.Device), None), [0]),
}


@pytest.mark.parametrize("where", RETURNED)
@pytest.mark.parametrize("donated", [True, False])
def test_results_in_the_memory_of_the_host_need_none_of_the_devices(
    where, donated, mesh
):
    returned, wanted = RETURNED[where]

    def step(state, x):
        new = jax.device_put(state["momentum"], Space.Device) * 0.9 + x.sum()
        momentum, more = returned(state["momentum"], new)
        return {"momentum": momentum, "weights": state["weights"] - new}, more

    how = {"donate_argnums": 0} if donated else {}
    flat = flatten_step(step, (state_on(mesh), data()), **how)
    program, _ = trace(flat, jax.sharding.AbstractMesh((2,), ("x",)))  # As for GPUs.
    frame = analyze(program, (("x", 2),)).frame
    found = [place for place, _ in results_beside(frame)]
    assert found == sorted([*wanted, *[1] * (not donated)])


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["plain", "jit"])
def test_an_argument_that_is_handed_back_stays_where_it_is(wrap, mesh, tmp_path):
    state = state_on(mesh)

    def step(momentum, x):
        return wrap(lambda *args: args)(momentum, x @ x)

    how = {"mesh": mesh, "preset": "data_parallel", "cache_dir": tmp_path}
    plan = cfp.plan(step, state["momentum"], data(), quiet=True, **how)
    found = plan.compile(step, state["momentum"], data())(state["momentum"], data())
    kinds = [leaf.sharding.memory_kind for leaf in found]
    assert kinds == [
        leaf.sharding.memory_kind for leaf in jax.jit(step)(state["momentum"], data())
    ]
    assert kinds[0] == HOST
    np.testing.assert_array_equal(found[0], state["momentum"])


def with_own_derivative(put):
    found = jax.custom_jvp(put)
    found.defjvp(lambda at, along: (found(*at), along[0]))
    return found


INSIDE = {
    "a jit": lambda put, x: jax.jit(lambda x: put(x + 1))(x),
    "a branch": lambda put, x: jax.lax.cond(x[0, 0] > 0, put, put, x),
    "a loop that carries it": lambda put, x: jax.lax.fori_loop(
        0, 3, lambda _, x: put(x), x
    ),
    "a loop that stacks it": lambda put, x: jax.lax.scan(
        lambda x, _: (x + 1, put(x)), x, length=3
    )[1],
    "a while": lambda put, x: jax.lax.while_loop(
        lambda x: x.sum() < 100, lambda x: put(x + 1), x
    ),
    "a checkpoint": lambda put, x: jax.checkpoint(put)(x),
    "a barrier": lambda put, x: jax.lax.optimization_barrier(put(x)),
    "a derivative": lambda put, x: with_own_derivative(put)(x),
    "several rows": lambda put, x: jax.vmap(put)(x),
}


@pytest.mark.parametrize("where", INSIDE)
def test_a_jit_inside_that_puts_its_result_into_the_host(where, mesh):
    """Plain jax.jit around it has it on the device, and says nothing."""
    host = NamedSharding(mesh, P()).with_memory_kind(HOST)
    put = jax.jit(lambda x: x * 2, out_shardings=host)

    def step(x, y):
        return x @ y, INSIDE[where](put, x)

    flat = flatten_step(step, (jnp.ones((8, 8)), jnp.ones((8, 8))))
    assert flat.result_memory_kinds == ("", HOST)


def test_state_that_a_jit_inside_puts_into_the_host_is_there(mesh, tmp_path):
    host = NamedSharding(mesh, P()).with_memory_kind(HOST)
    put = jax.jit(lambda m, g: 0.9 * m + g, out_shardings=host)

    def step(weights, momentum, x):
        on_device = jax.device_put(momentum, Space.Device)
        grads = jax.grad(lambda w: jnp.square(x @ w).mean())(weights)
        momentum = jax.checkpoint(put)(on_device, grads)
        return weights - 0.1 * grads, momentum

    args = jnp.ones((8, 8)), jax.device_put(jnp.ones((8, 8)), host), jnp.ones((8, 8))
    how = {"mesh": mesh, "preset": "data_parallel", "cache_dir": tmp_path}
    plan = cfp.plan(step, *args, settings=SETTINGS, quiet=True, **how)
    weights, momentum = plan.compile(step, *args)(*args)
    assert momentum.sharding.memory_kind == HOST
    assert weights.sharding.memory_kind == "device"
    expected = step(*args)
    np.testing.assert_allclose(weights, expected[0], rtol=1e-5)
    np.testing.assert_allclose(momentum, expected[1], rtol=1e-5)
