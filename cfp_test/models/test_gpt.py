"""GPT, and the flax layers that models share."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.models import build
from cfp.models.gpt import GPT, GPTConfig
from cfp.models.layers import Attention
from cfp_test.models.tiny import (
    GPT_TINY,
    attention_params,
    count,
    mlp_params,
    quick_jit,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ffn", [None, 80])
def test_gpt_parameter_count(tied, ffn):
    _, (state, _) = build("gpt", **GPT_TINY, tied=tied, ffn=ffn)
    layer = attention_params(32) + mlp_params(32, ffn or 128) + 4 * 32
    head = 0 if tied else 32 * 96
    assert count(state.params) == 96 * 32 + 16 * 32 + 2 * layer + 2 * 32 + head


def test_attention_is_causal():
    x = jax.random.normal(jax.random.key(0), (1, 8, 16))
    attention = Attention(heads=2, dtype="float32")
    variables = nn.meta.unbox(attention.init(jax.random.key(1), x))
    before = attention.apply(variables, x)
    after = attention.apply(variables, x.at[:, 5:].add(1.0))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert jnp.abs(before[:, 5:] - after[:, 5:]).min() > 0


def test_attention_equals_the_reference():
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    attention = Attention(heads=2, dtype="float32")
    # Kernels of unit scale, so that the softmax is far from flat.
    params = jax.tree.map(
        lambda p: 25 * p, nn.meta.unbox(attention.init(jax.random.key(1), x))["params"]
    )
    q, k, v = (
        jnp.einsum("bsm,mhd->bshd", x, params[name]["kernel"])
        + params[name].get("bias", 0.0)
        for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    expected = jnp.einsum("bshd,hdm->bsm", mixed, params["out"]["kernel"])
    actual = attention.apply({"params": params}, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_query_kernel_keeps_heads_apart():
    _, (state, _) = build("gpt", **GPT_TINY)
    layer = state.params["layer_0"]["attention"]
    assert layer["query"]["kernel"].shape == (32, 4, 8)
    assert layer["out"]["kernel"].shape == (4, 8, 32)


def test_tied_head_is_the_token_embedding():
    config = GPTConfig(
        vocab=96, seq=16, hidden=32, layers=1, heads=4, dtype="float32", tied=True
    )
    tokens = jnp.arange(16)[None]
    params = quick_jit(GPT(config).init)(jax.random.key(0), tokens)["params"]
    params = nn.meta.unbox(params)
    apply = quick_jit(GPT(config).apply)
    assert "head" not in params
    logits = apply({"params": params}, tokens)
    # A token's logit is its embedding's product with x, so it doubles with it.
    unseen = 95
    table = params["embedding"]["token"]["embedding"]
    params["embedding"]["token"]["embedding"] = table.at[unseen].multiply(2.0)
    doubled = apply({"params": params}, tokens)
    np.testing.assert_allclose(doubled[..., unseen], 2 * logits[..., unseen], rtol=1e-5)
