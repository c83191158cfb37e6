"""Steps that change modules in place: refused where that would be lost."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from cfp.errors import StepNotTraceable
from cfp.program.step import flatten_step

X = jnp.ones((4, 8))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


def made():
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)


def update(net, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - 1) ** 2))(net)
    optimizer.update(net, grads)
    return loss


def refused(step, *args):
    with pytest.raises(StepNotTraceable) as caught:
        _ = flatten_step(step, args).traced
    return str(caught.value)


def accepted(step, *args):
    return jax.tree.leaves(flatten_step(step, args).traced.out_info)


@pytest.mark.explained(
    "The step changes its arguments in place, and does not return what it changed"
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, nnx.jit])
def test_what_is_learnt_must_be_returned(wrap):
    message = refused(wrap(update), *made(), X)
    assert "'update' changes net/" in message
    assert "in place and does not return them, so that" in message
    assert "Add net and optimizer to the results that it returns" in message
    assert "docs/frameworks.md" in message


def test_all_of_it():
    def train_step(net, optimizer, x):
        return net, update(net, optimizer, x)

    message = refused(train_step, *made(), X)
    assert "changes optimizer/step/value in place and does not return it" in message
    assert "Add optimizer to the results" in message
    net, _ = made()
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    message = refused(train_step, net, optimizer, X)
    assert "optimizer/opt_state/0/mu/down/bias/value" in message
    assert "and 10 more in place" in message


class Held(nnx.Module):
    def __init__(self, *shape):
        self.m = nnx.Variable(jnp.zeros(shape))


def learn(net, x, change=lambda gradient: gradient):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w - x) ** 2).mean())(net.m[...])
    net.m[...] -= change(gradient)
    return loss


def momentum(net, other, x):
    def change(gradient):
        other.m[...] = 0.9 * other.m[...] + gradient
        return other.m[...]

    return learn(net, x, change)


def counter(net, other, x):
    other.m[...] += 1
    return learn(net, x, lambda gradient: gradient / other.m[...].max())


def average(net, other, x):
    loss = learn(net, x)
    other.m[...] = 0.9 * other.m[...] + 0.1 * net.m[...]
    return loss + (x @ other.m[...]).mean()


def batch(net, other, x):
    loss = learn(net, x + other.m[:4])
    other.m[:4] = x
    return loss


def history(net, other, x):
    loss = learn(net, x)
    other.m[...] = jnp.concatenate([other.m[1:], jnp.full((1, 8), loss)])
    return loss + other.m[...].mean()


def largest(net, other, x):
    def change(gradient):
        other.m[...] = jnp.maximum(other.m[...], jnp.abs(gradient))
        return gradient / (1 + other.m[...])

    return learn(net, x, change)


@pytest.mark.parametrize(
    "update", [momentum, counter, average, batch, history, largest]
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, nnx.jit])
def test_a_change_that_feeds_a_result_must_be_returned(update, wrap):
    """The result depends on it, and the next call would begin with the old value."""

    def forgotten(net, other, x):
        loss = update(net, other, x)
        return net, loss

    def returned(net, other, x):
        loss = update(net, other, x)
        return loss, {"nested": [net], "m": jnp.copy(other.m[...])}

    def bare(net, other, x):
        loss = update(net, other, x)
        return net, (loss, other.m[...]), jnp.maximum(0, other.m[...])

    args = Held(8, 8), Held(8, 8), X
    assert "'forgotten' changes other/m/value in" in refused(wrap(forgotten), *args)
    assert "'bare' changes other/m/value in" in refused(wrap(bare), *args)
    assert accepted(wrap(returned), *args)


@jax.tree_util.register_pytree_node_class
class Plain:
    """Mutable, with an unnamed child."""

    def __init__(self, m):
        self.m = m

    def tree_flatten(self):
        return (self.m,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_children_without_names_are_returned_by_their_place():
    def returned(net, x):
        net.m = net.m + x.mean()
        return [net], net.m.sum()

    def bare(net, x):
        net.m = net.m + x.mean()
        return [net.m], net.m.sum()

    assert accepted(returned, Plain(jnp.ones(8)), X)
    assert "'bare' changes net/0 in place" in refused(bare, Plain(jnp.ones(8)), X)


def test_modules_or_their_arrays_may_be_returned():
    def whole(net, optimizer, x):
        loss = update(net, optimizer, x)
        return net, optimizer, loss

    graph, state = nnx.split(made())

    def arrays(state, x):
        net, optimizer = nnx.merge(graph, state)
        loss = update(net, optimizer, x)
        return nnx.state((net, optimizer)), loss

    def constrained(net, optimizer, x):
        loss = update(net, optimizer, x)
        return jax.lax.optimization_barrier((net, optimizer)), loss

    def guarded(net, optimizer, x):
        before = nnx.state((net, optimizer))
        loss = update(net, optimizer, x)
        keep = partial(jnp.where, jnp.isfinite(loss))
        return jax.tree.map(keep, nnx.state((net, optimizer)), before), loss

    def narrow(net, optimizer, x):
        loss = update(net, optimizer, x)
        params, others = nnx.state(net, nnx.Param, ...)
        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        return params, others, nnx.to_pure_dict(nnx.state(optimizer)), loss

    for step, args in (
        (whole, (*made(), X)),
        (arrays, (state, X)),
        (constrained, (*made(), X)),
        (guarded, (*made(), X)),
        (narrow, (*made(), X)),
        (nnx.jit(narrow), (*made(), X)),
        (jax.jit(whole), (*made(), X)),
    ):
        assert len(accepted(step, *args)) > 10


def test_what_is_only_read_may_be_passed_to_transformations():
    net, _ = made()
    net.eval()

    def remat(net, x):
        return nnx.remat(lambda net, x: net(x))(net, x)

    def jitted(net, x):
        return nnx.jit(lambda net, x: nnx.jit(lambda net, x: net(x))(net, x))(net, x)

    def gradient(net, x):
        return nnx.grad(lambda net: nnx.remat(lambda n, x: n(x))(net, x).sum())(net)

    for step in (remat, jitted, gradient):
        assert accepted(step, net, X)


def test_counters_of_random_numbers_are_state():
    """An evaluation that drops something would drop the same every time."""
    net, _ = made()
    net.norm.eval()
    assert "net/drop/rngs/count" in refused(lambda net, x: net(x), net, X)


@jax.tree_util.register_pytree_with_keys_class
class Batch:
    def __init__(self, image):
        self.image = image

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("image"), self.image),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_changes_of_batches_must_be_returned_if_the_caller_would_see_them():
    def step(batch):
        batch.image = batch.image / 255
        return batch.image.sum()

    assert "changes batch/image in place" in refused(step, Batch(X))

    def with_dict(state):
        state["x"] = state["x"] + 1  # As under jax.jit, a copy.
        return state["y"]

    assert accepted(with_dict, {"x": X, "y": X})


def test_what_keeps_its_value_may_be_set():
    def step(net, x):
        nnx.update(net, nnx.state(net))
        net.m[...] = jax.jit(lambda m: m)(net.m[...])
        return x @ net.m[...]

    assert accepted(step, Held(8, 8), X)


def test_what_is_returned_just_as_it_was_put_there_is_traced_once():
    runs = []

    def step(net, optimizer, x):
        runs.append(None)
        loss = update(net, optimizer, x)
        return nnx.state((net, optimizer)), loss

    assert accepted(step, *made(), X)
    assert len(runs) == 1

    def half(net, optimizer, x):
        return step(net, optimizer, x)[0][0]

    assert "'half' changes optimizer/" in refused(half, *made(), X)
    assert len(runs) == 3


def test_modules_around_a_step_are_to_be_passed():
    net, optimizer = made()

    def step(x):
        return update(net, optimizer, x)

    assert refused(step, X).endswith(
        "Pass modules that the step changes or differentiates as arguments."
    )


def test_a_module_in_place_of_the_step_is_named():
    for modules in (made(), nnx.eval_shape(made)):
        message = refused(*modules, X)
        assert "The first argument, a Net, has arrays of its own." in message
    net, _ = made()
    net.eval()
    assert accepted(net, X), "a module may be a step"


class Trainer:
    def __init__(self):
        self.params = {"w": X}
        self.seen = []

    def step(self, x):
        self.seen.append(x)
        self.params = jax.tree.map(lambda w: w + x, self.params)
        return x.sum()


@pytest.mark.explained("The step assigns to an object that is not one of its arguments")
def test_state_beside_the_arguments_is_refused():
    trainer = Trainer()
    message = refused(trainer.step, X)
    assert "'step' assigns to self.params/w, which is not one of its" in message
    assert "seen" not in message

    held = {"w": X}

    def step(x):
        held["w"] = held["w"] + x
        return x.sum()

    assert "assigns to held/w" in refused(step, X)

    def update(state, x):
        state["w"] = state["w"] + x
        return x.sum()

    assert "assigns to state/w" in refused(partial(update, {"w": X}), X)
    assert "assigns to state/w" in refused(
        partial(lambda x, state: update(state, x), state={"w": X}), X
    )


def test_what_stands_around_a_step_may_be_read():
    held, log = {"w": X}, []

    def step(x):
        log.append(x)  # Odd, and nothing is lost.
        return (held["w"] * x).sum()

    assert accepted(step, X)


def test_what_is_no_pytree_may_stand_around_a_step():
    scales = zip([2.0, 3.0], "ab", strict=True)
    names = {1: "one", "a": "two"}

    def step(x):
        scale, letter = next(scales)
        return scale * x if names[letter] == "two" else x

    [out] = accepted(step, X)
    assert out.shape == X.shape
    # It was neither used up nor refused: this trace took the first of two.
    assert [letter for _, letter in scales] == ["b"]
