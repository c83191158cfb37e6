"""Attention as several libraries write it, each in a training step."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

from cfp_test.programs.common import (
    adam,
    initialise,
    normal,
    squares,
    training,
)

BATCH, TOKENS, HEADS, HEAD_DIM = 4, 16, 4, 8
HIDDEN = HEADS * HEAD_DIM
X = (BATCH, TOKENS, HIDDEN)


def linen_attention_step():
    """flax.linen.MultiHeadDotProductAttention with a causal mask."""
    net = nn.MultiHeadDotProductAttention(num_heads=HEADS, use_bias=False)
    x = normal(1, *X)
    mask = nn.make_causal_mask(jnp.ones((BATCH, TOKENS)))
    params = initialise(net.init, jax.random.key(0), x)
    return training(lambda p, x: squares(x + net.apply(p, x, mask=mask), x), params, x)


class _NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
            HEADS, HIDDEN, decode=False, use_bias=False, rngs=rngs
        )

    def __call__(self, x):
        return x + self.attention(x, mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))


def nnx_attention_step():
    net = _NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, adam(), wrt=nnx.Param)
    graph, state = nnx.split((net, optimizer))

    def train_step(state, x):
        net, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda net: squares(net(x), x))(net)
        optimizer.update(net, grads)
        return nnx.state((net, optimizer)), value

    return train_step, (state, normal(1, *X))


def equinox_attention_step():
    """One sequence at a time, under jax.vmap, in two layers."""
    net = eqx.nn.MultiheadAttention(HEADS, HIDDEN, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_array)
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))

    def loss(params, x):
        net = eqx.combine(params, static)
        return squares(x + jax.vmap(lambda x: net(x, x, x, mask=mask))(x), x)

    return training(loss, params, normal(1, *X))


def haiku_attention_step():
    def forward(x):
        attend = hk.MultiHeadAttention(
            HEADS, HEAD_DIM, w_init=hk.initializers.VarianceScaling(1.0)
        )
        return x + attend(x, x, x, mask=jnp.tril(jnp.ones((1, 1, TOKENS, TOKENS))))

    net = hk.without_apply_rng(hk.transform(forward))
    x = normal(1, *X)
    params = initialise(net.init, jax.random.key(0), x)
    return training(lambda p, x: squares(net.apply(p, x), x), params, x)


def _split(x):
    return x.reshape(BATCH, TOKENS, HEADS, HEAD_DIM)


def gpt2_style_attention_step():
    """One projection for all three, a mask of the dtype's least number, and padding."""
    params = {"qkv": normal(1, HIDDEN, 3 * HIDDEN), "out": normal(2, HIDDEN, HIDDEN)}
    lengths = jnp.array([16, 16, 12, 9])

    def loss(p, batch):
        x = batch["x"]
        q, k, v = (_split(y) for y in jnp.split(x @ p["qkv"], 3, axis=-1))
        causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))[None, None]
        mask = causal & batch["mask"][:, None, None, :]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_DIM**0.5
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(X)
        return squares(x + mixed @ p["out"], x)

    batch = {"x": normal(3, *X), "mask": jnp.arange(TOKENS) < lengths[:, None]}
    return training(loss, params, batch)


def wide_scores_attention_step():
    """Scores in float32 of operands in bfloat16, which gradients widen first."""
    params = {name: normal(i, HIDDEN, HIDDEN) for i, name in enumerate("qkvo")}

    def loss(p, batch):
        x, p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (batch["x"], p))
        q, k, v = (_split(x @ p[name]) for name in "qkv")
        wide = {"preferred_element_type": jnp.float32}
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, **wide) / HEAD_DIM**0.5
        causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
        scores = jnp.where(causal, scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(X)
        return squares((x + mixed @ p["o"]).astype(jnp.float32), batch["x"])

    return training(loss, params, {"x": normal(5, *X)})


def t5_style_attention_step():
    """No scale, and a bias of relative positions, which is not learnt here."""
    params = {name: normal(i, HIDDEN, HIDDEN) for i, name in enumerate("qkvo")}

    def loss(p, batch):
        x = batch["x"]
        q, k, v = (_split(x @ p[name]) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + batch["bias"]
        weights = nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(X)
        return squares(x + mixed @ p["o"], x)

    bias = normal(9, 1, HEADS, TOKENS, TOKENS)
    return training(loss, params, {"x": normal(5, *X), "bias": bias})
