"""Steps as users of model libraries write them, planned and trained for five steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cfp

X = jax.random.normal(jax.random.key(7), (8, 16))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])


def trained(step, state, steps=5):
    """The state after some steps, and the losses."""
    losses = []
    for _ in range(steps):
        *state, loss = step(*state, X)
        losses.append(float(loss))
    return state, losses


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(jnp.tanh(self.up(x))))


def test_modules_that_are_returned_learn(mesh):
    def step(net, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - x) ** 2))(net)
        optimizer.update(net, grads)
        return net, optimizer, loss

    def state():
        net = Net(nnx.Rngs(0))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
        return net, nnx.Optimizer(net, tx, wrt=nnx.Param)

    plan = cfp.plan(step, *state(), X, mesh=mesh, preset="fully_sharded")
    (net, _), losses = trained(plan.apply(step), state())
    # As its users write it, with what is changed in place left to nnx.jit.
    (other, optimizer), expected = state(), []
    in_place = nnx.jit(lambda net, optimizer, x: step(net, optimizer, x)[-1])
    for _ in range(5):
        expected.append(float(in_place(other, optimizer, X)))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]
    assert max(d.relative_l2 for d in cfp.compare(net, other)) < 1e-3
    assert isinstance(net, Net)


def test_frozen_parameters_stay_and_adapters_learn(mesh):
    """LoRA: the base is frozen by its label, and has no optimizer state."""
    key = jax.random.key(0)
    params = {
        name: {
            "base": jax.random.normal(jax.random.fold_in(key, i), shape) / 4,
            "a": jax.random.normal(jax.random.fold_in(key, i + 9), (shape[0], 2)),
            "b": jnp.zeros((2, shape[1])),
        }
        for i, (name, shape) in enumerate({"up": (16, 32), "down": (32, 16)}.items())
    }
    labels = {
        name: {"base": "frozen", "a": "adapter", "b": "adapter"} for name in params
    }
    tx = optax.multi_transform(
        {"adapter": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels
    )

    def layer(p, x):
        return x @ p["base"] + x @ p["a"] @ p["b"]

    def step(params, opt, x):
        def loss_fn(p):
            return jnp.mean((layer(p["down"], jnp.tanh(layer(p["up"], x))) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    state = (params, tx.init(params))
    plan = cfp.plan(step, *state, X, mesh=mesh, preset="fully_sharded")
    (found, _), losses = trained(plan.apply(step), state)
    (expected, _), wanted = trained(jax.jit(step), state)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert max(d.relative_l2 for d in cfp.compare(found, expected)) < 1e-4
    for name in params:
        np.testing.assert_array_equal(found[name]["base"], params[name]["base"])
        assert np.abs(found[name]["b"]).max() > 0
    held = {
        kind
        for path, kind in zip(plan.arg_names, plan.arg_types, strict=True)
        if path.startswith("opt/") and "[16,32]" in kind
    }
    assert held == set()
