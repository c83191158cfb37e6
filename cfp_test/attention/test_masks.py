"""Masks and biases as public models write them: found, read off, and replaced."""

from dataclasses import dataclass
from unittest.mock import patch

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cfp.attention import chunked
from cfp_test.attention.replaced import Step
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

BATCH, TOKENS, HEADS, HEAD_DIM = 4, 16, 2, 4
HIDDEN = HEADS * HEAD_DIM
MESH = make_mesh((("x", 4),))
PLACE = jnp.arange(TOKENS)
AWAY = PLACE[:, None] - PLACE
CAUSAL = AWAY >= 0
LEAST = float(jnp.finfo(jnp.float32).min)
LENGTHS = jnp.array([16, 12, 9, 13])
VALID = PLACE < LENGTHS[:, None]
PACKED = jnp.broadcast_to(PLACE // 5, (BATCH, TOKENS)).astype(jnp.int32)
BIAS = normal(9, 1, HEADS, TOKENS, TOKENS)
SLOPES = 2.0 ** -(1.0 + jnp.arange(HEADS))[:, None, None]


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    with patch.object(chunked, "CHUNK", 8):
        yield


def step_with(masked, entering, scanned=False, remat=False):
    """Two layers of attention whose scores a mask or a bias goes into."""

    def layer(x, weights, entering):
        shape = (BATCH, TOKENS, HEADS, HEAD_DIM)
        q, k, v = ((x @ weights[name]).reshape(shape) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5
        mixed = jax.nn.softmax(masked(scores, entering), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", mixed, v)
        return x + mixed.reshape(x.shape) @ weights["o"]

    run = jax.checkpoint(layer) if remat else layer

    def loss(params, batch):
        x, entering = batch
        if scanned:
            body = lambda x, weights: (run(x, weights, entering), None)  # noqa: E731
            x, _ = jax.lax.scan(body, x, params)
        else:
            for one in range(2):
                x = run(x, jax.tree.map(lambda w: w[one], params), entering)  # noqa: B023
        return jnp.where(VALID[..., None], x - batch[0], 0.0).var()

    def train(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {name: normal(i, 2, HIDDEN, HIDDEN) for i, name in enumerate("qkvo")}
    return Step(train, (params, (normal(5, BATCH, TOKENS, HIDDEN), entering)), MESH)


def rows(mask):
    """[batch, keys] as [batch, 1, 1, keys]."""
    return mask[:, None, None]


def same(ids):
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def linen_mask(valid):
    causal = nn.make_causal_mask(jnp.ones((BATCH, TOKENS)))
    keys = nn.make_attention_mask(jnp.ones((BATCH, TOKENS)), valid)
    combined = nn.combine_masks(causal, keys)
    assert combined is not None
    return combined


# By what enters: how scores are masked, and what is read off.
PADDING_ONLY, CAUSAL_PADDING = "padding", "causal, padding"
WRITTEN = {
    "where of bools": (
        VALID,
        lambda s, m: jnp.where(rows(m), s, -1e10),
        PADDING_ONLY,
    ),
    "where of hidden keys": (
        ~VALID,
        lambda s, m: jnp.where(rows(m), -jnp.inf, s),
        PADDING_ONLY,
    ),
    "where of integers": (
        VALID.astype(jnp.int32),
        lambda s, m: jnp.where(rows(m), s, LEAST),
        PADDING_ONLY,
    ),
    "integers, selected and added": (
        VALID.astype(jnp.int32),
        lambda s, m: s + jnp.where(rows(m) > 0, 0.0, LEAST),
        PADDING_ONLY,
    ),
    "integers, multiplied and added": (
        VALID.astype(jnp.int32),
        lambda s, m: s + (1.0 - rows(m).astype(jnp.float32)) * -1e9,
        "bias",
    ),
    "bools, multiplied and added": (
        VALID,
        lambda s, m: s + (1.0 - rows(m).astype(jnp.float32)) * -1e9,
        PADDING_ONLY,
    ),
    "floats, multiplied and added": (
        VALID.astype(jnp.float32),
        lambda s, m: s + (1.0 - rows(m)) * -1e9,
        "bias",
    ),
    "scores multiplied": (
        VALID,
        lambda s, m: s * rows(m) - 1e10 * (1.0 - rows(m).astype(jnp.float32)),
        PADDING_ONLY,
    ),
    "causal and padding": (
        VALID,
        lambda s, m: jnp.where(rows(m) & CAUSAL, s, LEAST),
        CAUSAL_PADDING,
    ),
    "two sums": (
        VALID,
        lambda s, m: s + jnp.where(CAUSAL, 0, -1e9) + jnp.where(rows(m), 0, -1e9),
        CAUSAL_PADDING,
    ),
    "two selections": (
        VALID,
        lambda s, m: jnp.where(rows(m), jnp.where(CAUSAL, s, -1e9), -1e9),
        CAUSAL_PADDING,
    ),
    "linen, of keys": (
        VALID,
        lambda s, m: jnp.where(linen_mask(m), s, LEAST),
        CAUSAL_PADDING,
    ),
    "linen, of both": (
        VALID,
        lambda s, m: jnp.where(nn.make_attention_mask(m, m), s, LEAST),
        "mask",
    ),
    "soft cap": (
        VALID,
        lambda s, m: jnp.where(rows(m) & CAUSAL, 5 * jnp.tanh(s / 5), LEAST),
        CAUSAL_PADDING,
    ),
    "window and padding": (
        VALID,
        lambda s, m: jnp.where(rows(m) & (AWAY < 4) & CAUSAL, s, LEAST),
        "window of 3 and None, causal, padding",
    ),
    "lengths": (
        LENGTHS,
        lambda s, m: jnp.where(rows(PLACE < m[:, None]), s, LEAST),
        PADDING_ONLY,
    ),
    "a mask of pairs": (
        (VALID[:, None] & CAUSAL)[:, None],
        lambda s, m: jnp.where(m, s, LEAST),
        "mask",
    ),
    "integers for pairs": (
        (VALID[:, None] & CAUSAL)[:, None].astype(jnp.int32),
        lambda s, m: jnp.where(m, s, LEAST),
        "mask",
    ),
    "floats for pairs": (
        (VALID[:, None] & CAUSAL)[:, None].astype(jnp.float32),
        lambda s, m: s + (1.0 - m) * -1e9,
        "bias",
    ),
    "a window and a mask of pairs": (
        VALID[:, None] & CAUSAL,
        lambda s, m: jnp.where((m & (AWAY < 4))[:, None], s, -2.4e38),
        "window of 3 and None, mask",
    ),
    "a bias and padding": (
        (BIAS, VALID),
        lambda s, given: jnp.where(rows(given[1]), s + given[0], -1e10),
        "bias, padding",
    ),
    "distances times slopes": (
        (),
        lambda s, _: jnp.where(CAUSAL, s - SLOPES * jnp.abs(AWAY), -jnp.inf),
        "bias, mask",
    ),
    "slopes that are arguments": (
        SLOPES,
        lambda s, m: jnp.where(CAUSAL, s - m * jnp.abs(AWAY), LEAST),
        "causal, bias",
    ),
    "a prefix": ((), lambda s, _: jnp.where(CAUSAL | (PLACE < 5), s, LEAST), "mask"),
}


def kernels_of(step):
    return [name for name in ("chunked", "xla") if step.refusal(name) is None]


def mask_text(match):
    """The mask of an attention that was found, in words."""
    meaning, words = match.meaning, []
    if meaning.left is not None or meaning.right is not None:
        words.append(f"window of {meaning.left} and {meaning.right}")
    if meaning.causal:
        words.append("causal")
    words += [side.kind for side in meaning.sides]
    return ", ".join(words) or "full"


@pytest.mark.parametrize("name", WRITTEN)
def test_masks_are_read_off_as_models_write_them(name):
    entering, masked, expected = WRITTEN[name]
    step = step_with(masked, entering)
    assert step.attentions.left_alone == ()
    assert {mask_text(m) for m in step.attentions.found.values()} == {expected}
    assert ("chunked" in kernels_of(step)) == (
        not {"bias", "mask"} & {*expected.split(", ")}
    )


def test_packed_segments_are_ids_where_one_attention_compares_them():
    step = step_with(lambda s, ids: jnp.where(same(ids) & CAUSAL, s, LEAST), PACKED)
    for match in step.attentions.found.values():
        assert mask_text(match) in ("causal, segments", "causal, mask")
    assert step.far(step.with_kernel("xla")[0]) == []


def test_masks_that_kernels_do_not_take_are_refused_as_masks():
    step = step_with(*[WRITTEN["a mask of pairs"][i] for i in (1, 0)])
    assert step.refusal("chunked") == (
        "it takes no mask of queries by keys, which is as large as the scores"
    )


def test_a_scale_that_is_no_constant_is_named():
    step = step_with(lambda s, t: s * t, jnp.float32(0.3))
    assert {one.reason for one in step.attentions.left_alone} == {
        "scores are changed by a value that is the same for all keys: a scale, say, "
        "that is no constant"
    }


@dataclass(frozen=True)
class Mask:
    """One of several masks, as an argument of a shape and dtype, and how it is used."""

    shape: str
    dtype: str
    hides: str
    causal: str
    expands_late: bool

    @property
    def argument(self):
        keys = (jnp.arange(TOKENS) + jnp.arange(BATCH)[:, None]) % 7 != 3
        # A query that sees no key is as in the step where scores are selected alone.
        if "add" in (self.hides, self.causal):
            keys = keys.at[:, 0].set(True)
        pairs = keys[:, None] | (AWAY == 0)
        per_head = pairs[:, None] | (jnp.arange(HEADS)[:, None, None] == 0)
        of = {"k": keys[0], "bk": keys, "qk": pairs[0], "bqk": pairs, "bhqk": per_head}
        return of[self.shape].astype(self.dtype)

    def __call__(self, scores, m):
        places = [place for place, x in enumerate("bhqk") if x not in self.shape]
        late = self.expands_late
        hidden = (m if late else jnp.expand_dims(m, places)) == 0
        hidden = jnp.expand_dims(hidden, places) if late else hidden
        if self.causal == "and":
            hidden = hidden | ~CAUSAL
        if self.causal == "add":
            scores = scores + jnp.where(CAUSAL, 0.0, -1e9)
        if self.hides == "where":
            return jnp.where(hidden, -1e9, scores)
        if self.hides == "least":
            return jnp.where(hidden, LEAST, scores)
        return scores + hidden.astype(scores.dtype) * -1e9


MASKS = st.builds(
    Mask,
    shape=st.sampled_from(["k", "bk", "qk", "bqk", "bhqk"]),
    dtype=st.sampled_from(["bool", "int32", "float32", "int8"]),
    hides=st.sampled_from(["where", "least", "add"]),
    causal=st.sampled_from(["", "and", "add"]),
    expands_late=st.booleans(),
)


@pytest.mark.parametrize("examples", [3, *at_night([12])])
def test_any_mask_is_found_and_replaced_by_an_equal(examples):
    @settings(
        max_examples=examples,
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        derandomize=True,
    )
    @given(MASKS, st.booleans(), st.booleans())
    def example(mask, scanned, remat):
        step = step_with(mask, mask.argument, scanned, remat)
        for one in step.attentions.left_alone:
            # An added mask is not there in the backward loop, unless it is computed
            # again.
            assert scanned and not remat and "jax.checkpoint" in one.reason
        if step.attentions.found and (kernels := kernels_of(step)):
            assert step.far(step.with_kernel(kernels[0])[0]) == []

    example()
