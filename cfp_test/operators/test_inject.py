"""GPT-2 and BERT with operators put in: the same outputs and gradients."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cfp.errors import CfpError
from cfp.operators import inject as injecting
from cfp.operators.inject import Policy, inject, injection, parts, register_policy
from cfp.operators.operator import Refused
from cfp_test.operators import models_linen, models_nnx
from cfp_test.operators.compiling import SOON
from cfp_test.support.covering import at_night

CONFIG = models_linen.Config()
TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8) * 7 % CONFIG.vocab
LENGTHS = np.array([8, 5])
MASK = (np.arange(8) < LENGTHS[:, None]).astype(np.int32)
REPLACED = {"GPT2": 5, "Bert": 3}  # Two norms and one of attention, and more of GPT-2.


def loss(logits):
    """Takes the tokens that are no padding, with weights that hide no error."""
    weights = jnp.cos(jnp.arange(logits.size).reshape(logits.shape))
    return jnp.sum(logits * weights * MASK[..., None])


def close(found, right):
    assert jax.tree.structure(found) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        scale = max(float(jnp.abs(other).max()), 1.0)
        np.testing.assert_allclose(one, other, atol=2e-4 * scale)


# ---------------------------------------------------------------------------- linen


@pytest.mark.parametrize("name", ["Bert", *at_night(["GPT2"])])
def test_a_model_of_linen_with_operators_computes_the_same(name):
    model = getattr(models_linen, name)(CONFIG)
    init = jax.jit(model.init, compiler_options=SOON)
    with injection(right_padded=True, strict=True) as report:
        variables = init(jax.random.key(0), TOKENS, MASK)
        assert not report.parts

        def value(variables):
            return loss(model.apply(variables, TOKENS, MASK))

        step = jax.jit(jax.value_and_grad(value), compiler_options=SOON)
        found = step(variables)
    assert len(report.replaced) == REPLACED[name], report
    close(found, jax.jit(jax.value_and_grad(lambda v: value(v)))(variables))


def test_what_a_call_asks_for_decides_whether_it_is_replaced():
    model = models_linen.GPT2(models_linen.Config(resid_pdrop=0.5))
    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)

    def left(mask, deterministic):
        key = {"dropout": jax.random.key(0)}
        with injection() as report:
            jax.eval_shape(
                lambda v: model.apply(v, TOKENS, mask, deterministic, rngs=key),
                variables,
            )
        return {part.kind for part in report.left if part.policy}

    assert left(None, True) == set()
    assert left(MASK, True) == {"FlaxGPT2Attention"}
    assert left(None, False) == {"FlaxGPT2Attention", "FlaxGPT2MLP"}


# ------------------------------------------------------------------------------ NNX


@pytest.mark.parametrize("name", ["GPT2", *at_night(["Bert"])])
def test_a_model_of_nnx_with_operators_computes_the_same(name):
    model = getattr(models_nnx, name)(CONFIG, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    report = inject(model, right_padded=True, strict=True)
    assert len(report.replaced) == REPLACED[name], report
    new_graph, new_state = nnx.split(model)
    # Checkpoints of the original load, and are those of the injected model.
    assert jax.tree.structure(state) == jax.tree.structure(new_state)

    def value(graph, state):
        return loss(nnx.merge(graph, state)(TOKENS, MASK))

    @functools.partial(jax.jit, compiler_options=SOON)
    def both(state):
        return [
            jax.value_and_grad(lambda s, g=g: value(g, s))(state)
            for g in (graph, new_graph)
        ]

    (right, gradient), (found, new_gradient) = both(state)
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-3)
    close(new_gradient, gradient)
    assert len(report.replaced) == REPLACED[name], report


def test_a_model_of_nnx_is_injected_while_it_is_made():
    reports = []

    @nnx.jit
    def make():
        model = models_nnx.Bert(CONFIG, rngs=nnx.Rngs(0))
        reports.append(inject(model, implementations={"layer_norm": "jax_nn"}))
        return model

    model = make()
    nnx.eval_shape(lambda: model(TOKENS))
    assert len(reports[0].replaced) == REPLACED["Bert"]
    used = {
        name: one
        for part in reports[0].replaced
        for name, one in part.operators.items()
    }
    assert used == {
        "qkv_projection": "separate",
        "bert_attention": "jax_nn",
        "layer_norm": "jax_nn",
    }


def test_a_shared_parameter_stays_shared():
    model: Any = models_nnx.Bert(CONFIG, rngs=nnx.Rngs(0))
    model.tied = model.layers[0].attention.query.kernel
    inject(model)
    assert model.tied is model.layers[0].attention.query.kernel


class Plain(nnx.Module, pytree=False):
    """A module that JAX takes for a leaf."""

    def __init__(self):
        self.config = {"any": [object()]}
        self.weight = nnx.Param(jnp.ones(4))

    def __call__(self, x):
        return x * self.weight[...]


class PlainNorm(Policy):
    def match(self, part):
        return isinstance(part, Plain)

    def build(self, part):
        return lambda p, x: self.call("rms_norm", x, p["weight"])


def test_modules_that_are_no_pytrees_and_those_in_loops_are_replaced():
    x = jnp.arange(8.0).reshape(2, 4)
    model = nnx.List([Plain()])
    report = inject(model, policies=[PlainNorm])
    nnx.jit(lambda model, x: model[0](x))(model, x)
    assert [part.operators for part in report.replaced] == [{"rms_norm": "xla"}]

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.List([nnx.LayerNorm(4, rngs=nnx.Rngs(key))])

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer[0](x)

    layers = nnx.List([make(jax.random.split(jax.random.key(0), 3))])
    right = run(x, layers[0])
    assert len(inject(layers).replaced) == 1
    np.testing.assert_allclose(run(x, layers[0]), right, atol=1e-6)


def test_a_call_that_a_policy_refuses_runs_the_original():
    model = models_nnx.Bert(CONFIG, rngs=nnx.Rngs(0))
    right = model(TOKENS, MASK)
    report = inject(model, policies=[parts.HFBertSelfAttention], strict=True)
    np.testing.assert_array_equal(model(TOKENS, MASK), right)
    assert not report.replaced and "right_padded=True" in str(report)


# ------------------------------------------------------------------------- wrong use


class Mine(Policy):
    def match(self, part):
        return isinstance(part, nnx.LayerNorm)

    def build(self, part):
        return lambda parameters, x: x


def test_a_call_with_more_positional_arguments_is_refused():
    """The sixth of BERT's attention turns dropout on."""
    part = SimpleNamespace(config=SimpleNamespace(attention_probs_dropout_prob=0.5))
    run = parts.HFBertSelfAttention({}).build(part)
    with pytest.raises(Refused, match="gets 6 positional arguments"):
        run({}, jnp.ones((2, 4, 8)), None, None, None, False, False)


def test_nothing_replaced_is_an_error_if_it_is_to_be():
    model = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
    assert [part.reason for part in inject(model).left] == ["no policy matches"]
    with pytest.raises(CfpError, match="Nothing was replaced"):
        inject(model, strict=True)
    with pytest.raises(CfpError, match="Nothing was replaced"):
        with injection(strict=True):
            pass


def test_names_that_there_are_not():
    with pytest.raises(CfpError, match="'layernorm'"):
        inject(nnx.List([]), implementations={"layernorm": "xla"})
    with pytest.raises(CfpError, match=r"layer_norm.*'cuda'"):
        inject(nnx.List([]), implementations={"layer_norm": "cuda"})
    with pytest.raises(CfpError, match="is no policy"):
        register_policy(int)
    with pytest.raises(CfpError, match="got int"):
        inject(3)


def test_a_registered_policy_is_asked_first(monkeypatch):
    monkeypatch.setattr(injecting, "registered", [*injecting.registered])
    register_policy(Mine)
    report = inject(nnx.List([nnx.LayerNorm(4, rngs=nnx.Rngs(0))]))
    assert [part.policy for part in report.replaced] == ["Mine"]
