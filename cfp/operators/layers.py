"""The operators as layers, of which `cfp.operators.linen` and `nnx` make modules.

A layer names the sizes of its parameters: these are the arguments whose dims are all
among the named ones. It is called with the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cfp.operators import find
from cfp.operators.operator import Argument, Operator

_TABLE_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class LayerForm:
    """An operator as a layer, with names for the sizes of its parameters' dims."""

    name: str
    sizes: Mapping[str, str] = field(default_factory=dict)

    @property
    def operator(self) -> Operator:
        """The operator."""
        return find(self.name)

    def _is_parameter(self, argument: Argument) -> bool:
        dims = {dim for dim in argument.dims.split() if not dim.isdigit()}
        return argument.kind == "float" and {*self.sizes.values()} >= dims

    @property
    def parameters(self) -> tuple[Argument, ...]:
        """The arguments that are parameters."""
        return tuple(filter(self._is_parameter, self.operator.arguments))

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """The other arguments, which a layer is called with."""
        every = self.operator.arguments
        return tuple(one for one in every if not self._is_parameter(one))

    @property
    def sizes_of_no_input(self) -> dict[str, str]:
        """The sizes that the inputs of a call do not say."""
        said = {dim for one in self.inputs for dim in one.dims.split()}
        return {name: dim for name, dim in self.sizes.items() if dim not in said}

    def text(self, **sizes: Mapping[str, str]) -> str:
        """The operator in a sentence, with its inputs; and what sizes a layer takes."""
        inputs = ", ".join(one.name for one in self.inputs)
        lines = [f"{self.operator.summary}: ({inputs})."]
        lines += [f"{title}: {', '.join(of)}." for title, of in sizes.items() if of]
        return "\n\n".join(lines)

    def apply(
        self,
        parameters: Mapping[str, Array],
        inputs: tuple[Any, ...],
        *,
        dtype: Any,
        implementation: str | None,
        options: Mapping[str, Any],
    ) -> Array:
        """Calls the operator with the parameters in their places.

        Args:
            inputs: the other arguments, in their order.
            dtype: that everything is computed in; None for the type of the first input
                that is a float, or else of the parameters.
            implementation: by name, or the first that takes the arguments.
        """
        wanted = dtype or next((x.dtype for x in inputs if _is_float(x)), None)
        rest = iter(inputs)
        args = [
            parameters[one.name] if one.name in parameters else next(rest)
            for one in self.operator.arguments
        ]
        if wanted is not None:
            args = [x.astype(wanted) if _is_float(x) else x for x in args]
        return self.operator(*args, implementation=implementation, **options)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def initial(
    argument: Argument, key: Array, dims: Mapping[str, int], dtype: Any
) -> Array:
    """Ones for scales, zeros for biases, and random numbers for kernels."""
    names = argument.dims.split()
    shape = tuple(int(dim) if dim.isdigit() else dims[dim] for dim in names)
    if argument.name in ("scale", "bias"):
        return jnp.full(shape, argument.around, dtype)
    is_by_size = isinstance(argument.spread, str)
    deviation = argument.deviation(shape) if is_by_size else _TABLE_DEVIATION
    return jax.random.normal(key, shape, dtype) * deviation


_HIDDEN = {"hidden": "h"}
_VOCABULARY = {"vocab": "v", "hidden": "h"}
_EXPERTS = {"experts": "e", "hidden": "h", "width": "w"}
# By the name of the layer's class.
LAYERS: Mapping[str, LayerForm] = {
    "LayerNorm": LayerForm("layer_norm", _HIDDEN),
    "RMSNorm": LayerForm("rms_norm", _HIDDEN),
    "DropoutAddLayerNorm": LayerForm("dropout_add_layer_norm", _HIDDEN),
    "BiasGelu": LayerForm("bias_gelu", {"hidden": "f"}),
    "SwiGLU": LayerForm("swiglu", {"hidden": "h", "ffn": "f"}),
    "QKVProjection": LayerForm("qkv_projection", _HIDDEN),
    "Embedding": LayerForm("embedding", _VOCABULARY),
    "LinearCrossEntropy": LayerForm("linear_cross_entropy", _VOCABULARY),
    "GroupedMatmul": LayerForm("grouped_matmul", _EXPERTS),
    "MoEDispatch": LayerForm("moe_dispatch", _EXPERTS),
    "BertAttention": LayerForm("bert_attention"),
    "GPTAttention": LayerForm("gpt_attention"),
    "T5Attention": LayerForm("t5_attention"),
    "RotaryEmbedding": LayerForm("rotary_embedding"),
    "Softmax": LayerForm("softmax"),
    "MaskedSoftmax": LayerForm("masked_softmax"),
    "CausalSoftmax": LayerForm("causal_softmax"),
    "CrossEntropy": LayerForm("cross_entropy"),
}
