"""Cross-entropies as users write them: vmapped, in any order of dims, and with more."""

import dataclasses
import functools
import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cfp.analysis.layout import constraints, lay_out
from cfp.patterns.build import build, spread_of
from cfp.patterns.sites import cross_entropies
from cfp.presets.presets import presets
from cfp.program.constrain import constrain
from cfp.program.replace import erase_unread
from cfp.program.trace import lower_step
from cfp_test.programs.common import normal, training
from cfp_test.support.checking import differences, draw, prepare, shardings
from cfp_test.support.covering import at_night

WORDS, HIDDEN, BATCH, LENGTH = 36, 12, 4, 6
MESH = (("x", 4),)
optax_loss = optax.softmax_cross_entropy_with_integer_labels


def hidden(p, x):
    return jnp.tanh(x @ p["in"])


def project(p):
    """A head as Equinox writes it: the weight on the left of one vector."""
    return lambda h: p["head"] @ h


def logits_of(p, b):
    return hidden(p, b["x"]) @ p["head"].T


def vmapped_model(p, b):
    logits = jax.vmap(jax.vmap(lambda h: project(p)(h) + p["bias"]))(hidden(p, b["x"]))
    return optax_loss(logits, b["labels"]).mean()


def loss_per_example(p, b):
    def one(x, labels):
        return optax_loss(jax.vmap(project(p))(hidden(p, x)), labels).mean()

    return jax.vmap(one)(b["x"], b["labels"]).mean()


def loss_per_token(p, b):
    def one(h, label):
        return -jax.nn.log_softmax(project(p)(h) / 0.7)[label]

    return jax.vmap(jax.vmap(one))(hidden(p, b["x"]), b["labels"]).mean()


def logsumexp_per_token(p, b):
    def one(x, label):
        logits = project(p)(hidden(p, x))
        return jax.nn.logsumexp(logits) - logits[label]

    tokens = b["x"].reshape(-1, b["x"].shape[-1])
    return jax.vmap(one)(tokens, b["labels"].reshape(-1)).mean()


def words_in_the_middle(p, b):
    logits = jnp.einsum("vh,bth->bvt", p["head"], hidden(p, b["x"]))
    found = jax.nn.log_softmax(logits, axis=1)
    return -jnp.take_along_axis(found, b["labels"][:, None], axis=1).mean()


def hidden_in_the_middle(p, b):
    x = hidden(p, b["x"]).transpose(0, 2, 1)
    logits = jnp.einsum("vh,bht->vbt", p["head"], x)
    return optax_loss(jnp.moveaxis(logits, 0, -1), b["labels"]).mean()


def swapped_behind_the_head(p, b):
    return optax_loss(logits_of(p, b).swapaxes(0, 1), b["labels"].T).mean()


def flattened(p, b):
    logits = logits_of(p, b).reshape(-1, WORDS)
    return optax_loss(logits, b["labels"].reshape(-1)).mean()


def flattened_before_the_head(p, b):
    logits = hidden(p, b["x"]).reshape(-1, HIDDEN) @ p["head"].T
    logits = logits.reshape(BATCH, LENGTH, WORDS)
    return optax_loss(logits, b["labels"]).mean()


def flat_indices(p, b):
    found = jax.nn.log_softmax(logits_of(p, b).reshape(-1, WORDS))
    return -found[jnp.arange(BATCH * LENGTH), b["labels"].reshape(-1)].mean()


def indices_of_each_dim(p, b):
    found = jax.nn.log_softmax(logits_of(p, b))
    places = jnp.arange(BATCH)[:, None], jnp.arange(LENGTH)[None]
    return -found[(*places, b["labels"])].mean()


def one_hot_dot(p, b):
    def one(h, label):
        one_hot = jax.nn.one_hot(label, WORDS)
        return -jnp.dot(one_hot, jax.nn.log_softmax(project(p)(h)))

    return jax.vmap(jax.vmap(one))(hidden(p, b["x"]), b["labels"]).mean()


def one_hot_summed_at_once(p, b):
    one_hot = jax.nn.one_hot(b["labels"], WORDS)
    weights = jnp.sin(jnp.arange(BATCH))[:, None, None]
    return -jnp.sum(weights * one_hot * jax.nn.log_softmax(logits_of(p, b))) / 24


def one_hot_einsum(p, b):
    one_hot = jax.nn.one_hot(b["labels"], WORDS)
    return -jnp.einsum("btv,btv->", one_hot, jax.nn.log_softmax(logits_of(p, b))) / 24


