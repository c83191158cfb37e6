"""Modules and variables at several places: one object, as under nnx.jit."""

from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict

import cfp
from cfp.checking.trial import run_trial
from cfp.errors import PlanMismatch, StepNotTraceable
from cfp.program.calling import released, shared_places, together
from cfp.program.step import flatten_step
from cfp.targets import resolve
from cfp_test.support.checking import make_mesh

TOKENS = jnp.arange(32).reshape(8, 4) % 16
ADAM = optax.adam(1e-2)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.out = self.embed

    def __call__(self, tokens):
        return self.out.attend(self.embed(tokens))


def made(kind=nnx.ModelAndOptimizer):
    net = Net(nnx.Rngs(0))
    return net, kind(net, ADAM, wrt=nnx.Param)


def train(net, optimizer, tokens):
    loss_fn = optax.softmax_cross_entropy_with_integer_labels
    loss, grads = nnx.value_and_grad(lambda net: loss_fn(net(tokens), tokens).mean())(
        net
    )
    if isinstance(optimizer, nnx.ModelAndOptimizer):
        optimizer.update(grads)
    else:
        optimizer.update(net, grads)
    return net, optimizer, loss


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((("x", 4),))


def planned(step, *args, mesh, **options):
    options = {"preset": "fully_sharded", "quiet": True, **options}
    return cfp.plan(step, *args, mesh=mesh, **options)


def test_a_pin_may_use_a_later_name(mesh):
    """A whole name, or an end, that no first name has."""
    for pattern in ("net/out/embedding", "out/embedding/value"):
        pins = {pattern: jax.P(None, "x")}
        plan = planned(train, *made(), TOKENS, mesh=mesh, pins=pins)
        pinned = [plan.arg_names[i] for i in plan.pinned]
        assert pinned == ["net/embed/embedding/value"], "not its moments"
    pins = {"optimizer/*/embedding": jax.P()}
    plan = planned(train, *made(), TOKENS, mesh=mesh, pins=pins)
    assert [plan.arg_names[i].split("/")[0] for i in plan.pinned] == ["optimizer"] * 2


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
@pytest.mark.parametrize("kind", [nnx.ModelAndOptimizer, nnx.Optimizer])
def test_training_keeps_aliases_as_under_nnx_jit(kind, wrap, mesh, tmp_path):
    step = wrap(train)
    plan = planned(step, *made(kind), TOKENS, mesh=mesh, donate_argnums=(0, 1))
    assert not any("out" in name or "/model" in name for name in plan.arg_names)
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    for run in (plan.apply(step), loaded.apply(step)):
        net, optimizer = plan.init(lambda: made(kind))
        other, its_optimizer = made(kind)
        in_place = nnx.jit(train)
        for _ in range(3):
            net, optimizer, loss = run(net, optimizer, TOKENS)
            _, _, expected = in_place(other, its_optimizer, TOKENS)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
            assert net.out is net.embed and getattr(optimizer, "model", net) is net
        assert max(d.relative_l2 for d in cfp.compare(net, other)) < 1e-4
    shardings = jax.tree.structure(plan.in_shardings[:2])
    assert shardings == jax.tree.structure(made(kind))
    net, *_ = plan.out_shardings
    assert net.out is net.embed


class Held(nnx.Module):
    def __init__(self, weight):
        self.m = weight


def held(value=1.0):
    return Held(nnx.Param(jnp.full((4, 4), value)))


def halve(a, b, x):
    a.m[...] = a.m[...] / 2
    return a, b, x @ b.m[...]


X = jnp.ones((4, 4))


def test_the_places_of_an_object():
    one, other = held(), held(2.0)
    tree = [one, {"a": one.m, "b": (other, one)}, other.m]
    paths = [
        [jax.tree_util.keystr(path, simple=True, separator="/") for path in pair]
        for pair in shared_places(together(tree))
    ]
    assert paths == [["0/m", "1/a"], ["0", "1/b/1"], ["1/b/0/m", "2"]]
    again = released(jax.tree.map(lambda x: x + 1, together(tree)))
    assert again[1]["b"][1] is again[0] and again[1]["a"] is again[0].m
    assert again[2] is again[1]["b"][0].m and float(again[2][0, 0]) == 3
    frozen = FrozenDict({"x": X})
    for values in ([one, other], [frozen, frozen], [X, X]):
        assert together(values) is values


def test_one_object_that_is_two_later_is_refused(mesh):
    one = held()
    step = planned(halve, one, one, X, mesh=mesh).apply(halve)
    a, b, result = step(one, one, X)
    assert a is b
    np.testing.assert_allclose(result, X @ jnp.full((4, 4), 0.5))
    # A clone holds the same arrays, and is another object.
    for later in (nnx.clone(a), one):
        with pytest.raises(PlanMismatch, match="a and b are two objects, and were one"):
            step(a, later, X)
    copy = jax.tree.map(jnp.copy, a)  # As the message says.
    assert planned(halve, a, copy, X, mesh=mesh).apply(halve)(a, copy, X)
    with pytest.raises(PlanMismatch, match="a and b are two objects"):
        planned(halve, one, one, X, mesh=mesh).apply(halve)(one, held(), X)


