"""LLaMA turns positions, groups heads and gates as its papers say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.models import build
from cfp.models.llama import LLAMA_7B, attention, default_ffn, mlp, rms_norm, rotate
from cfp_test.models.tiny import LLAMA_TINY, count, network, quick_jit


def llama_params(vocab, hidden, layers, kv_share, ffn):
    attention_count = (2 + 2 * kv_share) * hidden * hidden
    layer = attention_count + 3 * hidden * ffn + 2 * hidden
    return 2 * vocab * hidden + layers * layer + hidden


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("kv_heads", "share"), [(None, 1), (4, 1), (2, 0.5), (1, 0.25)]
)
def test_llama_parameter_count(kv_heads, share):
    _, (state, _) = build("llama", **{**LLAMA_TINY, "kv_heads": kv_heads})
    assert count(state.params) == llama_params(96, 32, 2, share, 48)


def test_llama_7b():
    _, (state, _) = build("llama", scan=True, **LLAMA_7B)
    assert count(state.params) == 6_738_415_616  # As published.
    assert count(state.params) == llama_params(32000, 4096, 32, 1, 11008)
    _, (default, _) = build("llama", scan=True)
    shapes = [jax.tree.map(lambda x: x.shape, s.params) for s in (state, default)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("hidden", "ffn"), [(4096, 11008), (5120, 13824), (96, 256)])
def test_default_ffn_is_that_of_the_published_sizes(hidden, ffn):
    assert default_ffn(hidden) == ffn


# -------------------------------------------------------------------------- positions


def test_scores_depend_on_the_distance_alone():
    seq, head_dim = 12, 8
    query, key = (
        jnp.tile(normal(i, 1, 1, 1, head_dim), (1, seq, 1, 1)) for i in (0, 1)
    )
    scores = np.asarray(jnp.einsum("bqhd,bkhd->bqk", rotate(query), rotate(key)))[0]
    for distance in range(1 - seq, seq):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert len({round(float(x), 3) for x in scores[0]}) == seq


def test_rotation_keeps_lengths_and_the_first_position():
    x = normal(0, 2, 12, 3, 8)
    y = rotate(x)
    np.testing.assert_allclose(y[:, 0], x[:, 0], rtol=1e-6)
    pairs = [jnp.square(z).reshape(2, 12, 3, 2, 4).sum(axis=-2) for z in (x, y)]
    np.testing.assert_allclose(pairs[0], pairs[1], rtol=1e-4)
    # The first pair turns by one radian a token.
    turned = (
        x[..., 0] * np.cos(np.arange(12))[:, None]
        - x[..., 4] * np.sin(np.arange(12))[:, None]
    )
    np.testing.assert_allclose(y[..., 0], turned, rtol=1e-4, atol=1e-5)


def test_rotation_in_bfloat16_is_as_good_as_its_result():
    x = normal(0, 1, 512, 1, 8)
    half = rotate(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), rotate(x), atol=0.03)


# -------------------------------------------------------------------------- attention


attend = quick_jit(functools.partial(attention, dtype="float32"))


def attention_kernels(kv_heads, hidden=16, heads=4, head_dim=4):
    # Large enough that the softmax is far from flat.
    return {
        "query": normal(0, hidden, heads, head_dim),
        "key": normal(1, hidden, kv_heads, head_dim),
        "value": normal(2, hidden, kv_heads, head_dim),
        "out": normal(3, heads, head_dim, hidden),
    }


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_equal_repeated_keys_and_values(kv_heads):
    x = normal(9, 2, 8, 16)
    grouped = attention_kernels(kv_heads)
    repeat = {
        name: jnp.repeat(grouped[name], 4 // kv_heads, axis=1)
        for name in ("key", "value")
    }
    np.testing.assert_allclose(
        attend(grouped, x),
        attend({**grouped, **repeat}, x),
        rtol=1e-4,
        atol=1e-4,
    )


def test_attention_equals_the_reference():
    x = normal(9, 2, 8, 16)
    params = attention_kernels(2)
    q, k, v = (
        jnp.einsum("bsm,mhd->bshd", x, params[name])
        for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    np.testing.assert_allclose(
        attend(params, x),
        jnp.einsum("bshd,hdm->bsm", mixed, params["out"]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_no_token_sees_those_that_follow():
    llama, params, batch = network("llama")
    logits = quick_jit(lambda batch: llama.apply(params, batch)[0])
    tokens = batch["tokens"]
    changed = {"tokens": tokens.at[:, 9].set((tokens[:, 9] + 1) % 96)}
    before, after = logits(batch), logits(changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert jnp.abs(before[:, 9:] - after[:, 9:]).max(axis=-1).min() > 0


# ---------------------------------------------------------------- norm, MLP and head


def test_rms_norm_equals_the_textbook():
    x, scale = 5 * normal(0, 3, 16), normal(1, 16)
    expected = scale * x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))
    np.testing.assert_allclose(rms_norm(scale, x), expected, rtol=1e-5)
    # In bfloat16, 300 and 1 would add up to 300.
    wide = jnp.array([300.0] + 255 * [1.0], dtype=jnp.bfloat16)
    first = float(rms_norm(jnp.ones(256), wide)[0])
    assert first == pytest.approx(300 / np.sqrt((300**2 + 255) / 256), rel=1e-2)


def test_mlp_equals_the_textbook():
    x = normal(0, 2, 8)
    gate, up, down = normal(1, 8, 12), normal(2, 8, 12), normal(3, 12, 8)
    h = np.asarray(x @ gate)
    expected = (h / (1 + np.exp(-h)) * np.asarray(x @ up)) @ np.asarray(down)
    actual = mlp({"gate": gate, "up": up, "down": down}, x, "float32")
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_head_is_not_the_embedding():
    llama, params, batch = network("llama")
    logits = quick_jit(lambda params: llama.apply(params, batch)[0])
    doubled = logits({**params, "head": 2 * params["head"]})
    np.testing.assert_allclose(doubled, 2 * logits(params), rtol=1e-5, atol=1e-6)
    assert params["head"].shape == (32, 96) and params["embedding"].shape == (96, 32)


def test_parameters_are_nested_dicts():
    _, params, _ = network("llama")
    kinds = {
        type(node) for node in (params, params["layer_0"], params["layer_1"]["mlp"])
    }
    assert kinds == {dict}
    assert params["layer_0"]["attention"]["query"].shape == (32, 4, 8)
    assert params["layer_0"]["attention"]["key"].shape == (32, 2, 8)
