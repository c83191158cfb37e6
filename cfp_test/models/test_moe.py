"""The mixture of experts routes as GShard says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.models import build, find
from cfp.models.layers import mlp
from cfp.models.model import Config
from cfp.models.transformers import BALANCE_WEIGHT, expert_layer, route_top2
from cfp_test.models.tiny import (
    MOE_TINY,
    attention_params,
    count,
    mlp_params,
    quick_jit,
)
from cfp_test.moe.configs import SEED_CONFIGS, MoEModelConfig


def test_moe_parameter_count():
    _, (state, _) = build("moe", **MOE_TINY)
    shared = attention_params(32) + 4 * 32
    expert_layer = 32 * 4 + 4 * mlp_params(32, 128)  # The gate, and four experts.
    layers = 4 * shared + 2 * mlp_params(32, 128) + 2 * expert_layer
    assert count(state.params) == 96 * 32 + 16 * 32 + layers + 2 * 32 + 32 * 96


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


def test_equal_experts_with_room_for_all_are_the_dense_mlp():
    """With two experts every token goes to both, and each has a seat for all."""
    x, *kernels = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(2, 16, 8), (8, 24), (24, 8), (8, 2)])
    )
    dense = {
        "up": {"kernel": kernels[0], "bias": jnp.full(24, 0.1)},
        "down": {"kernel": kernels[1], "bias": jnp.full(8, 0.2)},
    }
    params = {"gate": {"kernel": 0.1 * kernels[2]}}
    for name, one in dense.items():
        params[f"expert_{name}"] = jax.tree.map(lambda p: jnp.stack([p, p]), one)
    config = Config(experts=2, expert_group_size=8, dtype="float32")
    y, penalty = quick_jit(functools.partial(expert_layer, config=config))(params, x)

    np.testing.assert_allclose(y, mlp(dense, x), rtol=1e-4, atol=1e-4)
    assert float(penalty) == pytest.approx(BALANCE_WEIGHT, rel=0.1)


def test_every_second_layer_has_experts():
    _, (state, _) = build("moe", **MOE_TINY)
    kinds = [
        {"mlp", "moe"}.intersection(state.params[f"layer_{i}"]).pop() for i in range(4)
    ]
    assert kinds == ["mlp", "moe", "mlp", "moe"]


def test_seed_configurations():
    first = MoEModelConfig(1024, 1280, 16, 4, 32000, 32, 2048)
    assert [config.num_heads for config, _ in SEED_CONFIGS] == [4, 4, 2, 2]
    assert [batch for _, batch in SEED_CONFIGS] == [32, 64, 96, 128]
    assert {config._replace(num_heads=4) for config, _ in SEED_CONFIGS} == {first}
    options = {option.name for option in find("moe").options}
    assert set(first.options()) <= options
