"""The models compute what their papers say, and build without allocating."""

import functools
import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.models import MODELS, build, find, initialise
from cfp.models.gpt import GPT, GPTConfig
from cfp.models.layers import MLP, Attention, DecoderLayer
from cfp.models.moe import (
    BALANCE_WEIGHT,
    SEED_CONFIGS,
    ExpertLayer,
    MoE,
    MoEConfig,
    MoEModelConfig,
    expert_capacity,
    route_top2,
)
from cfp.models.train import cross_entropy

GPT_TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "batch": 4,
    "seq": 16,
    "vocab": 96,
    "dtype": "float32",
    "learning_rate": 1e-2,
}
MOE_TINY = {**GPT_TINY, "layers": 3, "experts": 4, "expert_group_size": 32}
TINY = {"gpt": GPT_TINY, "moe": MOE_TINY}


def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def attention_params(hidden):
    return 4 * hidden * hidden + 3 * hidden  # keys have no bias


def mlp_params(hidden, ffn):
    return 2 * hidden * ffn + ffn + hidden


# ------------------------------------------------------------------ abstract builds


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ffn", [None, 80])
def test_gpt_parameter_count(tied, ffn):
    _, (state, _) = build("gpt", **GPT_TINY, tied=tied, ffn=ffn)
    layer = attention_params(32) + mlp_params(32, ffn or 128) + 4 * 32
    head = 0 if tied else 32 * 96
    assert count(state.params) == 96 * 32 + 16 * 32 + 2 * layer + 2 * 32 + head


