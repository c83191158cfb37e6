"""All models build without allocating, train, and refuse what does not fit."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.errors import OptionError
from cfp.models import MODELS, build, find, initialise
from cfp.models.layers import cross_entropy
from cfp.models.transformers import BALANCE_WEIGHT
from cfp_test.models.tiny import (
    GPT_TINY,
    TINY,
    apply_of,
    built,
    count,
    make_batch,
    start,
    traced,
    train,
)
from cfp_test.moe.configs import SEED_CONFIGS
from cfp_test.support.covering import at_night

# BERT and LLaMA begin and learn as GPT does: what is their own is in `test_bert.py` and
# `test_llama.py`.
TRAINED = ["gpt", "moe", *at_night(["bert", "llama"])]

# ------------------------------------------------------------------ abstract builds


def test_full_size_builds_are_abstract():
    """The seed's largest model, 41 GiB with its Adam state, costs nothing to build."""
    config, batch = SEED_CONFIGS[-1]
    train_step, (state, data) = build("moe", batch=batch, **config.options())
    assert count(state.params) > 3e9
    for leaf in jax.tree.leaves((state, data)):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
    assert data["tokens"].shape == data["labels"].shape == (128, 1024)
    assert data["tokens"].dtype == data["labels"].dtype == jnp.int32
    assert train_step.__name__ == "train_step"


@pytest.mark.parametrize("name", MODELS)
def test_step_maps_state_to_the_same_state(name):
    _, (state, _) = built(name, "float32")
    after, metrics = traced(name, "float32").out_info
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert {k: (v.shape, v.dtype) for k, v in metrics.items()} == {
        "loss": ((), jnp.float32),
        "cross_entropy": ((), jnp.float32),
    }


@pytest.mark.parametrize("name", MODELS)
def test_defaults_build(name):
    _, (_, batch) = build(name)  # Of shapes: the largest has 6.7 billion parameters.
    defaults = {option.name: option.default for option in find(name).options}
    assert batch["tokens"].shape == (defaults["batch"], defaults["seq"])


@pytest.mark.parametrize("name", TRAINED)
def test_abstract_arguments_describe_the_concrete_ones(name):
    _, args = built(name, "float32")
    real = start(name), make_batch(name)
    assert jax.tree.structure(args) == jax.tree.structure(real)
    for one, other in zip(jax.tree.leaves(args), jax.tree.leaves(real), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("name", ["gpt", "moe", "llama"])
def test_labels_are_the_tokens_that_follow(name):
    batch = make_batch(name)
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < 96


# ------------------------------------------------------------------------- training


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRAINED)
def test_loss_starts_at_log_vocab_and_falls(name):
    history, _ = train(name)
    losses = [metrics["cross_entropy"] for metrics in history]
    assert losses[0] == pytest.approx(math.log(96), rel=0.02)
    assert losses[-1] < 0.8 * losses[0]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


@pytest.mark.parametrize("name", TRAINED)
def test_loss_is_cross_entropy_plus_balance(name):
    first = train(name)[0][0]
    # At the start the gates are nearly even: the two expert layers' balance is 1 each.
    balance = 2 * BALANCE_WEIGHT if name == "moe" else 0.0
    assert first["loss"] - first["cross_entropy"] == pytest.approx(balance, rel=0.05)


@pytest.mark.parametrize("name", TRAINED)
def test_every_parameter_learns(name):
    """Also the gate: its gradients come through the weights and the balance."""
    _, last = train(name)
    moved = jax.tree.map(
        lambda old, new: float(np.abs(new - old).max()),
        jax.device_get(start(name).params),
        jax.device_get(last.params),
    )
    for path, distance in jax.tree.leaves_with_path(moved):
        assert distance > 0, path


