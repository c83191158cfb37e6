"""GPT, BERT and LLaMA attend, normalise, embed and learn as their papers say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.models import build
from cfp.models.layers import (
    HEADS,
    KV_HEADS,
    attention,
    cross_entropy,
    layer_norm,
    mlp,
    rms_norm,
)
from cfp.models.transformers import (
    MASKED_SHARE,
    encoder_layer,
    gated_ffn,
    random_cloze,
    rotate,
)
from cfp_test.models.tiny import (
    GPT_TINY,
    LLAMA_TINY,
    attention_params,
    count,
    mlp_params,
    network,
    quick_jit,
)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


# ------------------------------------------------------------------------ parameters


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ffn", [None, 80])
def test_gpt_parameter_count(tied, ffn):
    _, (state, _) = build("gpt", **GPT_TINY, tied=tied, ffn=ffn)
    layer = attention_params(32) + mlp_params(32, ffn or 128) + 4 * 32
    head = 0 if tied else 32 * 96
    assert count(state.params) == 96 * 32 + 16 * 32 + 2 * layer + 2 * 32 + head
    layer = state.params["layer_0"]["attention"]
    assert layer["query"]["kernel"].shape == (32, 4, 8)
    assert layer["out"]["kernel"].shape == (4, 8, 32)


def test_defaults_are_bert_large():
    _, (state, _) = build("bert", scan=True)
    embeddings = (30522 + 512 + 2 + 2) * 1024
    layer = attention_params(1024) + mlp_params(1024, 4096) + 4 * 1024
    head = 1024 * 1024 + 3 * 1024 + 30522
    assert count(state.params) == embeddings + 24 * layer + head
    # The published 340 million count a pooler and biases of keys, and round up.
    assert 334e6 < count(state.params) < 336e6


@pytest.mark.parametrize(
    ("kv_heads", "share"), [(None, 1), (4, 1), (2, 0.5), (1, 0.25)]
)
def test_llama_parameter_count(kv_heads, share):
    _, (state, _) = build("llama", **{**LLAMA_TINY, "kv_heads": kv_heads})
    layer = (2 + 2 * share) * 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert count(state.params) == 2 * 96 * 32 + 2 * layer + 32


def test_defaults_are_llama_7b():
    _, (state, _) = build("llama", scan=True)
    assert count(state.params) == 6_738_415_616  # As published.


@pytest.mark.parametrize(("hidden", "ffn"), [(4096, 11008), (5120, 13824), (96, 256)])
def test_gated_ffn_is_that_of_the_published_sizes(hidden, ffn):
    assert gated_ffn(hidden) == ffn


# ------------------------------------------------------------------------- attention


def kernels(kv_heads, bias):
    # Large enough that the softmax is far from flat.
    shapes = {"query": (16, 4, 4), "key": (16, kv_heads, 4), "out": (4, 4, 16)}
    shapes["value"] = shapes["key"]
    drawn = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    if not bias:
        return drawn
    biased = {"query": (4, 4), "value": (4, 4), "out": (16,)}
    made = {name: {"kernel": kernel} for name, kernel in drawn.items()}
    for name, shape in biased.items():
        made[name]["bias"] = normal(7, *shape)
    return made


@pytest.mark.parametrize(
    ("causal", "kv_heads", "bias"),
    [(True, 4, True), (False, 4, True), (True, 2, False), (True, 1, False)],
)
def test_attention_equals_the_reference(causal, kv_heads, bias):
    x, params = normal(9, 2, 8, 16), kernels(kv_heads, bias)
    names, turn = (HEADS, lambda x: x) if bias else (KV_HEADS, rotate)

    def project(name):
        given: Any = params[name] if bias else {"kernel": params[name]}
        made = jnp.einsum("bsm,mhd->bshd", x, given["kernel"])
        return made + given.get("bias", 0.0)

    q, k, v = map(project, ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(turn(q), turn(k), v, is_causal=causal)
    out: Any = params["out"] if bias else {"kernel": params["out"]}
    expected = jnp.einsum("bshd,hdm->bsm", mixed, out["kernel"]) + out.get("bias", 0)
    found = quick_jit(
        lambda params, x: attention(params, x, causal=causal, kv_names=names, turn=turn)
    )(params, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_no_token_sees_those_that_follow(name):
    apply, params, batch = network(name)
    logits = quick_jit(lambda batch: apply(params, batch)[0])
    tokens = batch["tokens"]
    changed = {"tokens": tokens.at[:, 9].set((tokens[:, 9] + 1) % 96)}
    before, after = logits(batch), logits(changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert jnp.abs(before[:, 9:] - after[:, 9:]).max(axis=-1).min() > 0


def test_every_token_of_bert_sees_all_others():
    apply, params, batch = network("bert")
    logits = quick_jit(lambda batch: apply(params, batch)[0])
    for key in ("tokens", "types"):
        changed = {**batch, key: batch[key].at[:, 9].set(1 - batch[key][:, 9])}
        moved = jnp.abs(logits(changed) - logits(batch)).max(axis=-1)
        assert moved.min() > 0, key


# ------------------------------------------------------------------------- positions


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


# -------------------------------------------------------------------- norms and MLPs


def test_layer_norm_equals_the_textbook():
    x, scale, bias = 7 + 5 * normal(0, 2, 3, 16), normal(1, 16), normal(2, 16)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / x.std(-1, keepdims=True) * scale + bias
    found = layer_norm({"scale": scale, "bias": bias}, x)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_rms_norm_equals_the_textbook():
    x, scale = 5 * normal(0, 3, 16), normal(1, 16)
    expected = scale * x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))
    np.testing.assert_allclose(rms_norm(scale, x), expected, rtol=1e-5)
    # In bfloat16, 300 and 1 would add up to 300.
    wide = jnp.array([300.0] + 255 * [1.0], dtype=jnp.bfloat16)
    first = float(rms_norm(jnp.ones(256), wide)[0])
    assert first == pytest.approx(300 / np.sqrt((300**2 + 255) / 256), rel=1e-2)


def test_gated_mlp_equals_the_textbook():
    x = normal(0, 2, 8)
    gate, up, down = normal(1, 8, 12), normal(2, 8, 12), normal(3, 12, 8)
    h = np.asarray(x @ gate)
    expected = (h / (1 + np.exp(-h)) * np.asarray(x @ up)) @ np.asarray(down)
    actual = mlp({"gate": gate, "up": up, "down": down}, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_of_bert_ends_normalised():
    _, params, _ = network("bert")
    norm = {"scale": jnp.ones(32), "bias": jnp.zeros(32)}
    layer = {**params["layer_0"], "mlp_norm": norm}
    y, _ = encoder_layer(layer, 7.0 + normal(0, 2, 8, 32))
    np.testing.assert_allclose(y.mean(axis=-1), 0.0, atol=1e-5)
    np.testing.assert_allclose(y.std(axis=-1), 1.0, rtol=1e-4)


# ------------------------------------------------------------------ embeddings, heads


@pytest.mark.parametrize(("name", "options"), [("gpt", {"tied": True}), ("bert", {})])
def test_a_tied_head_is_the_token_embedding(name, options):
    """A token's logit is its embedding's product with x, plus BERT's own bias."""
    apply, params, batch = network(name, **options)
    assert "head" not in params
    unseen = 95
    batch = {**batch, "tokens": jnp.minimum(batch["labels"], 94)}
    changed = jax.tree.map(np.copy, params)
    changed["embedding"]["token"]["embedding"][unseen] *= 2
    logits = quick_jit(lambda params: apply(params, batch)[0])
    before, after = logits(params), logits(changed)
    bias = params["head_bias"][unseen] if name == "bert" else 0.0
    doubled = 2 * (before[..., unseen] - bias) + bias
    np.testing.assert_allclose(after[..., unseen], doubled, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after[..., :unseen], before[..., :unseen])


