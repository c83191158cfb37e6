"""Cross-entropies: found in programs, proved, and computed over parts of the words."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from cfp.analysis.layout import constraints, lay_out
from cfp.patterns.build import build, read_how, spread_of
from cfp.patterns.chunked import ChunkedCrossEntropy
from cfp.patterns.sites import cross_entropies
from cfp.presets.presets import presets
from cfp.program.constrain import constrain
from cfp.program.replace import erase_unread
from cfp.program.trace import lower_step
from cfp_test.programs.common import normal, training
from cfp_test.support.checking import differences, draw, prepare, shardings
from cfp_test.support.covering import at_night

pytestmark = pytest.mark.usefixtures("compiled_once")

SIZES = (("x", 2), ("y", 2))
WORDS = 36


def picked(logits, labels):
    words = jnp.arange(logits.shape[-1])
    own = jnp.where(words == labels[..., None], logits, 0.0).sum(-1)
    return (jax.nn.logsumexp(logits, axis=-1) - own).mean()


def gathered(logits, labels):
    found = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(found, labels[..., None], axis=-1).mean()


def one_hot(logits, labels):
    found = jax.nn.log_softmax(logits)
    return -(found * jax.nn.one_hot(labels, logits.shape[-1])).sum(-1).mean()


def by_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def capped(logits, labels):
    return by_optax(5.0 * jnp.tanh(logits / 5.0), labels)


def biased(logits, labels):
    return by_optax(logits + jnp.sin(jnp.arange(WORDS, dtype=jnp.float32)), labels)


def smoothed(logits, labels):
    return by_optax(logits, labels) - 0.1 * jax.nn.log_softmax(logits).mean()


def leaked(logits, labels):
    return by_optax(logits, labels) + jnp.square(logits).sum(-1).mean()


def sorted_too(logits, labels):
    return by_optax(logits, labels) + jnp.sort(logits, axis=-1)[..., -2].mean()


def squared(logits, labels):
    weights = jnp.square(logits) / jnp.square(logits).sum(-1, keepdims=True)
    own = jnp.take_along_axis(weights, labels[..., None], axis=-1)
    return -jnp.log(own).mean() + jnp.max(logits, axis=-1).mean()


def sparse(logits, labels):
    top = jnp.where(logits >= logits.max(-1, keepdims=True) - 1.0, logits, 0.0)
    return gathered(top, labels)


FORMS = (picked, gathered, one_hot, by_optax, capped, biased, smoothed, leaked)
OTHERS = (sorted_too, squared, sparse)


def step_of(loss):
    def whole(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        return loss(hidden @ params["head"], batch["labels"])

    params = {"in": normal(0, 8, 12), "head": normal(1, 12, WORDS)}
    labels = jax.random.randint(jax.random.key(2), (4, 6), 0, WORDS)
    return training(whole, params, {"x": normal(3, 4, 6, 8), "labels": labels})


def case_of(loss):
    return prepare(loss.__name__, lambda: step_of(loss), SIZES)


@pytest.mark.parametrize("loss", FORMS, ids=lambda one: one.__name__)
def test_all_forms_are_found_and_proved(loss):
    program = case_of(loss).frame.program
    found = cross_entropies(program)
    assert len(found.found) == 1 and found.left_alone == ()


def test_a_proof_compiles_the_stages_once(monkeypatch):
    """The first words and the last ones are tried with one program."""
    program, traced = case_of(picked).frame.program, []
    plain = ChunkedCrossEntropy.plain
    monkeypatch.setattr(
        ChunkedCrossEntropy, "plain", lambda one: traced.append(one) or plain(one)
    )
    assert len(cross_entropies(program).found) == len(traced) == 1


@pytest.mark.parametrize("loss", OTHERS, ids=lambda one: one.__name__)
def test_what_only_looks_like_one_is_left_alone(loss):
    found = cross_entropies(case_of(loss).frame.program)
    assert not found.found
    assert all(one.reason for one in found.left_alone)


def choices(frame):
    """By name: presets, and a choice that spreads the words over both axes."""
    [found] = cross_entropies(frame.program).found.values()
    known = {name: presets(frame)[name] for name in ("data_parallel", "fully_sharded")}
    for seed in range(200):
        drawn = draw(frame, seed)
        spread = spread_of(lay_out(frame, drawn), found)
        if spread is not None and spread.words:
            kind = "words and tokens" if any(spread.tokens) else "words"
            known.setdefault(kind, drawn)
    return known


@pytest.mark.parametrize(
    "name",
    [
        "data_parallel",
        "fully_sharded",
        "words",
        pytest.param("words and tokens", marks=pytest.mark.smoke),
    ],
)
@pytest.mark.parametrize(
    "loss", [gathered, *at_night([biased])], ids=lambda one: one.__name__
)
def test_the_step_computes_the_same_and_holds_no_logits(loss, name):
    case = case_of(loss)
    program = case.frame.program
    [found] = cross_entropies(program).found.values()
    layout = lay_out(case.frame, choices(case.frame)[name])
    spread = spread_of(layout, found)
    assert spread is not None and bool(spread.words) == name.startswith("words")
    assert any(spread.tokens) == (name != "words")
    one = build(program, found, 4, spread, dict(case.mesh.shape))
    assert one is not None
    assert read_how(one.functions.how, 2) == (4, spread)
    ins, outs = shardings(case, layout)
    lowering = lower_step(case.step, ins, outs)
    constrained = dataclasses.replace(constraints(layout), replaced=(one,))
    constrain(lowering.module, program, case.mesh, constrained)
    erase_unread(lowering.module)
    assert f"tensor<4x6x{WORDS}xf32>" not in str(lowering.module)
    compiled = lowering.lowered.compile()
    arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, ins, strict=True)]
    assert differences(case, jax.tree.leaves(compiled(*arrays))) == {}


def test_what_spreads_the_hidden_dim_stays_as_written():
    frame = case_of(by_optax).frame
    [found] = cross_entropies(frame.program).found.values()
    assert spread_of(lay_out(frame, presets(frame)["tensor_parallel"]), found) is None


def test_names():
    assert read_how(("vocabulary/8",), 2)[0] == 8
    for how in (("cudnn", "x=heads"), ("vocabulary/1",), ("vocabulary/8", "x=heads")):
        with pytest.raises(ValueError, match="computes no cross-entropy by"):
            read_how(how, 2)
