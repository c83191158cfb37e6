"""Models of several libraries, and steps that need random numbers."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from cfp_test.programs.common import (
    adam,
    initialise,
    normal,
    squares,
    training,
)


class _Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.5, deterministic=False)(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(16)(x)


def _dropout(key):
    net, x = _Dropped(), normal(1, 8, 16)
    params = initialise(
        net.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, x
    )
    state = TrainState.create(apply_fn=net.apply, params=params, tx=adam())

    def train_step(state, x, key):
        key, use = jax.random.split(key)

        def loss(params):
            return squares(state.apply_fn(params, x, rngs={"dropout": use}), x)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), key, value

    return train_step, (state, x, key)


def dropout_step():
    return _dropout(jax.random.key(3))


def dropout_raw_key_step():
    return _dropout(jax.random.PRNGKey(3))


def keys_step():
    """Arrays of typed keys, split, folded and returned."""

    def train_step(w, keys):
        noise = jax.vmap(lambda k: jax.random.normal(k, (16,)))(keys)
        more = jax.random.split(keys[0], (4, 2))
        shuffled = jax.random.permutation(keys[1], 8)
        choice = jax.random.categorical(keys[2], w)
        return w + noise @ w, more, keys[::-1], shuffled, choice

    return train_step, (normal(0, 16, 16), jax.random.split(jax.random.key(1), 16))


class _NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.b = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.norm(self.a(x))))


def nnx_step():
    net = _NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, adam(), wrt=nnx.Param)
    graph, state = nnx.split((net, optimizer))

    def train_step(state, x):
        net, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda net: squares(net(x), x))(net)
        optimizer.update(net, grads)
        return nnx.state((net, optimizer)), value

    return train_step, (state, normal(1, 8, 16))


def equinox_step():
    net = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
    tx = adam()
    params, static = eqx.partition(net, eqx.is_array)

    def train_step(params, opt, x):
        def loss(params):
            net = eqx.combine(params, static)
            return squares(jax.vmap(net)(x), x)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = tx.update(grads, opt, params)
        return eqx.apply_updates(params, updates), opt, value

    return train_step, (params, tx.init(params), normal(1, 8, 16))


def haiku_step():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 16])(x)))
    x = normal(1, 8, 16)
    params = initialise(net.init, jax.random.key(0), x)
    return training(lambda p, x: squares(net.apply(p, x), x), params, x)


def _perceptron(optimizer):
    params = {"a": normal(0, 16, 32), "bias": jnp.zeros(32), "b": normal(1, 32, 16)}

    def loss(p, x):
        return squares(jnp.tanh(x @ p["a"] + p["bias"]) @ p["b"])

    return training(loss, params, normal(2, 8, 16), optimizer)


def momentum_step():
    """Momentum, global-norm clipping, weight decay and a schedule."""
    return _perceptron(
        optax.chain(
            optax.clip_by_global_norm(0.1),
            optax.add_decayed_weights(1e-2),
            optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
        )
    )


def averaged_step():
    """Parameters with a moving average beside them, and two rates by label."""
    params = {"a": normal(0, 16, 32), "b": normal(1, 32, 16)}
    tx = optax.multi_transform(
        {"fast": adam(), "slow": optax.sgd(1e-2)}, {"a": "fast", "b": "slow"}
    )

    def train_step(params, average, opt, x):
        def loss(p):
            return squares(jnp.tanh(x @ p["a"]) @ p["b"])

        updates, opt = tx.update(jax.grad(loss)(params), opt, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.1)
        return params, average, opt

    return train_step, (params, params, tx.init(params), normal(2, 8, 16))


def two_updates_step():
    """Two optimizer steps in one: a generator and its critic."""
    generator = {"a": normal(0, 8, 16), "b": normal(1, 16, 16)}
    critic = {"a": normal(2, 16, 16), "b": normal(3, 16, 1)}
    tx = adam()

    def net(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    def train_step(state, real, noise):
        def critic_loss(c):
            fake = net(state["generator"], noise)
            return (net(c, fake) - net(c, real)).mean() + squares(net(c, real))

        grads = jax.grad(critic_loss)(state["critic"])
        updates, critic_opt = tx.update(grads, state["critic_opt"])
        critic = optax.apply_updates(state["critic"], updates)

        def generator_loss(g):
            return -net(critic, net(g, noise)).mean()

        grads = jax.grad(generator_loss)(state["generator"])
        updates, opt = tx.update(grads, state["opt"])
        generator = optax.apply_updates(state["generator"], updates)
        return {
            "generator": generator,
            "critic": critic,
            "opt": opt,
            "critic_opt": critic_opt,
        }

    state = {
        "generator": generator,
        "critic": critic,
        "opt": tx.init(generator),
        "critic_opt": tx.init(critic),
    }
    return train_step, (state, normal(4, 8, 16), normal(5, 8, 8))
