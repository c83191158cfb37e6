"""Each operator as a module of linen and of NNX: what the function computes."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cfp.operators import OPERATORS
from cfp.operators import linen as of_linen
from cfp.operators import nnx as of_nnx
from cfp.operators.cases import Shape, sample
from cfp_test.support.covering import at_night

SHAPE = Shape(batch=2, seq=8, hidden=16, heads=2, vocab=12)


# The arguments that are parameters, of operators that have some.
PARAMETERS = {
    "layer_norm": ["scale", "bias"],
    "rms_norm": ["scale"],
    "dropout_add_layer_norm": ["scale", "bias"],
    "bias_gelu": ["bias"],
    "swiglu": ["gate", "up"],
    "qkv_projection": ["kernel", "bias"],
    "embedding": ["table"],
    "linear_cross_entropy": ["kernel"],
    "grouped_matmul": ["kernels"],
    "moe_dispatch": ["up", "down"],
}


def classes(module) -> dict[str, Any]:
    return {
        vars(one)["form"].operator.name: one
        for _, one in inspect.getmembers(module, inspect.isclass)
        if issubclass(one, module.Layer) and one is not module.Layer
    }


LINEN, NNX = classes(of_linen), classes(of_nnx)


def test_every_operator_has_both_modules():
    assert set(LINEN) == set(NNX) == set(OPERATORS)
    for name, one in LINEN.items():
        assert [x.name for x in one.form.parameters] == PARAMETERS.get(name, [])


# Those with parameters, and one without.
SLOW = ("moe_dispatch", "dropout_add_layer_norm", "linear_cross_entropy")


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in (*PARAMETERS, "causal_softmax") if name not in SLOW),
        *at_night(SLOW),
    ],
)
def test_a_module_computes_what_the_function_does(name):
    args, _ = sample(OPERATORS[name], SHAPE, "float32")
    by_name = dict(
        zip((one.name for one in OPERATORS[name].arguments), args, strict=True)
    )
    form = LINEN[name].form
    inputs = [by_name[one.name] for one in form.inputs]
    parameters = {one: by_name[one] for one in PARAMETERS.get(name, [])}
    sizes = {key: SHAPE.dims[dim] for key, dim in form.sizes_of_no_input.items()}
    linen = LINEN[name](**sizes)
    begun = jax.eval_shape(linen.init, jax.random.key(0), *inputs)
    given = {"params": parameters} if parameters else {}
    assert jax.tree.map(jnp.shape, given) == jax.tree.map(jnp.shape, begun)
    right = OPERATORS[name](*args)
    np.testing.assert_array_equal(linen.apply(given, *inputs), right)

    dims = {**SHAPE.dims, **OPERATORS[name].bind(by_name)}
    sizes = [dims[dim] for dim in form.sizes.values()]
    made = nnx.eval_shape(lambda: NNX[name](*sizes, rngs=nnx.Rngs(0)))
    state = nnx.state(made, nnx.Param)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(state)) == (
        jax.tree.map(jnp.shape, parameters)
    )
    for key, value in parameters.items():
        setattr(made, key, nnx.Param(value))
    np.testing.assert_array_equal(made(*inputs), right)


def test_modules_compute_in_the_type_of_their_inputs_with_options():
    x = jnp.ones((2, 4), jnp.bfloat16)
    norm = of_nnx.LayerNorm(4, options={"eps": 1e-3}, rngs=nnx.Rngs(0))
    assert norm(x).dtype == jnp.bfloat16
    table = of_nnx.Embedding(5, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert table(jnp.zeros((1, 2), jnp.int32)).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="needs rngs"):
        of_nnx.LayerNorm(4)


def test_modules_take_the_sizes_that_they_name():
    made = of_nnx.SwiGLU(4, ffn=8, rngs=nnx.Rngs(0))
    assert made.gate[...].shape == (4, 8)
    with pytest.raises(TypeError, match="ffn"):
        of_nnx.SwiGLU(4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="ffn"):
        of_linen.SwiGLU()