def smoothed_labels(p, b):
    labels = optax.smooth_labels(jax.nn.one_hot(b["labels"], WORDS), 0.1)
    return optax.softmax_cross_entropy(logits_of(p, b), labels).mean()


def smoothed_per_token(p, b):
    def one(h, label):
        found = jax.nn.log_softmax(project(p)(h))
        return -0.9 * found[label] - 0.1 * found.mean()

    return jax.vmap(jax.vmap(one))(hidden(p, b["x"]), b["labels"]).mean()


def masked_with_z_loss(p, b):
    def one(x, labels):
        logits = jax.vmap(project(p))(hidden(p, x))
        loss = optax_loss(logits, labels)
        loss += 1e-2 * jax.nn.logsumexp(logits, -1) ** 2
        return (loss * (labels > 3)).sum(), (labels > 3).sum()

    total, count = jax.vmap(one)(b["x"], b["labels"])
    return total.sum() / count.sum()


def ignored_labels(p, b):
    labels = jnp.where(b["labels"] < 9, -100, b["labels"])
    keep = labels != -100
    loss = optax_loss(logits_of(p, b), jnp.where(keep, labels, 0))
    return jnp.where(keep, loss, 0.0).sum() / keep.sum()


def shifted_per_example(p, b):
    def one(x, labels):
        logits = jax.vmap(project(p))(hidden(p, x))
        return optax_loss(logits[:-1], labels[1:]).mean()

    return jax.vmap(one)(b["x"], b["labels"]).mean()


def shifted_and_flattened(p, b):
    logits = logits_of(p, b)[..., :-1, :].reshape(-1, WORDS)
    return optax_loss(logits, b["labels"][..., 1:].reshape(-1)).mean()


def shifted_summed_at_once(p, b):
    """The bias is added behind the cut: its gradient is a sum over cut tokens."""
    logits = logits_of(p, b)[:, 1:] + p["bias"]
    one_hot = jax.nn.one_hot(b["labels"][:, :-1], WORDS)
    return -jnp.sum(one_hot * jax.nn.log_softmax(logits)) / 20


def in_bfloat16(p, b):
    def one(h, label):
        head = p["head"].astype(jnp.bfloat16)
        return optax_loss(jnp.dot(head, h, preferred_element_type=jnp.float32), label)

    x = hidden(p, b["x"]).astype(jnp.bfloat16)
    return jax.vmap(jax.vmap(one))(x, b["labels"]).mean()


def in_highest_precision(p, b):
    logits = jnp.matmul(hidden(p, b["x"]), p["head"].T, precision="highest")
    return optax_loss(logits, b["labels"]).mean()


def without_a_largest(p, b):
    logits = logits_of(p, b)
    own = jnp.take_along_axis(logits, b["labels"][..., None], -1)[..., 0]
    return (jnp.log(jnp.exp(logits).sum(-1)) - own).mean()


def with_accuracy(p, b):
    def one(x, labels):
        logits = jax.vmap(project(p))(hidden(p, x))
        right = (jnp.argmax(logits, -1) == labels).mean()
        return optax_loss(logits, labels).mean(), right

    loss, right = jax.vmap(one)(b["x"], b["labels"])
    return loss.mean() + right.mean()


def masked_words(count):
    def loss(p, b):
        logits = jnp.where(jnp.arange(WORDS) < WORDS - count, logits_of(p, b), -jnp.inf)
        return optax_loss(logits, b["labels"] % (WORDS - count)).mean()

    loss.__name__ = f"masked_{count}_words"
    return loss


def with_costs_of_words(p, b):
    logits = logits_of(p, b)
    costs = jnp.sin(jnp.arange(WORDS))
    expected = (jax.nn.softmax(logits) * costs).sum(-1).mean()
    return optax_loss(logits, b["labels"]).mean() + expected


FOUND = (
    vmapped_model,
    loss_per_example,
    loss_per_token,
    logsumexp_per_token,
    words_in_the_middle,
    hidden_in_the_middle,
    swapped_behind_the_head,
    flattened,
    flattened_before_the_head,
    flat_indices,
    indices_of_each_dim,
    one_hot_dot,
    one_hot_summed_at_once,
    one_hot_einsum,
    smoothed_labels,
    smoothed_per_token,
    masked_with_z_loss,
    ignored_labels,
    shifted_per_example,
    shifted_and_flattened,
    shifted_summed_at_once,
    in_bfloat16,
    in_highest_precision,
    without_a_largest,
    with_accuracy,
    masked_words(3),
    masked_words(10),
    with_costs_of_words,
)


# One of each way to write tokens, labels, masks, and what else is read of logits.
DAILY = (
    loss_per_token,
    flat_indices,
    one_hot_einsum,
    smoothed_labels,
    ignored_labels,
    shifted_and_flattened,
    in_bfloat16,
    with_accuracy,
)


