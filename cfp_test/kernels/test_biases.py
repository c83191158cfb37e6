"""Biases that a kernel would round are told to callers; their gradients are exact."""

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.kernels import call, cudnn
from cfp_test.kernels.called import cudnn_on_cpus
from cfp_test.programs.common import normal

BATCH, TOKENS, HEADS, HEAD_DIM = 4, 16, 2, 8
NARROW, WIDE = jnp.bfloat16, jnp.float32
WHY = (
    "it would round the bias, which it adds in bfloat16; to use it, cast the bias to "
    "bfloat16"
)
BIAS = normal(9, 1, HEADS, TOKENS, TOKENS)


@pytest.fixture
def on_gpus(monkeypatch):
    """Chooses kernels as on NVIDIA's GPUs, and lowers for them."""
    refusal = cudnn.refusal
    monkeypatch.setattr(call, "platform_of", lambda mesh: "cuda")
    monkeypatch.setattr(cudnn, "refusal", lambda problem, _: refusal(problem, "cuda"))
    with cudnn_on_cpus(monkeypatch):
        yield


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
    with pytest.raises(cfp.CfpError, match=f"cudnn: {WHY}"):
        biased(WIDE, implementation="cudnn")


def test_options_name_the_bias_that_would_be_rounded():
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, HEAD_DIM), NARROW)
    for dtype, why in ((NARROW, None), (WIDE, WHY)):
        bias = jax.ShapeDtypeStruct(BIAS.shape, dtype)
        found = cfp.attention_options(x, x, x, bias=bias, platform="cuda")
        assert {o.implementation: o.reason for o in found}["cudnn"] == why
