"""A module of `flax.nnx` for each operator.

    from cfp.operators import nnx as operators

    norm = operators.LayerNorm(1024, options={"eps": 1e-6}, rngs=nnx.Rngs(0))
    attention = operators.GPTAttention(implementation="cudnn")

Parameters are float32 and have the names and shapes of the operator's arguments, see
``python -m cfp.operators --list``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from cfp.operators import inventory
from cfp.operators.inventory import find

_NONE: Mapping[str, Any] = MappingProxyType({})


class Layer(nnx.Module):
    """An operator as a module; see its subclasses.

    Args:
        dims: sizes of the parameters' dims by name.
        implementation: by name; the first that takes the arguments, if not given.
        options: of the operator.
        dtype: that everything is computed in; by default that of the inputs.
        param_dtype: of the parameters.
        rngs: for the parameters, if there are any.
    """

    operator: ClassVar[str] = ""

    def __init__(
        self,
        dims: Mapping[str, int] = _NONE,
        *,
        implementation: str | None = None,
        options: Mapping[str, Any] = _NONE,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        self.implementation, self.dtype = implementation, dtype
        self.options = tuple(options.items())
        for one in inventory.parameters_of(self.operator):
            if rngs is None:
                raise TypeError(f"{type(self).__name__} needs rngs=nnx.Rngs(...)")
            shape = inventory.shape_of(one, dims)
            value = inventory.initial(one, rngs.params(), shape, param_dtype)
            setattr(self, one.name, nnx.Param(value))

    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Calls the operator.

        Raises:
            OperatorError: the inputs do not fit, or no implementation takes them.
        """
        parameters = {
            one.name: getattr(self, one.name)[...]
            for one in inventory.parameters_of(self.operator)
        }
        return inventory.apply(
            find(self.operator),
            parameters,
            inputs,
            dtype=self.dtype,
            implementation=self.implementation,
            options=dict(self.options),
        )


class LayerNorm(Layer):
    """Layer norm over the last dim: (x).

    Args:
        hidden: width of the inputs.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "layer_norm"

    def __init__(self, hidden: int, **how: Any):
        super().__init__({"h": hidden}, **how)


class RMSNorm(Layer):
    """RMS norm over the last dim: (x).

    Args:
        hidden: width of the inputs.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "rms_norm"

    def __init__(self, hidden: int, **how: Any):
        super().__init__({"h": hidden}, **how)


class DropoutAddLayerNorm(Layer):
    """Layer norm of residual + dropout(x): (x, residual, key data).

    Args:
        hidden: width of the inputs.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "dropout_add_layer_norm"

    def __init__(self, hidden: int, **how: Any):
        super().__init__({"h": hidden}, **how)


class BiasGelu(Layer):
    """GELU of x + bias: (x).

    Args:
        hidden: width of the inputs.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "bias_gelu"

    def __init__(self, hidden: int, **how: Any):
        super().__init__({"f": hidden}, **how)


class SwiGLU(Layer):
    """silu(x @ gate) * (x @ up): (x).

    Args:
        hidden: width of the inputs.
        ffn: width of what is made.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "swiglu"

    def __init__(self, hidden: int, ffn: int, **how: Any):
        super().__init__({"h": hidden, "f": ffn}, **how)


class QKVProjection(Layer):
    """Query, key and value of x, stacked: (x).

    Args:
        hidden: width of the inputs.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "qkv_projection"

    def __init__(self, hidden: int, **how: Any):
        super().__init__({"h": hidden}, **how)


class Embedding(Layer):
    """Rows of a table: (tokens).

    Args:
        vocab: rows of the table.
        hidden: width of the rows.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "embedding"

    def __init__(self, vocab: int, hidden: int, **how: Any):
        super().__init__({"v": vocab, "h": hidden}, **how)


class LinearCrossEntropy(Layer):
    """Mean cross-entropy of x @ kernel.T: (x, labels).

    Args:
        vocab: rows of the kernel.
        hidden: width of the inputs.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "linear_cross_entropy"

    def __init__(self, vocab: int, hidden: int, **how: Any):
        super().__init__({"v": vocab, "h": hidden}, **how)


class GroupedMatmul(Layer):
    """Groups of rows, each with a kernel of its own: (x, groups).

    Args:
        experts: kernels.
        hidden: width of the inputs.
        width: width of what is made.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "grouped_matmul"

    def __init__(self, experts: int, hidden: int, width: int, **how: Any):
        super().__init__({"e": experts, "h": hidden, "w": width}, **how)


class MoEDispatch(Layer):
    """Tokens through the MLPs of their best experts: (x, scores).

    Args:
        experts: how many.
        hidden: width of the inputs.
        width: width inside an expert.
        how: see `Layer`.
    """

    operator: ClassVar[str] = "moe_dispatch"

    def __init__(self, experts: int, hidden: int, width: int, **how: Any):
        super().__init__({"e": experts, "h": hidden, "w": width}, **how)


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
