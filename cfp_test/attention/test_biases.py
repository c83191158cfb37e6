"""Biases and outputs that a kernel would round: told from those that lose nothing."""

from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.attention import call, cudnn, plain
from cfp.attention.matching.functions import Way
from cfp.attention.matching.ways import refusal_of
from cfp_test.attention.called import cudnn_on_cpus
from cfp_test.attention.replaced import Step
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh

BATCH, TOKENS, HEADS, HEAD_DIM = 4, 16, 2, 8
HIDDEN = HEADS * HEAD_DIM
MESH = make_mesh((("x", 4),))
PLACE = jnp.arange(TOKENS)
AWAY = PLACE[:, None] - PLACE
CAUSAL = AWAY >= 0
NARROW, WIDE = jnp.bfloat16, jnp.float32
WHY = (
    "it adds a bias in bfloat16, which would round this one; it would with the bias "
    "cast to bfloat16"
)
BIAS = normal(9, 1, HEADS, TOKENS, TOKENS)
SMALL = BIAS.astype(NARROW)
SLOPES = 2.0 ** -(1.0 + jnp.arange(HEADS))[:, None, None]
TABLE = normal(8, 32, HEADS)
KEYS = PLACE < jnp.array([16, 12, 9, 13])[:, None]
PAIRS = (KEYS[:, None] & CAUSAL)[:, None]


def mix(weighed, v, **how):
    return jnp.einsum("bhqk,bkhd->bqhd", weighed, v, **how)


