"""Convolutional nets."""

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
)


def _with_batch_stats(net, images, labels):
    tx = adam()
    variables = initialise(net.init, jax.random.key(0), images)
    state = {**variables, "opt": tx.init(variables["params"])}

    def train_step(state, batch):
        def loss(params):
            logits, new = net.apply(
                {"params": params, "batch_stats": state["batch_stats"]},
                batch["image"],
                mutable=["batch_stats"],
            )
            return cross_entropy(logits, batch["label"]), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, **new}, value

    return train_step, (state, {"image": images, "label": labels})


class _ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(16, (3, 3), use_bias=False)(x))
        return nn.Dense(8)(x.reshape(x.shape[0], -1))


def conv_net_step():
    return _with_batch_stats(_ConvNet(), normal(1, 8, 8, 8, 4), integers(2, 8, 8))


class _UNet(nn.Module):
    @nn.compact
    def __call__(self, x, time):
        t = nn.Dense(8)(jnp.sin(time[:, None] * jnp.arange(1.0, 9.0)))
        a = nn.silu(nn.GroupNorm(2)(nn.Conv(8, (3, 3))(x)) + t[:, None, None])
        b = nn.silu(nn.GroupNorm(2)(nn.Conv(16, (3, 3), strides=2)(a)))
        h = nn.MultiHeadDotProductAttention(num_heads=4)(b.reshape(b.shape[0], -1, 16))
        b = b + h.reshape(b.shape)
        up = nn.ConvTranspose(8, (2, 2), strides=(2, 2))(b)
        return nn.Conv(4, (3, 3))(jnp.concatenate([a, up], axis=-1))


def diffusion_step():
    """Predicts the noise that was added to images, at a random time."""
    net, tx = _UNet(), adam()
    images = normal(1, 8, 8, 8, 4)
    params = initialise(net.init, jax.random.key(0), images, jnp.zeros(8))

    def train_step(state, images, key):
        time_key, noise_key = jax.random.split(key)
        time = jax.random.uniform(time_key, (images.shape[0],))
        noise = jax.random.normal(noise_key, images.shape)
        level = time[:, None, None, None]
        noisy = jnp.sqrt(1 - level) * images + jnp.sqrt(level) * noise

        def loss(params):
            return squares(net.apply(params, noisy, time), noise)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, value

    state = {"params": params, "opt": tx.init(params)}
    return train_step, (state, images, jax.random.key(3))


def grouped_conv_step():
    """Depthwise, grouped and dilated convolutions in one dim, without a library."""
    params = {"depth": normal(0, 3, 1, 16), "group": normal(1, 3, 4, 16)}
    dims = ("NWC", "WIO", "NWC")

    def train_step(params, x):
        def loss(p):
            y = jax.lax.conv_general_dilated(
                x,
                p["depth"],
                (1,),
                "SAME",
                dimension_numbers=dims,
                feature_group_count=16,
            )
            y = jax.lax.conv_general_dilated(
                jnp.tanh(y),
                p["group"],
                (1,),
                "SAME",
                rhs_dilation=(2,),
                dimension_numbers=dims,
                feature_group_count=4,
            )
            return squares(y)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step, (params, normal(2, 8, 12, 16))
