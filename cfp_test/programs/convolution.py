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


class _Residual(nn.Module):
    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.features, (3, 3), strides=self.stride, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=False)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), strides=self.stride)(x)
        return nn.relu(x + y)


class _ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.Conv(8, (3, 3))(x), (2, 2), strides=(2, 2))
        x = _Residual(8)(x)
        x = _Residual(16, stride=2)(x)
        return nn.Dense(8)(x.mean((1, 2)))


def resnet_step():
    return _with_batch_stats(_ResNet(), normal(1, 8, 8, 8, 4), integers(2, 8, 8))


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


# Input, kernel and result; a transposed convolution has its input dilated.
_PRIVATE = {
    "line": ("NWC", "WIO", "NCW", {"window_strides": (2,)}),
    "image": ("NCHW", "OIHW", "NHWC", {"rhs_dilation": (2, 2)}),
    "transposed": ("CHWN", "HWIO", "NCHW", {"lhs_dilation": (2, 2)}),
    "volume": ("NCDHW", "DHWIO", "CDHWN", {"window_strides": (1, 2, 1)}),
}


def per_example_gradients_step():
    """Clips the gradients of each example, of convolutions in several layouts."""
    params, inputs = {}, {}
    for seed, (name, (taken, kernel, _, _)) in enumerate(_PRIVATE.items()):
        inputs[name] = normal(seed, 8, *(4 if c == "C" else 5 for c in taken[1:]))
        sizes = {"I": 4, "O": 8}
        params[name] = normal(9 + seed, *(sizes.get(c, 3) for c in kernel))
    # Examples come first, wherever a convolution has its batch.
    inputs["transposed"] = normal(2, 8, 4, 5, 5)

    def loss(p, example):
        total = 0.0
        for name, (taken, kernel, made, options) in _PRIVATE.items():
            dims = len(taken) - 2
            y = jax.lax.conv_general_dilated(
                jnp.expand_dims(example[name], taken.index("N")),
                p[name],
                options.get("window_strides", (1,) * dims),
                [(1, 1)] * dims,
                lhs_dilation=options.get("lhs_dilation"),
                rhs_dilation=options.get("rhs_dilation"),
                dimension_numbers=(taken, kernel, made),
            )
            total += jnp.tanh(y).mean() + jnp.square(y).mean()
        return total

    def clip(grads):
        norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)

    def train_step(params, examples):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, examples)
        mean = jax.tree.map(lambda g: g.mean(0), jax.vmap(clip)(grads))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)

    return train_step, (params, inputs)