def test_moe_parameter_count():
    _, (state, _) = build("moe", **MOE_TINY)
    shared = attention_params(32) + 4 * 32
    expert_layer = 32 * 4 + 4 * mlp_params(32, 128)  # The gate, and four experts.
    layers = 3 * shared + 2 * mlp_params(32, 128) + expert_layer
    assert count(state.params) == 96 * 32 + 16 * 32 + layers + 2 * 32 + 32 * 96


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
    train_step, (state, batch) = build(name, **TINY[name])
    after, metrics = jax.eval_shape(train_step, state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert {k: (v.shape, v.dtype) for k, v in metrics.items()} == {
        "loss": ((), jnp.float32),
        "cross_entropy": ((), jnp.float32),
    }


@pytest.mark.parametrize("name", MODELS)
def test_defaults_build(name):
    _, (_, batch) = build(name)
    defaults = {option.name: option.default for option in find(name).options}
    assert batch["tokens"].shape == (defaults["batch"], defaults["seq"])


@pytest.mark.parametrize("name", MODELS)
def test_abstract_arguments_describe_the_concrete_ones(name):
    _, args = build(name, **TINY[name])
    init_fn, make_batch = initialise(name, **TINY[name])
    real = init_fn(jax.random.key(0)), make_batch(jax.random.key(1))
    assert jax.tree.structure(args) == jax.tree.structure(real)
    for one, other in zip(jax.tree.leaves(args), jax.tree.leaves(real), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_labels_are_the_tokens_that_follow():
    _, make_batch = initialise("gpt", **GPT_TINY)
    batch = make_batch(jax.random.key(0))
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < 96


# ------------------------------------------------------------------------- training


@functools.cache
def train(name, dtype="float32"):
    """Six steps on one batch: the metrics of each, the first and the last state."""
    options = {**TINY[name], "dtype": dtype}
    train_step, _ = build(name, **options)
    init_fn, make_batch = initialise(name, **options)
    first, batch = init_fn(jax.random.key(0)), make_batch(jax.random.key(1))
    step = jax.jit(train_step)
    state, history = first, []
    for _ in range(6):
        state, metrics = step(state, batch)
        history.append({key: float(value) for key, value in metrics.items()})
    return history, first, state


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_loss_starts_at_log_vocab_and_falls(name):
    history, _, _ = train(name)
    losses = [metrics["cross_entropy"] for metrics in history]
    assert losses[0] == pytest.approx(math.log(96), rel=0.02)
    assert losses[-1] < 0.8 * losses[0]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_cross_entropy_plus_balance(name):
    first = train(name)[0][0]
    # At the start the gates are nearly even: the one expert layer's balance is 1.
    balance = BALANCE_WEIGHT if name == "moe" else 0.0
    assert first["loss"] - first["cross_entropy"] == pytest.approx(balance, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns(name):
    """Also the gate: its gradients come through the weights and the balance."""
    _, first, last = train(name)
    moved = jax.tree.map(
        lambda old, new: float(jnp.abs(new - old).max()), first.params, last.params
    )
    for path, distance in jax.tree.leaves_with_path(moved):
        assert distance > 0, path


def test_cross_entropy_equals_the_textbook():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    labels = jnp.array([[0, 4, 2], [1, 1, 3]])
    log_p = np.log(np.asarray(jax.nn.softmax(logits, axis=-1)))
    expected = -np.mean([log_p[i, j, labels[i, j]] for i in range(2) for j in range(3)])
    assert float(cross_entropy(logits, labels)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compute_dtype_leaves_state_in_float32(name, dtype):
    options = {**TINY[name], "dtype": dtype}
    train_step, (state, batch) = build(name, **options)
    floats = [x for x in jax.tree.leaves(state) if x.dtype != jnp.int32]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}

    model = find(name)
    module = model.module(
        model.config(
            **{k: v for k, v in options.items() if k not in ("batch", "learning_rate")}
        )
    )
    logits = jax.eval_shape(module.apply, {"params": state.params}, batch["tokens"])
    assert logits.dtype == jnp.dtype(dtype)

    jaxpr = str(jax.make_jaxpr(train_step)(state, batch))
    contractions = [line for line in jaxpr.splitlines() if "= dot_general" in line]
    in_float32 = [line for line in contractions if ":f32[" in line.split("=")[0]]
    if dtype == "float32":
        assert len(in_float32) == len(contractions)
    else:
        # Of a mixture of experts, the gate's three contractions stay in float32.
        assert len(in_float32) == (3 if name == "moe" else 0)
    assert contractions


def test_bfloat16_agrees_with_float32():
    for half, full in zip(train("gpt", "bfloat16")[0], train("gpt")[0], strict=True):
        assert half["loss"] == pytest.approx(full["loss"], rel=1e-2)
        assert half["loss"] != full["loss"]


# --------------------------------------------------------------------------- layers


def test_attention_is_causal():
    x = jax.random.normal(jax.random.key(0), (1, 8, 16))
    attention = Attention(heads=2, dtype="float32")
    variables = attention.init(jax.random.key(1), x)
    before = attention.apply(variables, x)
    after = attention.apply(variables, x.at[:, 5:].add(1.0))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert jnp.abs(before[:, 5:] - after[:, 5:]).min() > 0


def test_attention_equals_the_reference():
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    attention = Attention(heads=2, dtype="float32")
    # Kernels of unit scale, so that the softmax is far from flat.
    params = jax.tree.map(
        lambda p: 25 * p, attention.init(jax.random.key(1), x)["params"]
    )
    q, k, v = (
        jnp.einsum("bsm,mhd->bshd", x, params[name]["kernel"])
        + params[name].get("bias", 0.0)
        for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    expected = jnp.einsum("bshd,hdm->bsm", mixed, params["out"]["kernel"])
    actual = attention.apply({"params": params}, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_query_kernel_keeps_heads_apart():
    _, (state, _) = build("gpt", **GPT_TINY)
    layer = state.params["layer_0"]["attention"]
    assert layer["query"]["kernel"].shape == (32, 4, 8)
    assert layer["out"]["kernel"].shape == (4, 8, 32)


def test_tied_head_is_the_token_embedding():
    config = GPTConfig(
        vocab=96, seq=16, hidden=32, layers=1, heads=4, dtype="float32", tied=True
    )
    tokens = jnp.arange(16)[None]
    params = GPT(config).init(jax.random.key(0), tokens)["params"]
    assert "head" not in params
    logits = GPT(config).apply({"params": params}, tokens)
    # A token's logit is its embedding's product with x, so it doubles with it.
    unseen = 95
    table = params["embedding"]["token"]["embedding"]
    params["embedding"]["token"]["embedding"] = table.at[unseen].multiply(2.0)
    doubled = GPT(config).apply({"params": params}, tokens)
    np.testing.assert_allclose(doubled[..., unseen], 2 * logits[..., unseen], rtol=1e-5)


def test_scopes_read_well():
    for name, scope in (
        ("gpt", "GPT)/layer_0/attention/query"),
        ("gpt", "GPT)/layer_1/mlp/down"),
        ("moe", "MoE)/layer_1/moe/expert_up"),
        ("moe", "MoE)/layer_1/moe/dispatch"),
    ):
        train_step, args = build(name, **TINY[name])
        text = jax.jit(train_step).lower(*args).as_text(debug_info=True)
        assert f"jit(train_step)/jvp({scope}" in text
        assert f"jit(train_step)/transpose(jvp({scope.replace(')', '))', 1)}" in text


class _Stack(nn.Module):
    """Two decoder layers, wrapped in a way that users wrap them."""

    wrap: str

    @nn.compact
    def __call__(self, x):
        def mlp():
            return MLP(64, "float32", name="mlp")

        if self.wrap == "scan":
            scan = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return scan(DecoderLayer(4, mlp, "float32", name="layer"), x, None)[0]
        layer = nn.remat(DecoderLayer) if self.wrap == "remat" else DecoderLayer
        for i in range(2):
            x = layer(4, mlp, "float32", name=f"layer_{i}")(x)
        return x


def test_layers_can_be_rematerialised_and_scanned():
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    params = _Stack("none").init(jax.random.key(1), x)["params"]
    expected = _Stack("none").apply({"params": params}, x)

    remat = _Stack("remat").apply({"params": params}, x)
    np.testing.assert_allclose(remat, expected, rtol=1e-5, atol=1e-6)

    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), params["layer_0"], params["layer_1"]
    )
    scanned = _Stack("scan").apply({"params": {"layer": stacked}}, x)
    np.testing.assert_allclose(scanned, expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ mixture of experts


def gates(seed, groups=3, group=16, experts=4, sharpness=1.0):
    logits = jax.random.normal(jax.random.key(seed), (groups, group, experts))
    return jax.nn.softmax(sharpness * logits, axis=-1)


@pytest.mark.parametrize("capacity", [1, 3, 8, 16])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 5.0])
def test_dispatch_respects_capacity(capacity, sharpness):
    routing = route_top2(gates(0, sharpness=sharpness), capacity)
    dispatch = np.asarray(routing.dispatch)
    assert dispatch.shape == (3, 16, 4, capacity)
    assert set(np.unique(dispatch)) <= {0.0, 1.0}
    # No seat is taken twice, and no token sits twice at an expert or at three.
    assert dispatch.sum(axis=1).max() <= 1
    assert dispatch.sum(axis=3).max() <= 1
    assert dispatch.sum(axis=(2, 3)).max() <= 2
    # An expert is full before it drops anyone.
    wanted = np.zeros((3, 16, 4))
    np.put_along_axis(
        wanted, np.argsort(-np.asarray(gates(0, sharpness=sharpness)))[..., :2], 1, -1
    )
    np.testing.assert_array_equal(
        dispatch.sum(axis=(1, 3)), np.minimum(wanted.sum(axis=1), capacity)
    )


@pytest.mark.parametrize("capacity", [1, 3, 8, 16])
def test_combine_weights(capacity):
    p = gates(1, sharpness=2.0)
    routing = route_top2(p, capacity)
    seats = np.asarray(routing.dispatch).sum(axis=(2, 3))
    weights = np.asarray(routing.combine).sum(axis=(2, 3))
    assert weights.max() <= 1 + 1e-6
    np.testing.assert_allclose(weights[seats == 2], 1.0, rtol=1e-6)
    assert (weights[seats == 1] < 1).all()
    assert (weights[seats == 0] == 0).all()
    assert ((np.asarray(routing.combine) > 0) == (routing.dispatch > 0)).all()
    if capacity == 16:  # Room for all: the weights are the two best gates, normalised.
        best = -np.sort(-np.asarray(p), axis=-1)[..., :2]
        per_expert = -np.sort(-np.asarray(routing.combine).sum(axis=3))[..., :2]
        np.testing.assert_allclose(
            per_expert, best / best.sum(axis=-1, keepdims=True), rtol=1e-5
        )


def test_first_choices_are_seated_first():
    # Both tokens like expert 0 or 1 best and the other second; each expert has a seat.
    p = jnp.array([[[0.6, 0.4, 0.0], [0.3, 0.7, 0.0]]])
    combine = np.asarray(route_top2(p, 1).combine)[..., 0]
    np.testing.assert_allclose(combine, [[[0.6, 0, 0], [0, 0.7, 0]]], rtol=1e-6)


def test_balance_is_one_when_even_and_the_experts_when_not():
    even = jnp.tile(jax.nn.one_hot(jnp.arange(4), 4), (1, 4, 1))
    assert float(route_top2(even, 8).balance) == pytest.approx(1.0)
    uneven = jnp.tile(jax.nn.one_hot(jnp.zeros(16, int), 4), (1, 1, 1))
    assert float(route_top2(uneven, 8).balance) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("group", "experts", "capacity"), [(2048, 32, 128), (16, 4, 8), (16, 3, 11)]
)
def test_capacity_is_that_of_an_even_load(group, experts, capacity):
    assert expert_capacity(group, experts) == capacity


def test_equal_experts_with_room_for_all_are_the_dense_mlp():
    """With two experts every token goes to both, and each has a seat for all."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 8))
    mlp = MLP(ffn=24, dtype="float32")
    dense = mlp.init(jax.random.key(1), x)["params"]
    dense = jax.tree.map(lambda p: p + 0.1, dense)  # So that biases matter.

    layer = ExpertLayer(experts=2, group=8, ffn=24, dtype="float32")
    params = layer.init(jax.random.key(2), x)["params"]
    for expert_name, name in (("expert_up", "up"), ("expert_down", "down")):
        params[expert_name] = jax.tree.map(lambda p: jnp.stack([p, p]), dense[name])
    y, sown = layer.apply({"params": params}, x, mutable=["losses"])

    np.testing.assert_allclose(y, mlp.apply({"params": dense}, x), rtol=1e-5, atol=1e-6)
    (balance,) = sown["losses"]["balance"]
    assert float(balance) == pytest.approx(BALANCE_WEIGHT, rel=0.05)


def test_every_second_layer_has_experts():
    _, (state, _) = build("moe", **{**MOE_TINY, "layers": 4})
    kinds = [
        {"mlp", "moe"}.intersection(state.params[f"layer_{i}"]).pop() for i in range(4)
    ]
    assert kinds == ["mlp", "moe", "mlp", "moe"]


def test_seed_configurations():
    first = MoEModelConfig(1024, 1280, 16, 4, 32000, 32, 2048)
    assert [config.num_heads for config, _ in SEED_CONFIGS] == [4, 4, 2, 2]
    assert [batch for _, batch in SEED_CONFIGS] == [32, 64, 96, 128]
    assert {config._replace(num_heads=4) for config, _ in SEED_CONFIGS} == {first}
    config = MoEConfig(**first.options())
    assert MoE(config).config.expert_group_size == 2048


# -------------------------------------------------------------------------- options


def test_options_are_documented_and_have_flags():
    flags = {name: [o.flag for o in MODELS[name].options] for name in MODELS}
    for flag in ("layers", "hidden", "heads", "batch", "seq", "dtype", "vocab"):
        assert f"--{flag}" in flags["gpt"] and f"--{flag}" in flags["moe"]
    assert {"--experts", "--expert-group-size"} <= set(flags["moe"])
    for model in MODELS.values():
        for option in model.options:
            assert option.doc
            assert option.default is None or type(option.default) is option.type


@pytest.mark.parametrize("function", [build, initialise])
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gtp", {}, "unknown model 'gtp'; known models: gpt, moe"),
        ("gpt", {"width": 3}, "no option 'width'; known options: vocab, seq, hidden"),
        ("gpt", {"experts": 4}, "no option 'experts'"),
        ("gpt", {"hidden": 30}, "hidden must be divisible by heads.*30.*heads=4"),
        ("moe", {"heads": 5}, "hidden must be divisible by heads.*32.*heads=5"),
        ("gpt", {"layers": 0}, "layers must be positive, got 0"),
        ("gpt", {"layers": "2"}, "layers must be of type int, got '2'"),
        ("gpt", {"layers": True}, "layers must be of type int, got True"),
        ("gpt", {"layers": None}, "layers must be of type int, got None"),
        ("gpt", {"batch": -1}, "batch must be positive, got -1"),
        ("gpt", {"learning_rate": 0.0}, "learning_rate must be positive"),
        ("gpt", {"dtype": "fp8"}, "dtype must be one of float32, bfloat16, got 'fp8'"),
        ("moe", {"experts": 1}, "experts must be at least 2"),
        (
            "moe",
            {"expert_group_size": 48},
            "divisible by expert_group_size, got batch=4, seq=16 and .*=48",
        ),
    ],
)
def test_bad_options_are_refused(function, name, options, message):
    with pytest.raises(ValueError, match=message):
        function(name, **{**TINY.get(name, {}), **options})


def test_int_will_do_for_a_float():
    build("gpt", **{**GPT_TINY, "learning_rate": 1})