def test_a_module_that_cannot_change_is_a_value_at_each_place(mesh):
    """An average begins as its model, and then differs from it."""

    def averaged(model, average, x):
        model = jax.tree.map(lambda a: a / 2, model)
        average = jax.tree.map(lambda a, b: (a + b) / 2, average, model)
        return model, average, jax.vmap(average)(x)

    one = eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(0))
    plan = planned(averaged, one, one, X, mesh=mesh)
    assert plan.arg_names == ("model/weight", "average/weight", "x")
    step, model, average, result = plan.apply(averaged), one, one, None
    for _ in range(2):
        model, average, result = step(model, average, X)
    np.testing.assert_allclose(result, X @ one.weight.T / 2, rtol=1e-6)


@jax.tree_util.register_dataclass
@dataclass
class Params:
    kernel: jax.Array


def in_place(params, average, x):
    params.kernel = params.kernel / 2
    average.kernel = (average.kernel + params.kernel) / 2
    return params, average, x @ average.kernel


def by_replacing(params, average, x):
    params = replace(params, kernel=params.kernel / 2)
    average = jax.tree.map(lambda a, b: (a + b) / 2, average, params)
    return params, average, x @ average.kernel


@pytest.mark.parametrize("step", [in_place, by_replacing])
def test_a_dataclass_is_a_value_at_each_place_as_under_jit(step, mesh):
    """An average may begin as the object that holds the parameters."""
    found, expected = [], []
    for run, to in (
        (planned(step, *[Params(X)] * 2, X, mesh=mesh).apply(step), found),
        (jax.jit(step), expected),
    ):
        params = average = Params(X)
        for _ in range(2):
            params, average, result = run(params, average, X)
            to.append(result)
        assert params is not average
    np.testing.assert_allclose(found, expected, rtol=1e-6)

    def forgotten(params, x):
        params.kernel = params.kernel / 2
        return x @ params.kernel

    with pytest.raises(StepNotTraceable, match="changes params/kernel in place"):
        _ = flatten_step(forgotten, (Params(X), X)).traced


def test_variables_of_modules_that_are_dataclasses_stay_shared(mesh):
    @dataclass
    class Typed(nnx.Module):
        m: nnx.Param

    one = Typed(nnx.Param(X))
    a, b, result = planned(halve, one, one, X, mesh=mesh).apply(halve)(one, one, X)
    np.testing.assert_allclose(result, X @ X / 2)
    assert a.m is b.m


def test_a_loaded_plan_names_both_places_of_an_object(mesh, tmp_path):
    planned(halve, held(), held(), X, mesh=mesh).save(tmp_path / "plan.json")
    one, loaded = held(), cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    for run in (loaded.apply(halve), cfp.parallelize(halve, plan=loaded)):
        with pytest.raises(PlanMismatch, match="a and b are one object, and were two"):
            run(one, one, X)


def test_two_objects_that_are_one_later_are_refused(mesh):
    step = planned(halve, held(), held(), X, mesh=mesh).apply(halve)
    a, b, _ = step(held(), held(), X)
    a, b, result = step(a, b, X)
    assert a is not b
    np.testing.assert_allclose(result, X @ X)
    with pytest.raises(PlanMismatch, match="a and b are one object, and were two"):
        step(a, a, X)
    a, b, _ = step(a, nnx.clone(a), X)  # Two objects over one array.
    assert float(a.m[0, 0]) == 0.125 and float(b.m[0, 0]) == 0.25


def test_a_plan_is_not_made_again_for_an_object_that_was_left_behind(mesh, tmp_path):
    def forgetful(a, b, x):
        return halve(a, b, x)[::2]

    options = {"preset": "data_parallel", "quiet": True, "cache_dir": tmp_path}
    step, one = cfp.parallelize(forgetful, mesh=mesh, **options), held()
    a, _ = step(one, one, X)
    with pytest.raises(
        PlanMismatch, match=r"'forgetful' is not planned again, .*a and b"
    ):
        step(a, one, X)


def test_a_static_argument_shares_nothing():
    one = held()
    with pytest.raises(StepNotTraceable, match="A static argument and another"):
        flatten_step(halve, (one, one, X), static_argnums=1)
    assert flatten_step(halve, (one, held(), X), static_argnums=1)


def test_a_step_of_jax_jit_has_a_copy_for_each_place(mesh):
    step, one = jax.jit(halve), held()
    plan = planned(step, one, one, X, mesh=mesh)
    assert len(plan.arg_names) == 3
    a, b, result = plan.apply(step)(one, one, X)
    np.testing.assert_allclose(result, X @ X)
    assert a is not b


def target():
    return train, (*made(), TOKENS)


def backward(optimizer, net, tokens):
    net, _, loss = train(net, optimizer, tokens)
    return optimizer, net, loss


def reverse():
    return backward, (*made()[::-1], TOKENS)


@pytest.mark.parametrize("name", ["target", "reverse"])
def test_checked_steps_keep_aliases(name, mesh, tmp_path):
    found = resolve(f"cfp_test.program.test_shared:{name}")
    plan = planned(found.step, *found.args, mesh=mesh, cache_dir=tmp_path)
    trial = run_trial(plan, found, steps=3, check=True)
    assert not trial.failures and len(trial.every) == 18
    losses = [step.metrics["result[2]"] for step in trial.steps]
    assert len(set(losses)) == 3
