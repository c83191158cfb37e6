"""Layers in a loop, and layers rematerialized, compute what plain layers do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfp.models import MODELS, build, initialise
from cfp.models.layers import cross_entropy
from cfp_test.models.tiny import (
    TINY,
    apply_of,
    built,
    count,
    network,
    quick_jit,
    scanned,
)
from cfp_test.support.covering import at_night

# GPT's layers are the mixture's; the mixture's also add to the loss.
VARIANTS = [
    *(("moe", "scan remat"), ("llama", "scan remat")),
    *at_night(
        [
            *((name, "remat") for name in MODELS),
            *((name, "scan") for name in MODELS),
        ]
    ),
]


def loss_of(apply):
    def loss(params, batch):
        logits, penalty = apply(params, batch)
        return cross_entropy(logits, batch["labels"], batch.get("mask")) + penalty

    return loss


@functools.cache
def plain(name):
    """Parameters of the plain model, a batch, the loss and its gradients."""
    apply, params, batch = network(name)
    loss, grads = quick_jit(jax.value_and_grad(loss_of(apply)))(params, batch)
    return params, batch, loss, grads


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_loss_and_gradients_are_those_of_plain_layers(name, variant):
    params, batch, loss, grads = plain(name)
    if "scan" in variant:
        params, grads = scanned(name, params), scanned(name, grads)
    apply = apply_of(name, **dict.fromkeys(variant.split(), True))
    found, found_grads = quick_jit(jax.value_and_grad(loss_of(apply)))(params, batch)
    assert float(found) == pytest.approx(float(loss), rel=1e-5)
    assert jax.tree.structure(found_grads) == jax.tree.structure(grads)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(found_grads), jax.tree.leaves(grads), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-6, err_msg=str(path))


@pytest.mark.parametrize("name", MODELS)
def test_loop_has_the_same_parameters_stacked(name):
    _, (plain_state, _) = built(name, "float32")
    _, (state, _) = build(name, scan=True, **TINY[name])
    expected = jax.eval_shape(functools.partial(scanned, name), plain_state.params)
    assert jax.tree.structure(state.params) == jax.tree.structure(expected)
    shapes = [[x.shape for x in jax.tree.leaves(p)] for p in (state.params, expected)]
    assert shapes[0] == shapes[1]
    assert count(state.params) == count(plain_state.params)


def test_layers_of_a_loop_begin_differently():
    init_fn, _ = initialise("gpt", **TINY["gpt"], scan=True)
    layers = quick_jit(init_fn)(jax.random.key(0)).params["layers"]
    for kernel in (
        layers["attention"]["query"]["kernel"],
        layers["mlp"]["up"]["kernel"],
    ):
        assert jnp.abs(kernel[0] - kernel[1]).max() > 0


@pytest.mark.parametrize("name", ["gpt", "llama", *at_night(["moe", "bert"])])
def test_program_of_a_loop_does_not_grow_with_depth(name):
    contractions = []
    for layers in (2, 6):
        options = {**TINY[name], "layers": layers, "scan": True}
        train_step, args = build(name, **options)
        contractions.append(str(jax.make_jaxpr(train_step)(*args)).count("dot_general"))
    assert contractions[0] == contractions[1]


@pytest.mark.parametrize(
    ("name", "scan"),
    [
        *(("gpt", False), ("llama", True)),
        *at_night((name, scan) for name in ("moe", "bert") for scan in (False, True)),
        *at_night([("gpt", True), ("llama", False)]),
    ],
)
def test_remat_keeps_less_for_the_backward_pass(name, scan):
    kept = []
    for remat in (False, True):
        loss = loss_of(apply_of(name, scan=scan, remat=remat))
        _, (state, batch) = build(name, scan=scan, remat=remat, **TINY[name])
        residuals = jax.eval_shape(
            lambda p, b, loss=loss: jax.vjp(lambda p: loss(p, b), p)[1],
            state.params,
            batch,
        )
        kept.append(count(residuals))
    assert kept[1] < 0.5 * kept[0]