def test_cross_entropy_equals_the_textbook():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    labels = jnp.array([[0, 4, 2], [1, 1, 3]])
    log_p = np.log(np.asarray(jax.nn.softmax(logits, axis=-1)))
    losses = [[-log_p[i, j, labels[i, j]] for j in range(3)] for i in range(2)]
    assert float(cross_entropy(logits, labels)) == pytest.approx(np.mean(losses))

    mask = np.array([[1, 0, 1], [0, 0, 1]], dtype=np.float32)
    expected = np.sum(losses * mask) / 3
    assert float(cross_entropy(logits, labels, mask)) == pytest.approx(expected)
    assert float(cross_entropy(logits, labels, 0 * mask)) == 0.0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compute_dtype_leaves_state_in_float32(name, dtype):
    _, (state, batch) = built(name, dtype)
    floats = [x for x in jax.tree.leaves(state) if x.dtype != jnp.int32]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}

    apply = apply_of(name, dtype=dtype)
    logits, penalty = jax.eval_shape(apply, state.params, batch)
    assert (logits.dtype, penalty.dtype) == (jnp.dtype(dtype), jnp.float32)

    jaxpr = str(traced(name, dtype).jaxpr)
    contractions = [line for line in jaxpr.splitlines() if "= dot_general" in line]
    in_float32 = [line for line in contractions if ":f32[" in line.split("=")[0]]
    if dtype == "float32":
        assert len(in_float32) == len(contractions)
    else:
        # Of both expert layers, the gate's three contractions stay in float32.
        assert len(in_float32) == (6 if name == "moe" else 0)
    assert contractions


def test_bfloat16_agrees_with_float32():
    for half, full in zip(train("gpt", "bfloat16")[0], train("gpt")[0], strict=True):
        assert half["loss"] == pytest.approx(full["loss"], rel=1e-2)
        assert half["loss"] != full["loss"]


@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        ("gpt", ["GPT)/layer_0/attention/query", "GPT)/layer_1/mlp/down"]),
        ("moe", ["MoE)/layer_1/moe/expert_up", "MoE)/layer_1/moe/dispatch"]),
        ("bert", ["BERT)/layer_1/attention/scores", "BERT)/head_dense"]),
        ("llama", ["Llama)/layer_1/attention/key", "Llama)/layer_0/mlp/gate"]),
    ],
)
def test_scopes_read_well(name, scopes):
    text = traced(name, "float32").lower().as_text(debug_info=True)
    for scope in scopes:
        assert f"jit(train_step)/jvp({scope}" in text
        assert f"jit(train_step)/transpose(jvp({scope.replace(')', '))', 1)}" in text


# -------------------------------------------------------------------------- options


def test_options_are_documented_and_have_flags():
    flags = {name: [o.flag for o in MODELS[name].options] for name in MODELS}
    shared = "layers hidden heads batch seq dtype vocab scan remat".split()
    for name in MODELS:
        assert {f"--{word}" for word in shared} <= set(flags[name])
    assert "--kv-heads" in flags["llama"]
    assert {"--experts", "--expert-group-size"} <= set(flags["moe"])
    for model in MODELS.values():
        for option in model.options:
            assert option.doc
            assert option.default is None or type(option.default) is option.type


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gtp", {}, "'gtp'.*gpt, moe, bert, llama"),
        ("gpt", {"width": 3}, "'width'.*vocab, seq, hidden"),
        ("gpt", {"experts": 4}, "'experts'"),
        ("gpt", {"hidden": 30}, "hidden.* heads.*30.*heads=4"),
        ("gpt", {"layers": 0}, "layers.* 0[.]"),
        ("gpt", {"layers": "2"}, "layers.* '2'[.]"),
        ("gpt", {"layers": True}, "layers.* True[.]"),
        ("gpt", {"layers": None}, "layers.* None[.]"),
        ("gpt", {"vocab": 1}, "vocab.* 1[.]"),
        ("gpt", {"microbatches": 3}, "microbatches.*batch=4.*ches=3"),
        ("gpt", {"learning_rate": 0.0}, r"learning_rate.* 0\.0[.]"),
        ("gpt", {"dtype": "fp8"}, "dtype.*float32.*bfloat16.* 'fp8'[.]"),
        ("gpt", {"scan": 1}, "scan.* 1[.]"),
        ("gpt", {"remat": "yes"}, "remat.* 'yes'[.]"),
        ("llama", {"heads": 32}, "hidden / heads.*32.*heads=32"),
        ("llama", {"kv_heads": 3}, "heads.* kv_heads.*4.*=3"),
        ("llama", {"kv_heads": -2}, "kv_heads.* -2[.]"),
        ("moe", {"experts": 1}, "experts.* 1[.]"),
        ("moe", {"layers": 3, "scan": True}, "layers.* scan.* 3[.]"),
        ("moe", {"expert_group_size": 48}, "group_size.*batch=4, seq=16.*=48"),
        ("moe", {"microbatches": 4}, "group_size.*microbatches=1, seq=16.*=32"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    for function in (build, initialise):
        with pytest.raises(OptionError, match=message):
            function(name, **{**TINY.get(name, {}), **options})


def test_int_will_do_for_a_float():
    build("gpt", **{**GPT_TINY, "learning_rate": 1})
