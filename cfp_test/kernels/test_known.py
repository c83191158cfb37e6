"""Attentions of public models: those that kernels compute, and why others are left."""

import jax.numpy as jnp
import pytest

from cfp.kernels.functions import Way
from cfp.kernels.matches import refusal_of
from cfp_test.kernels.agreement import TOLERANCE, compare
from cfp_test.kernels.known import MODELS, training_step
from cfp_test.kernels.replaced import Step
from cfp_test.support.checking import make_mesh

# Why an attention stays as it is written; the others cuDNN's kernel computes on a GPU,
# and XLA's or chunks here.
LEFT = {
    "Gemma": "scores or weights go through tanh, such as a soft cap",
    "T5": "reads the scores or the weights",
    "differential": "reads the scores or the weights",
    "BERT, added": "a bias that the step computes may hide all keys of a query",
}


@pytest.mark.parametrize("name", MODELS)
def test_attentions_of_a_model_compute_what_is_written(name):
    mesh = make_mesh((("x", 1),))
    step, args = training_step(name, jnp.float32)
    found = compare(step, args, mesh=mesh)
    assert found.worst <= TOLERANCE
    assert bool(found.kernels) == (name not in LEFT)
    assert found.kernels or all(LEFT[name] in why for why in found.left)


@pytest.mark.parametrize("name", MODELS)
def test_cudnn_computes_what_is_taken_in_bfloat16(name):
    step = Step(*training_step(name, jnp.bfloat16), make_mesh((("x", 1),)))
    way, sizes = Way("cudnn"), dict(step.mesh.shape)
    for one in step.attentions.found.values():
        assert refusal_of(one.problem, way, sizes, "cuda") is None
    assert bool(step.attentions.found) == (name not in LEFT)