def step_with(masked, entering, scanned=False, mix=mix):
    """A step of two layers in bfloat16; what makes scores of products may be wider."""

    @jax.checkpoint
    def layer(x, weights, entering):
        shape = (BATCH, TOKENS, HEADS, HEAD_DIM)
        q, k, v = ((x @ weights[name]).reshape(shape) for name in "qkv")
        scores = masked(jnp.einsum("bqhd,bkhd->bhqk", q, k), entering)
        weighed = jax.nn.softmax(scores.astype(WIDE), axis=-1).astype(NARROW)
        mixed = mix(weighed, v).reshape(x.shape)
        return x + (mixed @ weights["o"]).astype(NARROW)

    def loss(params, batch):
        x, entering = batch
        if scanned:
            stacked = jax.tree.map(lambda e: jnp.stack([e, e]), entering)
            layers = params, stacked
            x, _ = jax.lax.scan(lambda x, of: (layer(x, *of), None), x, layers)
        else:
            first, second = ({n: w[i] for n, w in params.items()} for i in range(2))
            x = layer(layer(x, first, entering), second, entering)
        return jnp.square(x.astype(WIDE)).mean()

    def train(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {
        n: normal(i, 2, HIDDEN, HIDDEN).astype(NARROW) for i, n in enumerate("qkvo")
    }
    x = normal(5, BATCH, TOKENS, HIDDEN).astype(NARROW)
    return Step(train, (params, (x, entering)), MESH)


def refusals(step):
    assert step.attentions.left_alone == ()
    assert step.attentions.found
    return {
        refusal_of(one.problem, Way("cudnn"), dict(MESH.shape), "cuda")
        for one in step.attentions.found.values()
    }


# By name: what enters, and how it changes the scores, which are in float32 then.
ROUNDED = {
    "an argument": (BIAS, lambda s, b: s + b),
    "one of a head": (BIAS[:, :1], lambda s, b: s + b),
    "transposed": (BIAS, lambda s, b: s + b.swapaxes(2, 3)),
    "of another small dtype": (BIAS.astype(jnp.float16), lambda s, b: s + b),
    "times a factor": (SMALL, lambda s, b: s + b.astype(WIDE) * 0.3),
    "before a factor": (SMALL, lambda s, b: (s + b) * 0.3),
    "two": ((SMALL, SMALL[:, ::-1]), lambda s, b: s + b[0] + b[1]),
    "cast elsewhere, too": (BIAS, lambda s, b: s + b + 0 * jnp.sum(b.astype(NARROW))),
    "of a table": (TABLE, lambda s, t: s + t[AWAY + 15].transpose(2, 0, 1)),
    "distances times slopes": (
        (),
        lambda s, _: jnp.where(CAUSAL, s - SLOPES * 0.3 * jnp.abs(AWAY), -jnp.inf),
    ),
    "large integers": (1000 + AWAY, lambda s, b: s + b),
    "with a mask": (
        (BIAS, PAIRS),
        lambda s, b: s + b[0] + jnp.where(b[1], 0.0, -1e9),
    ),
    "a mask that a factor brings near": (
        PAIRS,
        lambda s, m: (s * 125 + jnp.where(m, 0.0, -12345.0)) * 0.001,
    ),
    "a mask of floats": (
        KEYS.astype(WIDE),
        lambda s, m: s + (1.0 - m[:, None, None]) * -1e9,
    ),
}
EXACT = {
    "an argument": (SMALL, lambda s, b: s + b),
    "rounded before": (BIAS, lambda s, b: s + b.astype(NARROW)),
    "rounded, and back": (BIAS, lambda s, b: s + b.astype(NARROW).astype(WIDE)),
    "turned in float32": (
        SMALL,
        lambda s, b: s + jnp.roll(b.astype(WIDE).swapaxes(2, 3)[:, ::-1], 1, 2),
    ),
    "halved with the scores": (SMALL, lambda s, b: (s + b) * 0.5),
    "taken away": (SMALL, lambda s, b: s - b),
    "of a table": (
        TABLE,
        lambda s, t: s + t.astype(NARROW)[AWAY + 15].transpose(2, 0, 1),
    ),
    "with a mask": (
        (SMALL, PAIRS),
        lambda s, b: s + (b[0] + jnp.where(b[1], 0.0, -1e9)),
    ),
    "a mask of pairs": (PAIRS, lambda s, m: jnp.where(m, s, -1e9)),
    "a mask that is added": (PAIRS, lambda s, m: s + jnp.where(m, 0.0, -jnp.inf)),
    "the least number": (
        PAIRS,
        lambda s, m: s + jnp.where(m, 0.0, jnp.finfo(WIDE).min),
    ),
    "integers for pairs": (
        PAIRS.astype(jnp.int32),
        lambda s, m: s + (1.0 - m.astype(WIDE)) * -1e9,
    ),
    "integers less one": (
        PAIRS.astype(jnp.int32),
        lambda s, m: s + (m - 1.0) * 1e9,
    ),
    "a prefix": ((), lambda s, _: jnp.where(CAUSAL | (PLACE < 5), s, -1e9)),
    "a prefix that is added": (
        (),
        lambda s, _: s + jnp.where(CAUSAL | (PLACE < 5), 0.0, -1e9),
    ),
}


def wide(masked):
    return lambda scores, entering: masked(scores.astype(WIDE), entering)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_bias_that_needs_float32_has_no_kernel_in_bfloat16(name):
    entering, masked = ROUNDED[name]
    assert refusals(step_with(wide(masked), entering)) == {WHY}


@pytest.mark.parametrize("name", EXACT)
def test_a_bias_of_which_nothing_is_lost_keeps_its_kernel(name):
    entering, masked = EXACT[name]
    assert refusals(step_with(wide(masked), entering)) == {None}


def test_scores_in_bfloat16_take_any_bias():
    """The step itself rounds it, and then each sum."""

    def narrow(scores, given):
        return (scores + given[0].astype(NARROW) + given[1].astype(NARROW)) * 0.3

    assert refusals(step_with(narrow, (BIAS, BIAS))) == {None}
    # Without a cast it is added in float32.
    assert refusals(step_with(lambda s, b: s + b, BIAS)) == {WHY}


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_a_bias_is_followed_into_loops(dtype):
    step = step_with(wide(lambda s, b: s + b), BIAS.astype(dtype), scanned=True)
    assert refusals(step) == {None if dtype == NARROW else WHY}


@pytest.fixture
def on_gpus(monkeypatch):
    """Chooses kernels as on NVIDIA's GPUs, and lowers for them."""
    refusal = cudnn.refusal
    monkeypatch.setattr(call, "platform_of", lambda mesh: "cuda")
    monkeypatch.setattr(cudnn, "refusal", lambda problem, _: refusal(problem, "cuda"))
    with cudnn_on_cpus(monkeypatch):
        yield


@pytest.mark.parametrize("name", ["rounded, and back", "with a mask", "a prefix"])
def test_the_kernel_gets_it_in_the_dtype_of_queries(name, on_gpus):
    entering, masked = EXACT[name]
    step, given = step_with(wide(masked), entering), []

    def whole(q, k, v, scores, mask, bias):
        given.append(f"{q.dtype} {bias.dtype}")
        return plain.whole(q, k, v, scores, mask, bias)

    with patch.object(cudnn, "whole", whole):
        planned, replaced = step.with_kernel("cudnn")
    assert replaced and {*given} == {"bfloat16 bfloat16"}
    assert step.far(planned) == []


def biased(dtype, **how):
    """Output and gradients of an attention with a bias, the bias's last."""
    shape = (BATCH, TOKENS, HEADS, HEAD_DIM)
    q, k, v = (normal(seed, *shape).astype(NARROW) for seed in range(3))

    def loss(q, k, v, bias):
        return cfp.attention(q, k, v, bias=bias, **how).astype(WIDE).var()

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    return grads.trace(q, k, v, BIAS.astype(dtype)), (q, k, v, BIAS.astype(dtype))


def test_a_call_adds_a_float32_bias_in_float32(on_gpus):
    """And its gradient is float32, and not one that was rounded."""
    for dtype in (NARROW, WIDE):
        text = biased(dtype)[0].lower(lowering_platforms=("cuda",)).as_text()
        assert ("__cudnn$fmhaScaleBiasSoftmaxBackward" in text) == (dtype == NARROW)
        assert ("cudnn" in text) == (dtype == NARROW)
    traced, args = biased(WIDE)
    gradient = traced.lower().compile()(*args)[3]
    assert gradient.dtype == WIDE
    assert not jnp.array_equal(gradient, gradient.astype(NARROW).astype(WIDE))
    with pytest.raises(cfp.AttentionError, match=f"cudnn: {WHY}"):
        biased(WIDE, implementation="cudnn")


def test_options_name_the_bias_that_would_be_rounded():
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, HEAD_DIM), NARROW)
    for dtype, why in ((NARROW, None), (bool, None), (WIDE, WHY), (jnp.int32, WHY)):
        bias = jax.ShapeDtypeStruct(BIAS.shape, dtype)
        found = cfp.attention_options(x, x, x, bias=bias, platform="cuda")
        assert {o.implementation: o.reason for o in found}["cudnn"] == why


WIDELY = {"preferred_element_type": WIDE}
OUTPUTS = {
    "in bfloat16": (mix, None),
    "made in float32, and cast": (
        lambda w, v: mix(w, v, **WIDELY).swapaxes(1, 2).astype(NARROW).swapaxes(1, 2),
        None,
    ),
    "kept in float32": (lambda w, v: mix(w, v, **WIDELY), "its output in bfloat16"),
    "scaled in float32": (
        lambda w, v: (mix(w, v, **WIDELY) * 0.3).astype(NARROW),
        "its output in bfloat16",
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_stays_wide_is_not_rounded(name):
    mixing, why = OUTPUTS[name]
    step = step_with(lambda s, _: jnp.where(CAUSAL, s, -jnp.inf), (), mix=mixing)
    [found] = refusals(step)
    assert (found is None) if why is None else (why in found)
