"""Property: what is near a cross-entropy is replaced rightly, or left alone."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfp.analysis.layout import constraints, lay_out
from cfp.patterns.build import build, spread_of
from cfp.patterns.sites import cross_entropies
from cfp.presets.presets import presets
from cfp.program.constrain import constrain
from cfp.program.replace import erase_unread
from cfp.program.trace import lower_step
from cfp_test.programs.common import normal, training
from cfp_test.support.checking import differences, prepare, shardings
from cfp_test.support.covering import at_night

WORDS = 36
NUMBERS = jnp.arange(WORDS, dtype=jnp.float32)

LOGITS = {
    "as they are": lambda x: x,
    "scaled": lambda x: 0.5 * x,
    "capped": lambda x: 5.0 * jnp.tanh(x / 5.0),
    "biased": lambda x: x + jnp.sin(NUMBERS),
    "padded": lambda x: jnp.where(NUMBERS < 30.0, x, -1e9),
    "leaky": lambda x: jnp.where(x > 0.0, x, 0.1 * x),
    "rolled": lambda x: jnp.roll(x, 1, axis=-1),
    "summed up": lambda x: jnp.cumsum(x, axis=-1),
    "reversed": lambda x: x[..., ::-1],
    "centred": lambda x: x - x.mean(-1, keepdims=True),
    "of two tokens": lambda x: x + jnp.roll(x, 1, axis=1),
}
LOSSES = {
    "optax": optax.softmax_cross_entropy_with_integer_labels,
    "squared exponents": lambda x, labels: (
        -jnp.log(
            jnp.take_along_axis(jnp.exp(x) ** 2, labels[..., None], -1)[..., 0]
            / (jnp.exp(x) ** 2).sum(-1)
        )
    ),
    "base of two": lambda x, labels: (
        jnp.log2(jnp.exp2(x).sum(-1))
        - jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    ),
    "next word": lambda x, labels: optax.softmax_cross_entropy_with_integer_labels(
        x, (labels + 1) % WORDS
    ),
    "two words": lambda x, labels: (
        jax.nn.logsumexp(x, -1)
        - jnp.where((NUMBERS == labels[..., None]) | (NUMBERS == 3.0), x, 0.0).sum(-1)
    ),
    "one short": lambda x, labels: (
        jax.nn.logsumexp(x[..., 1:], -1)
        - jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    ),
}
BESIDE = {
    "nothing": lambda x: 0.0,
    "z-loss": lambda x: 0.1 * jnp.square(jax.nn.logsumexp(x, -1)).mean(),
    "largest": lambda x: 0.1 * x.max(-1).mean(),
    "penalty": lambda x: 0.1 * jnp.square(x).mean(),
    "entropy": lambda x: (jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(-1).mean(),
    "one word": lambda x: x[..., 5].mean(),
}
TOKENS = {
    "all": lambda loss, labels: loss.mean(),
    "some": lambda loss, labels: (loss * (labels > 3)).sum() / (labels > 3).sum(),
    "hard": lambda loss, labels: (jnp.square(1.0 - jnp.exp(-loss)) * loss).mean(),
}


def check(logits, loss, beside, tokens):
    """Replaces what is found, and compares the step; whether anything was found."""

    def whole(params, batch):
        x = LOGITS[logits](jnp.tanh(batch["x"] @ params["in"]) @ params["head"])
        own = LOSSES[loss](x, batch["labels"])
        return TOKENS[tokens](own, batch["labels"]) + BESIDE[beside](x)

    def make():
        params = {"in": normal(0, 8, 12), "head": normal(1, 12, WORDS)}
        labels = jax.random.randint(jax.random.key(2), (4, 6), 0, WORDS)
        batch = {"x": normal(3, 4, 6, 8), "labels": labels}
        return training(whole, params, batch, optax.sgd(0.1))

    case = prepare(f"{logits}, {loss}, {beside}, {tokens}", make, (("x", 2),))
    program = case.frame.program
    known = cross_entropies(program)
    assert all(one.reason for one in known.left_alone)
    layout = lay_out(case.frame, presets(case.frame)["data_parallel"])
    sizes = dict(case.mesh.shape)
    made = [
        build(program, found, 4, spread_of(layout, found), sizes)
        for found in known.found.values()
    ]
    replaced = tuple(one for one in made if one is not None)
    if replaced:
        ins, outs = shardings(case, layout)
        lowering = lower_step(case.step, ins, outs)
        constrained = dataclasses.replace(constraints(layout), replaced=replaced)
        constrain(lowering.module, program, case.mesh, constrained)
        erase_unread(lowering.module)
        compiled = lowering.lowered.compile()
        arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, ins, strict=True)]
        assert differences(case, jax.tree.leaves(compiled(*arrays))) == {}
    return bool(replaced)


@pytest.mark.parametrize("examples", [2, *at_night([12])])
def test_near_cross_entropies_are_replaced_rightly_or_left_alone(examples):
    @given(*(st.sampled_from(sorted(d)) for d in (LOGITS, LOSSES, BESIDE, TOKENS)))
    @settings(max_examples=examples, deadline=None, derandomize=True)
    def example(logits, loss, beside, tokens):
        check(logits, loss, beside, tokens)

    example()


def test_some_of_them_are_replaced_and_some_are_not():
    assert check("padded", "optax", "z-loss", "hard")
    assert not check("rolled", "optax", "nothing", "all")
