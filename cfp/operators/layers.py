"""The operators as layers, of which `cfp.operators.linen` and `nnx` make modules.

A layer names the sizes of its parameters: these are the arguments whose dims are all
among the named ones. It is called with the others. Parameters are float32 and have the
names and shapes of the operator's arguments, see ``python -m cfp.operators --list``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import new_class
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cfp.operators.operator import Argument, Operator
from cfp.operators.table import OPERATORS

_TABLE_DEVIATION = 0.02
_HIDDEN = {"hidden": "h"}
_VOCABULARY = {"vocab": "v", "hidden": "h"}
_EXPERTS = {"experts": "e", "hidden": "h", "width": "w"}
# The operator and the sizes of a layer, by the name of its class.
LAYERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "LayerNorm": ("layer_norm", _HIDDEN),
    "RMSNorm": ("rms_norm", _HIDDEN),
    "DropoutAddLayerNorm": ("dropout_add_layer_norm", _HIDDEN),
    "BiasGelu": ("bias_gelu", {"hidden": "f"}),
    "SwiGLU": ("swiglu", {"hidden": "h", "ffn": "f"}),
    "QKVProjection": ("qkv_projection", _HIDDEN),
    "Embedding": ("embedding", _VOCABULARY),
    "LinearCrossEntropy": ("linear_cross_entropy", _VOCABULARY),
    "GroupedMatmul": ("grouped_matmul", _EXPERTS),
    "MoEDispatch": ("moe_dispatch", _EXPERTS),
    "BertAttention": ("bert_attention", {}),
    "GPTAttention": ("gpt_attention", {}),
    "T5Attention": ("t5_attention", {}),
    "RotaryEmbedding": ("rotary_embedding", {}),
    "Softmax": ("softmax", {}),
    "MaskedSoftmax": ("masked_softmax", {}),
    "CausalSoftmax": ("causal_softmax", {}),
    "CrossEntropy": ("cross_entropy", {}),
}


@dataclass(frozen=True, slots=True)
class Form:
    """An operator as a layer.

    Attributes:
        sizes: dims of its parameters, by the names of the sizes.
        parameters: the arguments that are parameters.
        inputs: the other arguments, which a layer is called with.
    """

    operator: Operator
    sizes: Mapping[str, str]
    parameters: tuple[Argument, ...]
    inputs: tuple[Argument, ...]

    @classmethod
    def of(cls, name: str, sizes: Mapping[str, str]) -> Form:
        """The form of an operator."""

        def has_size(one: Argument) -> bool:
            dims = {dim for dim in one.dims.split() if not dim.isdigit()}
            return one.kind == "float" and {*sizes.values()} >= dims

        every = OPERATORS[name].arguments
        inputs = tuple(one for one in every if not has_size(one))
        return cls(OPERATORS[name], sizes, tuple(filter(has_size, every)), inputs)

    @property
    def sizes_of_no_input(self) -> dict[str, str]:
        """The sizes that the inputs of a call do not say."""
        said = {dim for one in self.inputs for dim in one.dims.split()}
        return {name: dim for name, dim in self.sizes.items() if dim not in said}

    def apply(self, layer: Any, parameters: Mapping[str, Array], *inputs: Any) -> Array:
        """Calls the operator with the parameters in their places.

        Args:
            layer: has the `implementation`, by name; `options`; and the `dtype` that
                everything is computed in, None for that of the first float input.
        """
        floats = [x.dtype for x in inputs if jnp.issubdtype(x.dtype, jnp.floating)]
        wanted = layer.dtype or (floats[0] if floats else None)
        rest = iter(inputs)
        args = [
            parameters[one.name] if one in self.parameters else next(rest)
            for one in self.operator.arguments
        ]
        if wanted is not None:
            args = [
                x.astype(wanted) if jnp.issubdtype(x.dtype, jnp.floating) else x
                for x in args
            ]
        how = {"implementation": layer.implementation, **dict(layer.options)}
        return self.operator(*args, **how)


def initial(one: Argument, key: Array, dims: Mapping[str, int], dtype: Any) -> Array:
    """Ones for scales, zeros for biases, and random numbers for kernels."""
    names = one.dims.split()
    shape = tuple(int(dim) if dim.isdigit() else dims[dim] for dim in names)
    if one.name in ("scale", "bias"):
        return jnp.full(shape, one.around, dtype)
    is_by_size = isinstance(one.spread, str)
    deviation = one.deviation(shape) if is_by_size else _TABLE_DEVIATION
    return jax.random.normal(key, shape, dtype) * deviation


def classes(
    base: type, sizes_of: Callable[[Form], Mapping[str, str]], **how: Any
) -> dict[str, type]:
    """A class for each layer, by its name.

    Args:
        base: derived from a module of flax; calls the operator of its class's `form`.
        sizes_of: the sizes that a class takes, by name.
        how: keywords of the classes' making.
    """

    def made(name: str, form: Form) -> type:
        inputs = ", ".join(one.name for one in form.inputs)
        text = f"{form.operator.summary}: ({inputs})."
        if sizes := sizes_of(form):
            text += f"\n\nSizes: {', '.join(sizes)}."
        body = {"__doc__": text, "__module__": base.__module__, "form": form}
        body["__annotations__"] = dict.fromkeys(sizes, int)
        return new_class(name, (base,), how, lambda new: new.update(body))

    return {name: made(name, Form.of(*of)) for name, of in LAYERS.items()}
