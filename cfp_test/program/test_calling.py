"""Modules with leaves that are no arrays, as arguments and results."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import cfp
from cfp.errors import PlanMismatch, StepNotTraceable
from cfp.program.calling import Fixed, fixed, has_fixed, released
from cfp.program.step import flatten_step

X = jnp.ones((8, 16))


class Net(eqx.Module):
    up: eqx.nn.Linear
    drop: eqx.nn.Dropout
    down: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.up = eqx.nn.Linear(16, 32, key=one)
        self.drop = eqx.nn.Dropout(0.25)
        self.down = eqx.nn.Linear(32, 16, key=two)

    def __call__(self, x, key):
        return self.down(self.drop(jax.nn.relu(self.up(x)), key=key))


class Acting(eqx.Module):
    """With functions, text and numbers among its leaves."""

    net: Net
    act: object
    kind: str
    scale: float

    def __call__(self, x, key):
        return self.scale * self.act(self.net(x, key))


def nets():
    net = Net(jax.random.key(0))
    return net, Acting(net, jnp.tanh, "plain", 0.5)


def step_of(tx):
    def train_step(net, opt, x, key):
        def loss_fn(net):
            keys = jax.random.split(key, len(x))
            return jnp.mean((jax.vmap(net)(x, keys) - x) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(net)
        updates, opt = tx.update(grads, opt, eqx.filter(net, eqx.is_inexact_array))
        return eqx.apply_updates(net, updates), opt, loss

    return train_step


@pytest.mark.parametrize("which", [0, 1], ids=["settings", "functions"])
def test_modules_train_as_under_filter_jit(which, tmp_path):
    """Planned, five steps, saved, and used again."""
    tx = optax.adam(1e-2)
    net = nets()[which]
    opt, step = tx.init(eqx.filter(net, eqx.is_inexact_array)), step_of(tx)
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    plan = cfp.plan(
        step, net, opt, X, jax.random.key(1), mesh=mesh, preset="data_parallel"
    )
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    planned, expected = loaded.apply(step), eqx.filter_jit(step)
    mine, theirs = (net, opt), (net, opt)
    for number in range(5):
        key = jax.random.key(number)
        *mine, loss = planned(*mine, X, key)
        *theirs, other = expected(*theirs, X, key)
        np.testing.assert_allclose(loss, other, rtol=1e-5)
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    assert max(d.relative_l2 for d in cfp.compare(mine, theirs)) < 1e-4
    place = plan.in_shardings[0]
    assert jax.tree.structure(place) == jax.tree.structure(
        eqx.filter(net, eqx.is_array)
    )
    made = plan.init(lambda key: nets()[which], jax.random.key(0))
    assert jax.tree.structure(made) == jax.tree.structure(net)
    bound = loaded.bind(step, net, opt, X, jax.random.key(1))
    assert jax.tree.structure(bound.out_shardings[0]) == jax.tree.structure(place)


def test_what_is_fixed():
    net, acting = nets()
    assert [x for x in jax.tree.leaves(net) if not eqx.is_array(x)] == [0.25, False]
    assert all(map(eqx.is_array, jax.tree.leaves(fixed((net, acting)))))
    assert released(fixed((net, acting))) == (net, acting)
    assert has_fixed(fixed({"net": net})) and not has_fixed(net)


def test_numbers_of_other_modules_stay_arguments():
    state = TrainState.create(
        apply_fn=None, params={"w": X}, tx=optax.adam(optax.constant_schedule(0.1))
    )
    assert isinstance(state.step, int)
    assert fixed(state) is state
    flags = {"done": True, "name": "plain", "x": X}
    assert fixed(flags) is not None and not has_fixed(fixed(flags))


def test_fixed_values_of_equal_worth_differ():
    assert Fixed(True, bool) != Fixed(1, int)


@pytest.mark.explained("The arguments' structure changed")
def test_another_setting_is_refused():
    net, acting = nets()
    step = flatten_step(lambda net, x: jax.vmap(net)(x, None), (acting, X))
    other = eqx.tree_at(lambda net: net.act, acting, jnp.sin)
    with pytest.raises(PlanMismatch, match=r"net/act = .*sin.*, was <"):
        step.flatten((other, X), {})
    with pytest.raises(PlanMismatch, match="missing: net/net/up/weight"):
        step.flatten((net, X), {})


def run(net, x):
    return jax.vmap(net)(x, None)


def acting(make):
    net = eqx.nn.inference_mode(Net(jax.random.key(0)))
    return Acting(net, make(), "plain", 0.5)


LONG = "a" * 80


@pytest.mark.parametrize(
    "make, said",
    [
        (
            lambda: partial(jax.nn.gelu, approximate=True),
            "is another functools.partial(<function gelu>, approximate=True): make it "
            "once, outside. ",
        ),
        (lambda: lambda x: x, "<lambda>>: make it once, outside. "),
        (iter([LONG + "1", LONG + "2"]).__next__, "aa2', was ...aaaa"),
    ],
)
def test_a_function_made_again_is_named_once(make, said):
    step = flatten_step(run, (acting(make), X))
    with pytest.raises(cfp.PlanMismatch) as refused:
        step.flatten((acting(make), X), {})
    assert said in str(refused.value) and " at 0x" not in str(refused.value)


def test_a_module_made_again_is_planned_again_with_a_warning(tmp_path):
    """Also with quiet=True."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    options = {"preset": "data_parallel", "cache_dir": tmp_path, "quiet": True}
    planned = cfp.parallelize(run, mesh=mesh, **options)
    expected = planned(acting(lambda: lambda x: x + 1), X)
    with pytest.warns(UserWarning, match=r"'run' is planned again, .*: make it once"):
        found = planned(acting(lambda: lambda x: x + 1), X)
    np.testing.assert_allclose(found, expected)


def test_swapped_arguments_of_a_call_are_named():
    planned = flatten_step(lambda w, x: x @ w["up"], ({"up": X}, X))
    assert len(planned.flatten(({"up": X}, X), {})) == 2
    with pytest.raises(cfp.PlanMismatch, match="planned: 'w' and 'x' are swapped"):
        planned.flatten((X, {"up": X}), {})


def test_a_function_made_again_runs_in_its_own_trace(tmp_path):
    """A plan accepts other values in closures; another operation is another program."""
    traced = []
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    options = {"preset": "data_parallel", "cache_dir": tmp_path, "quiet": True}

    def adding(number):
        return acting(lambda: lambda x: traced.append(number) or x + number)

    planned = cfp.plan(run, adding(1.0), X, mesh=mesh, **options).apply(run)
    for net in [adding(number) for number in (1.0, 1.0, 2.0)] * 2:
        np.testing.assert_allclose(planned(net, X), run(net, X), rtol=1e-6)
        traced.pop()  # By the call without a plan.
    assert traced == [1.0, 1.0, 1.0, 2.0]
    with pytest.raises(cfp.PlanMismatch, match=r"structure changed .*net/act = "):
        planned(acting(lambda: jnp.sin), X)


def test_what_cannot_be_hashed_is_refused():
    _, acting = nets()
    odd = eqx.tree_at(lambda net: net.act, acting, np.array(["adam"]))
    with pytest.raises(StepNotTraceable, match="'net/act' is a <U4"):
        flatten_step(lambda net: net, (odd,))
