"""Sites of attentions as they are written and as replaced: the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.attention import call, cudnn
from cfp.attention.matching.check import sites
from cfp.attention.matching.functions import Way
from cfp.attention.matching.matches import replacements
from cfp.attention.matching.ways import refusal_of
from cfp.program.graph import numpy_dtype
from cfp_test.attention.agreement import row_error
from cfp_test.attention.called import cudnn_on_cpus
from cfp_test.attention.known import training_step
from cfp_test.attention.replaced import Step
from cfp_test.support.checking import make_mesh


def drawn(shape, random):
    if shape.dtype == bool:
        return jnp.asarray(random.random(shape.shape) < 0.6)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jnp.asarray(random.integers(0, 60, shape.shape), shape.dtype)
    return jnp.asarray(random.normal(size=shape.shape), shape.dtype)


@pytest.mark.parametrize(
    "model", ["GPT-2", "LLaMA", "Mistral", "BERT", "packed documents", "MLA"]
)
def test_a_site_computes_the_same_as_written_and_as_replaced(model):
    mesh, random = make_mesh((("x", 1),)), np.random.default_rng(3)
    step = Step(*training_step(model, jnp.float32), mesh)
    program = step.frame.program
    found = [
        site
        for match in step.attentions.found.values()
        for site in sites(program, match, Way("xla"), mesh)
    ]
    assert found
    for site in found:
        operands = [drawn(one, random) for one in site.operands]
        written, replaced = site.written(*operands), jax.jit(site.replaced)(*operands)
        assert len(written) == len(replaced)
        for one, other in zip(written, replaced, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert row_error(other, one) < 1e-3


@pytest.fixture
def on_gpus(monkeypatch):
    """Chooses kernels as on NVIDIA's GPUs, and lowers for them."""
    refusal = cudnn.refusal
    monkeypatch.setattr(call, "platform_of", lambda mesh: "cuda")
    monkeypatch.setattr(cudnn, "refusal", lambda problem, _: refusal(problem, "cuda"))
    with cudnn_on_cpus(monkeypatch):
        yield


def padded(x, given, hide):
    scores = jnp.einsum("bqnd,bknd->bnqk", x, x)
    mixed = jax.nn.softmax(hide(scores, given).astype(jnp.float32)).astype(x.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", mixed, x)


PLACE = jnp.arange(64)
CAUSAL = PLACE[:, None] >= PLACE
# By what enters: how it hides keys, and the kernel's kind of mask and of bias.
ENTERING = {
    "causal": ((), lambda s, _: jnp.where(CAUSAL, s, -1e9), ("CAUSAL", False)),
    "keys": (
        jnp.ones((2, 64), bool),
        lambda s, m: jnp.where(m[:, None, None] & CAUSAL, s, -1e9),
        ("CAUSAL", True),
    ),
    "lengths": (
        jnp.array([9, 64]),
        lambda s, n: jnp.where((PLACE < n[:, None])[:, None, None], s, -1e9),
        ("PADDING", False),
    ),
    "lengths, causal": (
        jnp.array([9, 64]),
        lambda s, n: jnp.where((PLACE < n[:, None])[:, None, None] & CAUSAL, s, -1e9),
        ("PADDING_CAUSAL", False),
    ),
    "pairs": (
        jnp.ones((2, 1, 64, 64), bool),
        lambda s, m: jnp.where(m, s, -1e9),
        ("NO_MASK", True),
    ),
    "a prefix": (
        (),
        lambda s, _: jnp.where(CAUSAL | (PLACE < 9), s, -1e9),
        ("NO_MASK", True),
    ),
}


@pytest.mark.parametrize("name", ENTERING)
def test_cudnn_gets_masks_as_it_takes_them(name, on_gpus):
    given, hide, (kind, has_bias) = ENTERING[name]
    x = jnp.ones((2, 64, 2, 64), jnp.bfloat16)

    def step(x, given):
        return jax.grad(lambda x: padded(x, given, hide).astype(jnp.float32).var())(x)

    mesh = make_mesh((("x", 1),))
    step = Step(step, (x, given), mesh)
    [match] = step.attentions.found.values()
    assert refusal_of(match.problem, Way("cudnn"), {"x": 1}, "cuda") is None
    [made] = replacements(step.frame.program, match, Way("cudnn"))
    program, first = step.frame.program, made.stages[0]
    values = [program.values[program.ops[op].operands[i]] for op, i in first.reads]
    shapes = [jax.ShapeDtypeStruct(v.shape, numpy_dtype(v.dtype)) for v in values]
    traced = jax.jit(made.functions.stages(mesh)[0]).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert (
        f"\\22mask_type\\22: \\22{kind}\\22" in text or f'"mask_type": "{kind}"' in text
    )
    assert ("fmhaScaleBias" in text) == has_bias