def test_llamas_head_is_not_the_embedding():
    apply, params, batch = network("llama")
    logits = quick_jit(lambda params: apply(params, batch)[0])
    doubled = logits({**params, "head": 2 * params["head"]})
    np.testing.assert_allclose(doubled, 2 * logits(params), rtol=1e-5, atol=1e-6)
    assert params["head"].shape == (32, 96) and params["embedding"].shape == (96, 32)


# ----------------------------------------------------------------------------- cloze


def test_random_cloze_hides_some_of_a_text():
    batch = random_cloze(jax.random.key(0), 32, 64, 96)
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        "labels": ((32, 64), jnp.int32),
        "mask": ((32, 64), jnp.float32),
        "tokens": ((32, 64), jnp.int32),
        "types": ((32, 64), jnp.int32),
    }
    hidden = np.asarray(batch["mask"]) == 1
    assert set(np.unique(batch["mask"])) == {0.0, 1.0}
    assert abs(hidden.mean() - MASKED_SHARE) < 0.03
    assert (np.asarray(batch["tokens"])[hidden] == 95).all()
    shown = np.asarray(batch["tokens"])[~hidden]
    np.testing.assert_array_equal(shown, np.asarray(batch["labels"])[~hidden])
    assert batch["labels"].max() < 95
    np.testing.assert_array_equal(batch["types"][3], [0] * 32 + [1] * 32)


def test_loss_ignores_what_is_not_masked():
    apply, params, batch = network("bert")

    @quick_jit
    def loss(batch):
        logits, _ = apply(params, batch)
        return cross_entropy(logits, batch["labels"], batch["mask"])

    labels, mask = batch["labels"], batch["mask"].astype(int)
    elsewhere = {**batch, "labels": (labels + (1 - mask)) % 95}
    there = {**batch, "labels": (labels + mask) % 95}
    assert loss(elsewhere) == loss(batch)
    assert loss(there) != loss(batch)
