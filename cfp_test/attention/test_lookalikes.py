"""Random programs that look like attention: left alone, or replaced by an equal."""

from dataclasses import dataclass
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cfp.attention import chunked
from cfp_test.attention.replaced import Step
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh

BATCH, TOKENS, HEADS, HEAD_DIM = 4, 16, 2, 4
PLACE = np.arange(TOKENS)
AWAY = PLACE[:, None] - PLACE
MASKS = {
    "full": np.ones((TOKENS, TOKENS), bool),
    "causal": AWAY >= 0,
    "window": (AWAY >= 0) & (AWAY < 5),
}
# A bias of relative positions that is part of the step, weights of keys, of queries.
SLOPES = -0.1 * np.abs(AWAY).astype(np.float32)
OF_KEYS = np.linspace(0.5, 1.5, TOKENS, dtype=np.float32)
OF_QUERIES = OF_KEYS[:, None]
HEAD_MIX = np.array([[0.8, 0.2], [0.3, 0.7]], np.float32)


def softmax(s, axis=-1):
    return jax.nn.softmax(s, axis)


def exponentials(s):
    return jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))


def normalized(weights):
    return weights / weights.sum(-1, keepdims=True)


# What takes the place of the softmax of masked scores. None is a softmax.
OTHERS = {
    "leaked": lambda s, c: jnp.exp(s) / (c + jnp.exp(s).sum(-1, keepdims=True)),
    "norm of two": lambda s, c: (
        exponentials(s)
        / jnp.sqrt(jnp.square(exponentials(s)).sum(-1, keepdims=True) + 1e-6)
    ),
    "greatest": lambda s, c: exponentials(s) / (c * TOKENS),
    "power": lambda s, c: normalized(softmax(s) ** (1 + c)),
    "over queries": lambda s, c: softmax(s, -2),
    "over heads": lambda s, c: softmax(s, 1),
    "over both": lambda s, c: softmax(s.reshape(*s.shape[:2], TOKENS * TOKENS)).reshape(
        s.shape
    ),
    "scaled after": lambda s, c: (1 + c) * softmax(s),
    "keys weighed after": lambda s, c: softmax(s) * OF_KEYS,
    "rows weighed before": lambda s, c: softmax(s * OF_QUERIES),
    "scores twice": lambda s, c: softmax(s) + c * jnp.tanh(s),
    "gated by scores": lambda s, c: softmax(s) * jax.nn.sigmoid(s),
    "cubed": lambda s, c: softmax(s * jnp.square(jnp.maximum(s, -3.0))),
    "less a mean": lambda s, c: softmax(
        s - c * jnp.maximum(s, -3.0).mean(-2, keepdims=True)
    ),
    "dropped after": lambda s, c: softmax(s) * (AWAY % 2 == 0),
    "not differentiated": lambda s, c: jax.lax.stop_gradient(softmax(s)),
    "half differentiated": lambda s, c: (
        (1 - c) * softmax(s) + c * jax.lax.stop_gradient(softmax(s))
    ),
    "heads mixed": lambda s, c: jnp.einsum("bhqk,hg->bgqk", softmax(s), HEAD_MIX),
    "mixed twice": lambda s, c: jnp.einsum("bhqk,bhkj->bhqj", softmax(s), softmax(s)),
    "a softmax of it": lambda s, c: softmax(softmax(s)),
    "less its mean": lambda s, c: softmax(s) - c / TOKENS,
}
# These are softmaxes, in other words.
SOFTMAXES = {
    "as jax.nn has it": lambda s, c: softmax(s),
    "by its logarithm": lambda s, c: jnp.exp(jax.nn.log_softmax(s)),
    "without its maximum": lambda s, c: normalized(jnp.exp(s)),
    "by hand": lambda s, c: normalized(exponentials(s)),
    "by its sum's inverse": lambda s, c: (
        exponentials(s) * (1 / exponentials(s).sum(-1, keepdims=True))
    ),
}
GRADIENTS = ("not differentiated", "half differentiated")
RETURNED = ("", "scores", "weights")


@dataclass(frozen=True)
class Program:
    """A step that mixes values by weights that some function makes of scores."""

    weigh: str
    mask: str
    scale: float
    share: float
    heads_first: bool
    trains: bool
    returned: str

    @property
    def is_attention(self) -> bool:
        # What differs in gradients alone is one in a step that takes none.
        same = self.weigh in SOFTMAXES or (self.weigh in GRADIENTS and not self.trains)
        return same and not self.returned

    def step(self):
        order = "bhqd,bhkd,bhqk,bhkd->bhqd" if self.heads_first else ""
        order = order or "bqhd,bkhd,bhqk,bkhd->bqhd"
        q_dims, k_dims, weights_dims, mix = order.split(",")
        weigh = {**OTHERS, **SOFTMAXES}[self.weigh]
        # A maximum is not left out of scores that are hidden by infinity.
        hidden = -1e9 if self.weigh in ("scores twice", "gated by scores") else -jnp.inf

        def forward(q, k, v):
            scores = jnp.einsum(f"{q_dims},{k_dims}->bhqk", q, k) * self.scale
            weights = weigh(jnp.where(MASKS[self.mask], scores, hidden), self.share)
            out = jnp.einsum(f"{weights_dims},{mix}", weights, v)
            seen = {"": None, "scores": scores, "weights": weights}[self.returned]
            return out, seen

        def loss(q, k, v, aim):
            out, seen = forward(q, k, v)
            return jnp.square(out - aim).sum(), seen

        def train(q, k, v, aim):
            both, grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
                q, k, v, aim
            )
            return both, grads

        def infer(q, k, v, aim):
            out, seen = forward(q, k, v)
            return out + aim if seen is None else (out + aim, seen)

        return train if self.trains else infer

    @property
    def arguments(self):
        shape = (BATCH, TOKENS, HEADS, HEAD_DIM)
        if self.heads_first:
            shape = (BATCH, HEADS, TOKENS, HEAD_DIM)
        return tuple(normal(seed, *shape, scale=0.7) for seed in range(4))


