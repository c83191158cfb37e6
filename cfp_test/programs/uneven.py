"""Sizes that no number of devices divides."""

import jax
import jax.numpy as jnp

from cfp_test.programs.common import cross_entropy, integers, normal, squares, training


def uneven_mlp_step():
    params = {"a": normal(0, 15, 22), "bias": normal(1, 22), "b": normal(2, 22, 15)}

    def loss(p, x):
        return squares(jnp.tanh(x @ p["a"] + p["bias"]) @ p["b"])

    return training(loss, params, normal(3, 7, 15))


def uneven_attention_step():
    """A vocabulary of 51, three heads, sequences of seven, one layer."""
    params = {
        "embed": normal(0, 51, 15),
        "qkv": normal(1, 15, 3, 3, 5),
        "out": normal(2, 3, 5, 15),
        "head": normal(3, 15, 51),
    }

    def loss(p, tokens):
        x = p["embed"][tokens]
        q, k, v = jnp.einsum("bsd,dchk->cbshk", x, p["qkv"])
        scores = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k))
        mixed = jnp.einsum("bhqt,bthk->bqhk", scores, v)
        x = x + jnp.einsum("bqhk,hkd->bqd", mixed, p["out"])
        return cross_entropy(x @ p["head"], tokens)

    return training(loss, params, integers(4, 51, 6, 7))


def uneven_convolution_step():
    params = {"a": normal(0, 3, 3, 3, 7), "b": normal(1, 3, 3, 7, 6)}

    def loss(p, x):
        for name in ("a", "b"):
            x = jax.lax.conv_general_dilated(
                x, p[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x - x.mean((0, 1, 2)))
        return squares(x.max((1, 2)))

    return training(loss, params, normal(2, 7, 6, 5, 3))


def uneven_scan_step():
    """Five layers and a batch of six, scanned."""
    params = {"a": normal(0, 5, 14, 21), "b": normal(1, 5, 21, 14)}

    def loss(p, x):
        @jax.checkpoint
        def body(x, w):
            return x + jnp.tanh(x @ w["a"]) @ w["b"], None

        return squares(jax.lax.scan(body, x, p)[0])

    return training(loss, params, normal(2, 6, 14))
