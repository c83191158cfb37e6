"""A module of `flax.linen` for each operator.

    from cfp.operators import linen

    norm = linen.LayerNorm(options={"eps": 1e-6})
    attention = linen.GPTAttention(implementation="cudnn")

Parameters are float32 and have the names and shapes of the operator's arguments, see
``python -m cfp.operators --list``; sizes that the inputs do not say are attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from cfp.operators import inventory
from cfp.operators.inventory import find


class Layer(nn.Module):
    """An operator as a module; see its subclasses.

    Attributes:
        implementation: by name; the first that takes the arguments, if not given.
        options: of the operator.
        dtype: that everything is computed in; by default that of the inputs.
        param_dtype: of the parameters.
    """

    implementation: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: Any = None
    param_dtype: Any = jnp.float32

    operator: ClassVar[str] = ""
    sizes: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @nn.compact
    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Calls the operator.

        Raises:
            OperatorError: the inputs do not fit, or no implementation takes them.
        """
        dims = inventory.dims_of_inputs(self.operator, inputs)
        dims |= {dim: getattr(self, name) for name, dim in self.sizes.items()}
        parameters = {}
        for one in inventory.parameters_of(self.operator):

            def begin(key: jax.Array, shape: Any, dtype: Any, one: Any = one) -> Any:
                return inventory.initial(one, key, shape, dtype)

            shape = inventory.shape_of(one, dims)
            parameters[one.name] = self.param(one.name, begin, shape, self.param_dtype)
        return inventory.apply(
            find(self.operator),
            parameters,
            inputs,
            dtype=self.dtype,
            implementation=self.implementation,
            options=self.options,
        )


class LayerNorm(Layer):
    """Layer norm over the last dim: (x)."""

    operator: ClassVar[str] = "layer_norm"


class RMSNorm(Layer):
    """RMS norm over the last dim: (x)."""

    operator: ClassVar[str] = "rms_norm"


class DropoutAddLayerNorm(Layer):
    """Layer norm of residual + dropout(x): (x, residual, key data)."""

    operator: ClassVar[str] = "dropout_add_layer_norm"


class BiasGelu(Layer):
    """GELU of x + bias: (x)."""

    operator: ClassVar[str] = "bias_gelu"


class SwiGLU(Layer, kw_only=True):
    """silu(x @ gate) * (x @ up): (x).

    Attributes:
        ffn: width of what is made.
    """

    ffn: int

    operator: ClassVar[str] = "swiglu"
    sizes: ClassVar[Mapping[str, str]] = {"ffn": "f"}


class QKVProjection(Layer):
    """Query, key and value of x, stacked: (x)."""

    operator: ClassVar[str] = "qkv_projection"


class Embedding(Layer, kw_only=True):
    """Rows of a table: (tokens).

    Attributes:
        vocab: rows of the table.
        hidden: width of the rows.
    """

    vocab: int
    hidden: int

    operator: ClassVar[str] = "embedding"
    sizes: ClassVar[Mapping[str, str]] = {"vocab": "v", "hidden": "h"}


class LinearCrossEntropy(Layer, kw_only=True):
    """Mean cross-entropy of x @ kernel.T: (x, labels).

    Attributes:
        vocab: rows of the kernel.
    """

    vocab: int

    operator: ClassVar[str] = "linear_cross_entropy"
    sizes: ClassVar[Mapping[str, str]] = {"vocab": "v"}


class GroupedMatmul(Layer, kw_only=True):
    """Groups of rows, each with a kernel of its own: (x, groups).

    Attributes:
        width: width of what is made.
    """

    width: int

    operator: ClassVar[str] = "grouped_matmul"
    sizes: ClassVar[Mapping[str, str]] = {"width": "w"}


class MoEDispatch(Layer, kw_only=True):
    """Tokens through the MLPs of their best experts: (x, scores).

    Attributes:
        width: width inside an expert.
    """

    width: int

    operator: ClassVar[str] = "moe_dispatch"
    sizes: ClassVar[Mapping[str, str]] = {"width": "w"}


class BertAttention(Layer):
    """Attention to the first keys: (query, key, value, lengths)."""

    operator: ClassVar[str] = "bert_attention"


class GPTAttention(Layer):
    """Causal attention: (query, key, value)."""

    operator: ClassVar[str] = "gpt_attention"


class T5Attention(Layer):
    """Attention with a bias of the scores: (query, key, value, bias)."""

    operator: ClassVar[str] = "t5_attention"


class RotaryEmbedding(Layer):
    """Turns pairs of features by their place: (x)."""

    operator: ClassVar[str] = "rotary_embedding"


class Softmax(Layer):
    """Softmax over the last dim: (scores)."""

    operator: ClassVar[str] = "softmax"


class MaskedSoftmax(Layer):
    """Softmax over the first keys: (scores, lengths)."""

    operator: ClassVar[str] = "masked_softmax"


class CausalSoftmax(Layer):
    """Softmax over the past: (scores)."""

    operator: ClassVar[str] = "causal_softmax"


class CrossEntropy(Layer):
    """Minus the log probability of each label: (logits, labels)."""

    operator: ClassVar[str] = "cross_entropy"