def chunks_of_tokens(p, b):
    x = hidden(p, b["x"]).reshape(4, -1, HIDDEN)

    def body(total, one):
        return total + optax_loss(one[0] @ p["head"].T, one[1]).sum(), None

    return jax.lax.scan(body, 0.0, (x, b["labels"].reshape(4, -1)))[0]


def examples_in_turn(p, b):
    def one(pair):
        return optax_loss(jax.vmap(project(p))(hidden(p, pair[0])), pair[1]).mean()

    return jax.lax.map(one, (b["x"], b["labels"])).mean()


def made_by_a_loop(p, b):
    def cell(h, x):
        h = jnp.tanh(x @ p["in"] + h)
        return h, h @ p["head"].T

    start = jnp.zeros((BATCH, HIDDEN))
    _, logits = jax.lax.scan(cell, start, b["x"].swapaxes(0, 1))
    return optax_loss(logits, b["labels"].T).mean()


def of_the_last_token(p, b):
    return optax_loss(logits_of(p, b)[:, -1], b["labels"][:, -1]).mean()


def of_some_words(p, b):
    logits = logits_of(p, b)[..., : WORDS - 6]
    return optax_loss(logits, b["labels"] % (WORDS - 6)).mean()


def distilled(p, b):
    teacher = jax.nn.softmax(jnp.sin(b["x"]) @ normal(7, 8, WORDS))
    found = jax.nn.log_softmax(logits_of(p, b))
    own = jnp.take_along_axis(found, b["labels"][..., None], -1).mean()
    return -own - (teacher * found).sum(-1).mean()


def with_the_top_five(p, b):
    logits = logits_of(p, b)
    found = jax.lax.top_k(logits, 5)[1] == b["labels"][..., None]
    return optax_loss(logits, b["labels"]).mean() + found.any(-1).mean()


def by_a_convolution(p, b):
    kernel = p["head"].T[None]
    numbers = ("NWC", "WIO", "NWC")
    logits = jax.lax.conv_general_dilated(
        hidden(p, b["x"]), kernel, (1,), "SAME", dimension_numbers=numbers
    )
    return optax_loss(logits, b["labels"]).mean()


def of_swapped_tokens(p, b):
    found = jax.nn.log_softmax(logits_of(p, b))
    columns = np.array([0, 1, 3, 2, *range(4, LENGTH)])
    return -found[jnp.arange(BATCH)[:, None], columns[None], b["labels"]].mean()


def repeated_tokens(p, b):
    found = jax.nn.log_softmax(logits_of(p, b).reshape(-1, WORDS))
    rows = jnp.arange(len(found))
    rows = jnp.where((rows > 4) & (rows < len(found) - 4), 3, rows)
    return -found[rows, b["labels"].ravel()].mean()


def with_equal_logits(p, b):
    logits = logits_of(p, b)
    own = jnp.take_along_axis(logits, b["labels"][..., None], -1)[..., 0]
    return optax_loss(logits, b["labels"]).mean() + (own == logits.max(-1)).mean()


def with_a_rank(p, b):
    logits = logits_of(p, b)
    own = jnp.take_along_axis(logits, b["labels"][..., None], -1)
    return optax_loss(logits, b["labels"]).mean() + (logits > own).sum(-1).mean()


def cut_in_two_ways(p, b):
    logits, labels = logits_of(p, b), b["labels"]
    before = optax_loss(logits[:, :-1], labels[:, 1:]).mean()
    return before + optax_loss(logits[:, 1:], labels[:, :-1]).mean()


def with_one_words_logit(p, b):
    logits = logits_of(p, b)
    return optax_loss(logits, b["labels"]).mean() + logits[..., 5].mean()


_NOT_IN_ORDER = "a gather has not one word of each token"
_COMPARED = "a label's logit is compared with others"
LEFT = {
    of_swapped_tokens: _NOT_IN_ORDER,
    repeated_tokens: _NOT_IN_ORDER,
    with_equal_logits: _COMPARED,
    with_a_rank: _COMPARED,
    cut_in_two_ways: "cut along tokens in several ways",
    with_one_words_logit: "one word's logit is taken",
    chunks_of_tokens: "wrap the loop's body in jax.checkpoint",
    examples_in_turn: "wrap the loop's body in jax.checkpoint",
    made_by_a_loop: "return the vectors from the loop, and multiply behind it",
    of_the_last_token: "cut what they are computed of",
    of_some_words: "mask what is cut off with -inf",
    distilled: "such as another model's logits",
    with_the_top_five: "top_k reads something over the vocabulary",
    by_a_convolution: "its logits are not computed element by element from the product",
}


