"""Loops over layers, time and microbatches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from cfp_test.programs.common import (
    adam,
    cross_entropy,
    initialise,
    integers,
    normal,
    squares,
    training,
)
from cfp_test.programs.dense import layer, layer_params


def _stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def scan_mlp_step():
    """The smallest scan over layers."""
    params = {"a": normal(0, 3, 16, 32), "b": normal(1, 3, 32, 16)}

    def loss(p, x):
        def body(x, w):
            return x + jnp.tanh(x @ w["a"]) @ w["b"], None

        return squares(jax.lax.scan(body, x, p)[0])

    return training(loss, params, normal(2, 8, 16))


def _transformer(wrap):
    params = {
        "embed": normal(90, 32, 16),
        "head": normal(91, 16, 32),
        "layers": _stack([layer_params(10 * i) for i in range(3)]),
    }

    def loss(p, tokens):
        x = p["embed"][tokens]
        body = wrap(lambda x, w: (layer(w, x), None))
        x, _ = jax.lax.scan(body, x, p["layers"])
        return cross_entropy(x @ p["head"], tokens)

    return training(loss, params, integers(3, 32, 8, 4))


def scan_transformer_step():
    return _transformer(lambda body: body)


def scan_remat_step():
    return _transformer(jax.checkpoint)


def scan_remat_policy_step():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return _transformer(lambda body: jax.checkpoint(body, policy=policy))


class _Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h)
        h = nn.Dense(32)(nn.LayerNorm()(x))
        return x + nn.Dense(16)(nn.gelu(h)), None


class _Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        stack = nn.scan(
            nn.remat(_Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = stack(name="layers")(x, None)
        return nn.Dense(32)(x)


def module_scan_step():
    """A library's scan with its rematerialisation."""
    net, tokens = _Decoder(), integers(1, 32, 8, 4)
    params = initialise(net.init, jax.random.key(0), tokens)

    def loss(p, tokens):
        return cross_entropy(net.apply(p, tokens), tokens)

    return training(loss, params, tokens)


class _Lstm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.RNN(nn.OptimizedLSTMCell(16))(x))


def lstm_step():
    net, x = _Lstm(), normal(1, 8, 5, 8)
    params = initialise(net.init, jax.random.key(0), x)

    def loss(p, x):
        return squares(net.apply(p, x), x)

    return training(loss, params, x)


def linear_recurrence_step():
    """A state space layer by associative scan."""
    params = {"a": normal(0, 16), "b": normal(1, 8, 16), "c": normal(2, 16, 8)}

    def loss(p, x):
        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        inputs = x @ p["b"]
        decay = jnp.broadcast_to(jax.nn.sigmoid(p["a"]), inputs.shape)
        _, h = jax.lax.associative_scan(combine, (decay, inputs), axis=1)
        return squares(h @ p["c"], x)

    return training(loss, params, normal(3, 8, 8, 8))


def microbatch_step():
    """Gradients accumulated over four microbatches by scan."""
    params = {"a": normal(0, 16, 32), "b": normal(1, 32, 16)}
    tx = adam()

    def train_step(state, x):
        def loss(p, x):
            return squares(jnp.tanh(x @ p["a"]) @ p["b"])

        def body(total, x):
            grads = jax.grad(loss)(state["params"], x)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        grads, _ = jax.lax.scan(body, zeros, x.reshape(4, -1, 16))
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    return train_step, ({"params": params, "opt": tx.init(params)}, normal(2, 32, 16))


def multi_steps_step():
    """The optimizer applies what it collected every second step."""
    params = {"a": normal(0, 16, 32), "b": normal(1, 32, 16)}

    def loss(p, x):
        return squares(jnp.tanh(x @ p["a"]) @ p["b"])

    tx = optax.MultiSteps(optax.adam(1e-2, eps=1e-2), every_k_schedule=2)
    return training(loss, params, normal(2, 8, 16), tx)