def programs(weighs):
    return st.builds(
        Program,
        weigh=st.sampled_from(sorted(weighs)),
        mask=st.sampled_from(sorted(MASKS)),
        scale=st.sampled_from([0.5, 1.0, 2.0]),
        share=st.floats(0.05, 0.9).map(lambda x: round(x, 3)),
        heads_first=st.booleans(),
        trains=st.booleans(),
        returned=st.sampled_from(RETURNED),
    )


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    with patch.object(chunked, "CHUNK", 8):
        yield


# A program is small as it is drawn, and to trace and compile it takes a while.
QUICK = settings(max_examples=20, phases=(Phase.explicit, Phase.reuse, Phase.generate))
MESH = make_mesh((("x", 4),))


def assert_equal_if_replaced(program, step):
    """Puts a kernel into a step in place of what was taken for attention."""
    planned, _ = step.with_kernel("xla" if step.refusal("chunked") else "chunked")
    found = jax.tree.leaves(planned(*program.arguments))
    expected = jax.tree.leaves(jax.jit(program.step())(*program.arguments))
    for got, want in zip(found, expected, strict=True):
        got, want = np.asarray(got), np.asarray(want)
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def check(program):
    step = Step(program.step(), program.arguments, MESH)
    if step.attentions.found:
        assert_equal_if_replaced(program, step)
    return step.attentions


@QUICK
@given(programs(OTHERS))
def test_what_only_looks_like_attention_is_left_alone(program):
    assert bool(check(program).found) == program.is_attention


@settings(QUICK, max_examples=6)
@given(programs(SOFTMAXES))
def test_a_softmax_in_other_words_is_replaced_unless_it_is_returned(program):
    found = check(program)
    assert bool(found.found) == program.is_attention
    for one in found.left_alone:
        assert one.source.partition(":")[0].endswith("test_lookalikes.py")
        assert one.reason


HEAD = np.arange(8)[:, None, None]
# Of eight heads the fourth and the fifth are others.
OF_SOME_HEADS = {
    "a window": lambda s, some: softmax(
        jnp.where(MASKS["window"] | (MASKS["causal"] & ~some), s, -1e9)
    ),
    "no mask": lambda s, some: softmax(jnp.where(MASKS["causal"] | some, s, -1e9)),
    "a scale": lambda s, some: softmax(s * jnp.where(some, 2.0, 1.0)),
    "a bias": lambda s, some: softmax(s + jnp.where(some, SLOPES, 0.0)),
    "scaled after": lambda s, some: softmax(s) * jnp.where(some, 2.0, 1.0),
}


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "infers"])
@pytest.mark.parametrize("name", OF_SOME_HEADS)
def test_heads_of_which_some_have_other_constants_are_left_alone(name, trains):
    some = (HEAD == 3) | (HEAD == 4)
    weigh = OF_SOME_HEADS[name]

    def infer(q, k, v):
        weights = weigh(jnp.einsum("bqhd,bkhd->bhqk", q, k), some)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    def train(q, k, v):
        return jax.grad(lambda *x: jnp.square(infer(*x)).sum(), (0, 1, 2))(q, k, v)

    shape = BATCH, TOKENS, len(HEAD), HEAD_DIM
    arguments = tuple(normal(seed, *shape, scale=0.7) for seed in range(3))
    made = train if trains else infer
    step = Step(made, arguments, MESH)
    assert not step.attentions.found


CLIPPED = {
    "above": lambda s: jnp.minimum(s, 9.0),
    "below": lambda s: jnp.maximum(s, -20.0),
    "both": lambda s: jnp.clip(s, -50.0, 50.0),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_scores_are_left_alone(name):
    def infer(q, k, v):
        scores = CLIPPED[name](jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5)
        return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores), v)

    shape = BATCH, TOKENS, HEADS, HEAD_DIM
    arguments = tuple(normal(seed, *shape) for seed in range(3))
    step = Step(infer, arguments, MESH)
    [one] = step.attentions.left_alone
    assert not step.attentions.found and "large scores" in one.reason


def test_a_row_whose_scores_are_all_low_is_normalized_as_written():
    """Its sum is held above one, which it is in rows with a score near zero."""

    def infer(q, k, v):
        weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5)
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1.0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    shape = BATCH, TOKENS, HEADS, HEAD_DIM
    arguments = tuple(normal(seed, *shape) for seed in range(3))
    assert not Step(infer, arguments, MESH).attentions.found


@jax.custom_vjp
def clipped_backward(scores):
    return scores


clipped_backward.defvjp(
    lambda scores: (scores, None),
    lambda _, gradient: (jnp.clip(gradient, -50.0, 50.0),),
)


def test_gradients_of_scores_that_are_clipped_stay_clipped():
    def loss(q, k, v):
        scores = clipped_backward(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        out = jnp.einsum("bhqk,bkhd->bqhd", softmax(scores), v)
        return jnp.square(100.0 * out).sum()

    shape = BATCH, TOKENS, HEADS, HEAD_DIM
    arguments = tuple(normal(seed, *shape) for seed in range(3))
    found = Step(jax.grad(loss, (0, 1, 2)), arguments, MESH).attentions
    assert not found.found
    assert "gradient of the queries" in found.left_alone[0].reason
