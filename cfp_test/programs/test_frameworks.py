"""Steps as users of model libraries write them, planned and trained for five steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import cfp

X = jax.random.normal(jax.random.key(7), (8, 16))


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
