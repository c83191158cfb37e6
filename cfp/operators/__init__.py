"""Operators that models are made of, each with all implementations of it.

    from cfp.operators import gpt_attention, layer_norm

    y = layer_norm(x, scale, bias)  # The first implementation that takes them.
    y = gpt_attention(q, k, v, implementation="cudnn")

As modules: `cfp.operators.linen` and `cfp.operators.nnx`. Put into a model that is
there already: `cfp.operators.inject`. What each takes: ``python -m cfp.operators``.
"""

from cfp.operators.activations import (
    bias_gelu,
    causal_softmax,
    grouped_matmul,
    masked_softmax,
    moe_dispatch,
    softmax,
    swiglu,
)
from cfp.operators.attention import (
    bert_attention,
    embedding,
    gpt_attention,
    qkv_projection,
    rotary_embedding,
    t5_attention,
)
from cfp.operators.inventory import OPERATORS, find
from cfp.operators.losses import cross_entropy, linear_cross_entropy
from cfp.operators.norms import dropout_add_layer_norm, layer_norm, rms_norm
from cfp.operators.operator import Argument, Implementation, Operator, OperatorError

__all__ = [
    "OPERATORS",
    "Argument",
    "Implementation",
    "Operator",
    "OperatorError",
    "bert_attention",
    "bias_gelu",
    "causal_softmax",
    "cross_entropy",
    "dropout_add_layer_norm",
    "embedding",
    "find",
    "gpt_attention",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "masked_softmax",
    "moe_dispatch",
    "qkv_projection",
    "rms_norm",
    "rotary_embedding",
    "softmax",
    "swiglu",
    "t5_attention",
]
