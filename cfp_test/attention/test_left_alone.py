"""Attentions that no kernel computes as they are written: they stay, and are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp_test.attention.replaced import Step
from cfp_test.programs.common import normal
from cfp_test.support.checking import make_mesh

BATCH, TOKENS, HEADS, HEAD_DIM, LAYERS = 4, 32, 2, 4, 3
MESH = make_mesh((("x", 4),))
PLACE = np.arange(TOKENS)
AWAY = PLACE[:, None] - PLACE
CAUSAL = AWAY >= 0
LOCAL = CAUSAL & (AWAY < 5)
HIDDEN = -1e9
FLAG = np.asarray(True)
FLAGS = np.arange(BATCH) % 2 == 0
VALID = np.arange(TOKENS) >= np.array([0, 3, 0, 9])[:, None]


def row(mask):
    return mask[:, None, None]


def hidden(scores, mask, by=HIDDEN):
    return jnp.where(mask, scores, by)


def softmax(scores):
    return jax.nn.softmax(scores, axis=-1)


def but(change):
    """A causal mask with an exception."""
    mask = CAUSAL.copy()
    change(mask)
    return mask


def registers(mask):
    mask[:, 13:15] = True


def token(mask):
    mask[13], mask[:, 13] = True, True


def pair(mask):
    mask[21, 12] = False


def narrow(x):
    return x.astype(jnp.float8_e4m3fn).astype(x.dtype)


CLIPS = np.where(np.arange(HEADS) == 1, 1.0, 9e9)[:, None, None]
UNSIGNED = PLACE.astype(np.uint32)
# What enters, and the weights of scores.
WEIGHTS = {
    "flag of masks": (
        FLAG,
        lambda s, f: softmax(hidden(s, jnp.where(f, LOCAL, CAUSAL))),
    ),
    "flag of scores": (
        FLAG,
        lambda s, f: softmax(jnp.where(f, hidden(s, LOCAL), hidden(s, CAUSAL))),
    ),
    "flags of sequences": (
        FLAGS,
        lambda s, f: softmax(
            hidden(s, jnp.where(f[:, None, None, None], LOCAL, CAUSAL))
        ),
    ),
    "flag of added masks": (
        FLAG,
        lambda s, f: softmax(
            s + jnp.where(f, np.where(LOCAL, 0, HIDDEN), np.where(CAUSAL, 0, HIDDEN))
        ),
    ),
    "branch of masks": (
        (FLAG, VALID),
        lambda s, given: softmax(
            hidden(
                s,
                jax.lax.cond(
                    given[0],
                    lambda: CAUSAL & row(given[1]),
                    lambda: jnp.ones((BATCH, 1, TOKENS, TOKENS), bool),
                ),
            )
        ),
    ),
    "branch of weights": (
        FLAG,
        lambda s, f: jax.lax.cond(
            f, softmax, lambda s: jnp.full_like(s, 1 / TOKENS), hidden(s, CAUSAL)
        ),
    ),
    "weights in FP8": (
        (),
        lambda s, _: (
            softmax(hidden(s, CAUSAL)).astype(jnp.float8_e4m3fn).astype(s.dtype)
        ),
    ),
    "scores truncated": (
        (),
        lambda s, _: softmax(hidden(s.astype(jnp.int32).astype(s.dtype), CAUSAL)),
    ),
    "unsigned distances": (
        (),
        lambda s, _: softmax(hidden(s, (UNSIGNED[:, None] - UNSIGNED) < 5)),
    ),
    "positions in bytes": (
        (),
        lambda s, _: softmax(
            hidden(
                s,
                jnp.asarray(AWAY >= 0)
                & ((jnp.arange(TOKENS) * 9).astype(jnp.uint8)[:, None] > 3),
            )
        ),
    ),
    "no key, -1e4": (
        VALID,
        lambda s, m: softmax(hidden(s, CAUSAL & row(m), -1e4)),
    ),
    "no key, added": (
        VALID,
        lambda s, m: softmax(s + jnp.where(CAUSAL & row(m), 0.0, HIDDEN)),
    ),
    "registers": ((), lambda s, _: softmax(hidden(s, but(registers)))),
    "a token": ((), lambda s, _: softmax(hidden(s, but(token)))),
    "a pair": ((), lambda s, _: softmax(hidden(s, but(pair)))),
    "a head": (
        (),
        lambda s, _: softmax(
            hidden(s, np.where(np.arange(HEADS)[:, None, None] == 1, LOCAL, CAUSAL))
        ),
    ),
    "clipped heads": (
        (),
        lambda s, _: softmax(
            hidden(
                jnp.minimum(
                    s, np.where(np.arange(HEADS) == 1, 1.0, 9e9)[:, None, None]
                ),
                CAUSAL,
            )
        ),
    ),
}


def attend(weigh, q, k, v, given):
    weights = weigh(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5, given)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def arguments():
    return tuple(normal(seed, BATCH, TOKENS, HEADS, HEAD_DIM) for seed in range(3))


def assert_equal(step, kernel="xla"):
    """Compares a step with kernels with the step as it is written."""
    planned, _ = step.with_kernel(kernel)
    found = jax.tree.leaves(planned(*step.args))
    expected = jax.tree.leaves(jax.jit(step.fn)(*step.args))
    for got, want in zip(found, expected, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "infers"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_an_attention_is_replaced_by_an_equal_or_left(name, trains):
    given, weigh = WEIGHTS[name]

    def infer(q, k, v, given):
        return attend(weigh, q, k, v, given)

    def train(q, k, v, given):
        def loss(q, k, v):
            return jnp.square(infer(q, k, v, given)).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    given = jax.tree.map(jnp.asarray, given)
    step = Step(train if trains else infer, (*arguments(), given), MESH)
    for one in step.attentions.left_alone:
        assert one.reason
    if step.attentions.found:
        assert_equal(step)


# Slices of one stack at two indices of a loop: of ids, paddings, and keys.
def chunked_ids(q, k, v, ids):
    def one(total, i):
        own, before = ids[i], ids[i - 1]
        mask = (own[:, None] == before[None])[None, None]
        weigh = lambda s, _: softmax(hidden(s, mask))  # noqa: E731
        return total + attend(weigh, q[i], k[i], v[i], None), None

    return jax.lax.scan(one, jnp.zeros_like(q[0]), jnp.arange(LAYERS))[0]


def chunked_keys(q, k, v, ids):
    def one(total, i):
        before = jnp.maximum(i - 1, 0)
        s = jnp.einsum("bqhd,bkhd->bhqk", q[i], k[i])
        other = jnp.einsum("bqhd,bkhd->bhqk", q[i], k[before])
        mixed = jnp.einsum("bhqk,bkhd->bqhd", softmax(s), v[before])
        return total + mixed + jnp.einsum("bhqk,bkhd->bqhd", softmax(other), v[i]), None

    return jax.lax.scan(one, jnp.zeros_like(q[0]), jnp.arange(LAYERS))[0]


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "infers"])
@pytest.mark.parametrize("make", [chunked_ids, chunked_keys])
def test_a_stack_is_sliced_at_two_indices(make, trains):
    def train(q, k, v, ids):
        return jax.grad(lambda *x: jnp.square(make(*x, ids)).sum(), (0, 1, 2))(q, k, v)

    shape = LAYERS, BATCH, TOKENS, HEADS, HEAD_DIM
    q, k, v = (normal(seed, *shape) for seed in range(3))
    ids = (jnp.arange(LAYERS * TOKENS) // 11 % 3).reshape(LAYERS, TOKENS)
    step = Step(train if trains else make, (q, k, v, ids), MESH)
    if step.attentions.found:
        assert_equal(step)


# Only the softmax's argument, or what hides keys, is another one.
ARGUMENTS = {
    "infinite beyond 88": lambda s: jnp.log(jnp.exp(s)),
    "a number before the sum": lambda s: (s + 1e9) - 1e9,
    "as many heads as keys": lambda s: hidden(
        s, np.arange(TOKENS)[:, None, None] >= np.arange(TOKENS)
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_linear_or_the_attention_is_left(name):
    def infer(q, k, v):
        weights = softmax(ARGUMENTS[name](jnp.einsum("bqhd,bkhd->bhqk", q, k)))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    shape = BATCH, TOKENS, TOKENS, HEAD_DIM
    step = Step(infer, tuple(normal(seed, *shape) for seed in range(3)), MESH)
    if "heads" in name:
        assert step.attentions.found
        assert_equal(step)
    else:
        assert not step.attentions.found
