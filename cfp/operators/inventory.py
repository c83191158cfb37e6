"""The operators of the inventory, by name, and their parameters as layers'.

`cfp.operators.linen` and `cfp.operators.nnx` have a layer for each operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from cfp.operators.activations import (
    BIAS_GELU,
    CAUSAL_SOFTMAX,
    GROUPED_MATMUL,
    MASKED_SOFTMAX,
    MOE_DISPATCH,
    SOFTMAX,
    SWIGLU,
)
from cfp.operators.attention import (
    BERT_ATTENTION,
    EMBEDDING,
    GPT_ATTENTION,
    QKV_PROJECTION,
    ROTARY_EMBEDDING,
    T5_ATTENTION,
)
from cfp.operators.losses import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY
from cfp.operators.norms import DROPOUT_ADD_LAYER_NORM, LAYER_NORM, RMS_NORM
from cfp.operators.operator import Argument, Operator, unknown

# In the order in which they are measured: those that matter most come first.
OPERATORS: dict[str, Operator] = {
    one.name: one
    for one in (
        GPT_ATTENTION,
        BERT_ATTENTION,
        T5_ATTENTION,
        LINEAR_CROSS_ENTROPY,
        LAYER_NORM,
        RMS_NORM,
        DROPOUT_ADD_LAYER_NORM,
        BIAS_GELU,
        SWIGLU,
        QKV_PROJECTION,
        CROSS_ENTROPY,
        SOFTMAX,
        MASKED_SOFTMAX,
        CAUSAL_SOFTMAX,
        ROTARY_EMBEDDING,
        EMBEDDING,
        GROUPED_MATMUL,
        MOE_DISPATCH,
    )
}


def find(name: str) -> Operator:
    """An operator by its name.

    Raises:
        OperatorError: there is none.
    """
    if name not in OPERATORS:
        raise unknown("operator", name, list(OPERATORS))
    return OPERATORS[name]


def matching(words: str) -> list[Operator]:
    """The operators that have one of some words in their names.

    Args:
        words: with commas between them; empty for all.

    Raises:
        OperatorError: a word is in no name.
    """
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    for word in wanted:
        if not any(word in name for name in OPERATORS):
            raise unknown("operator", word, list(OPERATORS))
    return [
        one
        for name, one in OPERATORS.items()
        if not wanted or any(word in name for word in wanted)
    ]


# By operator; what is not here has none.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "layer_norm": ("scale", "bias"),
    "rms_norm": ("scale",),
    "dropout_add_layer_norm": ("scale", "bias"),
    "bias_gelu": ("bias",),
    "swiglu": ("gate", "up"),
    "qkv_projection": ("kernel", "bias"),
    "embedding": ("table",),
    "linear_cross_entropy": ("kernel",),
    "grouped_matmul": ("kernels",),
    "moe_dispatch": ("up", "down"),
}
_TABLE_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class LayerForm:
    """An operator as a layer.

    Attributes:
        operator: by name.
        sizes: of parameters: the name that a layer gives each of their dims.
    """

    operator: str
    sizes: Mapping[str, str] = field(default_factory=dict)

    @property
    def sizes_of_no_input(self) -> dict[str, str]:
        """The sizes that the inputs of a call do not say."""
        said = {dim for one in inputs_of(self.operator) for dim in one.dims.split()}
        return {name: dim for name, dim in self.sizes.items() if dim not in said}

    @property
    def text(self) -> str:
        """The operator in a sentence, with its inputs."""
        inputs = ", ".join(one.name for one in inputs_of(self.operator))
        return f"{find(self.operator).summary}: ({inputs})."


_HIDDEN = {"hidden": "h"}
# By the name of the layer's class.
LAYERS: Mapping[str, LayerForm] = {
    "LayerNorm": LayerForm("layer_norm", _HIDDEN),
    "RMSNorm": LayerForm("rms_norm", _HIDDEN),
    "DropoutAddLayerNorm": LayerForm("dropout_add_layer_norm", _HIDDEN),
    "BiasGelu": LayerForm("bias_gelu", {"hidden": "f"}),
    "SwiGLU": LayerForm("swiglu", {"hidden": "h", "ffn": "f"}),
    "QKVProjection": LayerForm("qkv_projection", _HIDDEN),
    "Embedding": LayerForm("embedding", {"vocab": "v", "hidden": "h"}),
    "LinearCrossEntropy": LayerForm(
        "linear_cross_entropy", {"vocab": "v", "hidden": "h"}
    ),
    "GroupedMatmul": LayerForm(
        "grouped_matmul", {"experts": "e", "hidden": "h", "width": "w"}
    ),
    "MoEDispatch": LayerForm(
        "moe_dispatch", {"experts": "e", "hidden": "h", "width": "w"}
    ),
    "BertAttention": LayerForm("bert_attention"),
    "GPTAttention": LayerForm("gpt_attention"),
    "T5Attention": LayerForm("t5_attention"),
    "RotaryEmbedding": LayerForm("rotary_embedding"),
    "Softmax": LayerForm("softmax"),
    "MaskedSoftmax": LayerForm("masked_softmax"),
    "CausalSoftmax": LayerForm("causal_softmax"),
    "CrossEntropy": LayerForm("cross_entropy"),
}


def parameters_of(operator: str) -> tuple[Argument, ...]:
    """The arguments that are parameters."""
    names = PARAMETERS.get(operator, ())
    return tuple(one for one in find(operator).arguments if one.name in names)


def inputs_of(operator: str) -> tuple[Argument, ...]:
    """The other arguments, which a layer is called with."""
    names = PARAMETERS.get(operator, ())
    return tuple(one for one in find(operator).arguments if one.name not in names)


def dims_of_inputs(operator: str, inputs: tuple[Any, ...]) -> dict[str, int]:
    """Sizes of dims as the inputs of a layer have them.

    Raises:
        OperatorError: they contradict each other.
    """
    names = (one.name for one in inputs_of(operator))
    return find(operator).bind(dict(zip(names, inputs, strict=True)))


def shape_of(argument: Argument, dims: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a parameter."""
    return tuple(
        int(name) if name.isdigit() else dims[name] for name in argument.dims.split()
    )


def initial(
    argument: Argument, key: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Ones for scales, zeros for biases, and random numbers for kernels."""
    if argument.name in ("scale", "bias"):
        return jnp.full(shape, argument.around, dtype)
    deviation = _TABLE_DEVIATION
    if isinstance(argument.spread, str):
        deviation = shape[{"fan_in": -2, "fan_last": -1}[argument.spread]] ** -0.5
    return jax.random.normal(key, shape, dtype) * deviation


def apply(
    operator: Operator,
    parameters: Mapping[str, jax.Array],
    inputs: tuple[Any, ...],
    *,
    dtype: Any,
    implementation: str | None,
    options: Mapping[str, Any],
) -> jax.Array:
    """Calls an operator with the parameters in their places.

    Args:
        operator: what is called.
        parameters: by name.
        inputs: the other arguments, in their order.
        dtype: that everything is computed in; None for the type of the first input that
            is a float, or else of the parameters.
        implementation: by name, or the first that takes the arguments.
        options: of the operator.
    """
    floats = [x.dtype for x in inputs if jnp.issubdtype(x.dtype, jnp.floating)]
    wanted = dtype or (floats[0] if floats else None)
    rest = iter(inputs)
    every = [parameters.get(one.name) for one in operator.arguments]
    args = [next(rest) if one is None else one for one in every]
    if wanted is not None:
        args = [
            x.astype(wanted) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in args
        ]
    return operator(*args, implementation=implementation, **options)
