"""BERT sees both ways, and learns from the masked positions alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cfp.models import build
from cfp.models.bert import MASKED_SHARE, EncoderLayer, random_cloze
from cfp.models.layers import Attention
from cfp.models.train import cross_entropy
from cfp_test.models.tiny import (
    GPT_TINY,
    attention_params,
    count,
    mlp_params,
    network,
    quick_jit,
)


def bert_params(vocab, seq, hidden, layers):
    norm = 2 * hidden
    embeddings = (vocab + seq + 2) * hidden + norm
    layer = attention_params(hidden) + mlp_params(hidden, 4 * hidden) + 2 * norm
    head = hidden * hidden + hidden + norm + vocab
    return embeddings + layers * layer + head


def test_bert_parameter_count():
    _, (state, _) = build("bert", **GPT_TINY)
    assert count(state.params) == bert_params(96, 16, 32, 2)


def test_defaults_are_bert_large():
    _, (state, _) = build("bert", scan=True)
    assert count(state.params) == bert_params(30522, 512, 1024, 24)
    # The published 340 million count a pooler and biases of keys, and round up.
    assert 334e6 < count(state.params) < 336e6


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
    bert, params, batch = network("bert")

    @quick_jit
    def loss(batch):
        logits, _ = bert.apply(params, batch)
        return cross_entropy(logits, batch["labels"], batch["mask"])

    labels, mask = batch["labels"], batch["mask"].astype(int)
    elsewhere = {**batch, "labels": (labels + (1 - mask)) % 95}
    there = {**batch, "labels": (labels + mask) % 95}
    assert loss(elsewhere) == loss(batch)
    assert loss(there) != loss(batch)


def test_every_token_sees_all_others():
    bert, params, batch = network("bert")
    logits = quick_jit(lambda batch: bert.apply(params, batch)[0])
    for key in ("tokens", "types"):
        changed = {**batch, key: batch[key].at[:, 9].set(1 - batch[key][:, 9])}
        moved = jnp.abs(logits(changed) - logits(batch)).max(axis=-1)
        assert moved.min() > 0, key


def test_attention_that_is_not_causal_forgets_order():
    x = jax.random.normal(jax.random.key(0), (1, 8, 16))
    attention = Attention(heads=2, dtype="float32", causal=False)
    variables = nn.meta.unbox(quick_jit(attention.init)(jax.random.key(1), x))
    attend = quick_jit(attention.apply)
    order = jnp.array([3, 0, 7, 1, 6, 2, 5, 4])
    np.testing.assert_allclose(
        attend(variables, x[:, order]),
        attend(variables, x)[:, order],
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_layer_ends_normalised():
    x = 7.0 + jax.random.normal(jax.random.key(0), (2, 8, 16))
    layer = EncoderLayer(heads=2, ffn=32, dtype="float32")
    y, _ = quick_jit(layer.init_with_output)(jax.random.key(1), x)
    np.testing.assert_allclose(y.mean(axis=-1), 0.0, atol=1e-5)
    np.testing.assert_allclose(y.std(axis=-1), 1.0, rtol=1e-4)


def test_decoder_is_the_token_embedding():
    """A token's logit is its embedding's product with x plus its own bias."""
    bert, params, batch = network("bert")
    unseen = 95
    batch = {**batch, "tokens": batch["labels"]}  # Without any [MASK].
    changed = jax.tree.map(np.copy, params)
    changed["embedding"]["token"]["embedding"][unseen] *= 2
    changed["head_bias"][unseen] = 3.0
    apply = quick_jit(lambda params: bert.apply(params, batch)[0])
    before, after = apply(params), apply(changed)
    product = before[..., unseen] - params["head_bias"][unseen]
    np.testing.assert_allclose(after[..., unseen], 2 * product + 3, rtol=1e-4)
    np.testing.assert_array_equal(after[..., :unseen], before[..., :unseen])