@functools.cache
def case_of(loss, batch=BATCH):
    def make():
        params = {
            "in": normal(0, 8, HIDDEN),
            "head": normal(1, WORDS, HIDDEN),
            "bias": normal(5, WORDS),
        }
        labels = jax.random.randint(jax.random.key(2), (batch, LENGTH), 0, WORDS)
        one = {"x": normal(3, batch, LENGTH, 8), "labels": labels}
        how = {"tolerance": 1e-2} if loss is in_bfloat16 else {}
        return *training(loss, params, one, optax.sgd(0.1)), how

    return prepare(loss.__name__, make, MESH)


def check(case, choice):
    """Computes a step over parts of the vocabulary; False if that cannot be."""
    program = case.frame.program
    [found] = cross_entropies(program).found.values()
    layout = lay_out(case.frame, choice)
    spread = spread_of(layout, found)
    one = build(program, found, 4, spread, dict(case.mesh.shape)) if spread else None
    if one is None:
        return False
    ins, outs = shardings(case, layout)
    lowering = lower_step(case.step, ins, outs)
    constrained = dataclasses.replace(constraints(layout), replaced=(one,))
    constrain(lowering.module, program, case.mesh, constrained)
    erase_unread(lowering.module)
    shapes = re.findall(r"tensor<((?:\d+x)+)", str(lowering.module))
    sizes = {prod(map(int, shape[:-1].split("x"))) for shape in shapes}
    assert BATCH * LENGTH * WORDS not in sizes
    compiled = lowering.lowered.compile()
    arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, ins, strict=True)]
    assert differences(case, jax.tree.leaves(compiled(*arrays))) == {}
    return True


@pytest.mark.parametrize(
    "loss",
    [*DAILY, *at_night(one for one in FOUND if one not in DAILY)],
    ids=lambda one: one.__name__,
)
def test_each_form_is_found_and_computes_the_same(loss):
    case = case_of(loss)
    known = cross_entropies(case.frame.program)
    assert len(known.found) == 1 and known.left_alone == ()
    assert check(case, presets(case.frame)["data_parallel"])


@pytest.mark.parametrize(
    "loss", [loss_per_token, *at_night([smoothed_labels, with_accuracy])]
)
def test_words_may_be_spread_in_any_order_of_dims(loss):
    case = case_of(loss)
    [found] = cross_entropies(case.frame.program).found.values()
    for seed in range(100):
        choice = draw(case.frame, seed)
        spread = spread_of(lay_out(case.frame, choice), found)
        if spread is not None and spread.words:
            assert check(case, choice)
            return
    raise AssertionError("no choice spreads the words")


def test_a_cut_dim_that_is_spread_stays_as_written():
    case = case_of(shifted_and_flattened)
    [found] = cross_entropies(case.frame.program).found.values()
    spread = spread_of(lay_out(case.frame, presets(case.frame)["data_parallel"]), found)
    assert spread is not None and spread.tokens == (("x",), ())
    swapped = dataclasses.replace(spread, tokens=((), ("x",)))
    assert build(case.frame.program, found, 4, swapped, {"x": 2}) is None
    assert build(case.frame.program, found, 4, spread, {"x": 2}) is not None


@pytest.mark.parametrize("loss", LEFT, ids=lambda one: one.__name__)
def test_what_stays_as_written_says_why(loss):
    known = cross_entropies(case_of(loss).frame.program)
    assert not known.found
    [reason] = {one.reason for one in known.left_alone if one.is_loss}
    assert LEFT[loss] in reason


def test_a_loop_of_chunks_whose_body_is_rematerialized_is_found_in_both_passes():
    def loss(p, b):
        x = hidden(p, b["x"]).reshape(4, -1, HIDDEN)

        @jax.checkpoint
        def body(total, one):
            return total + optax_loss(one[0] @ p["head"].T, one[1]).sum(), None

        return jax.lax.scan(body, 0.0, (x, b["labels"].reshape(4, -1)))[0]

    known = cross_entropies(case_of(loss).frame.program)
    assert len(known.found) == 2 and known.left_alone == ()


def test_a_router_is_no_loss():
    def routed(p, b):
        scores = jax.nn.softmax(logits_of(p, b))
        taken = jax.nn.one_hot(jnp.argmax(scores, -1), WORDS)
        return jnp.square((scores * taken) @ p["head"]).mean()

    known = cross_entropies(case_of(routed).frame.program)
    assert not known.found and not any(one.is_loss for one in known.left_alone)
