"""Operators that models are made of, each with all implementations of it.

    from cfp.operators import gpt_attention, layer_norm

    y = layer_norm(x, scale, bias)  # The first implementation that takes them.
    y = gpt_attention(q, k, v, implementation="cudnn")

As modules: `cfp.operators.linen` and `cfp.operators.nnx`. Put into a model that is
there already: `cfp.operators.inject`. What each takes: ``python -m cfp.operators``.
"""

from cfp.operators.activations import BIAS_GELU as bias_gelu
from cfp.operators.activations import CAUSAL_SOFTMAX as causal_softmax
from cfp.operators.activations import GROUPED_MATMUL as grouped_matmul
from cfp.operators.activations import MASKED_SOFTMAX as masked_softmax
from cfp.operators.activations import MOE_DISPATCH as moe_dispatch
from cfp.operators.activations import SOFTMAX as softmax
from cfp.operators.activations import SWIGLU as swiglu
from cfp.operators.attention import BERT_ATTENTION as bert_attention
from cfp.operators.attention import EMBEDDING as embedding
from cfp.operators.attention import GPT_ATTENTION as gpt_attention
from cfp.operators.attention import QKV_PROJECTION as qkv_projection
from cfp.operators.attention import ROTARY_EMBEDDING as rotary_embedding
from cfp.operators.attention import T5_ATTENTION as t5_attention
from cfp.operators.inventory import OPERATORS, find
from cfp.operators.losses import CROSS_ENTROPY as cross_entropy
from cfp.operators.losses import LINEAR_CROSS_ENTROPY as linear_cross_entropy
from cfp.operators.norms import DROPOUT_ADD_LAYER_NORM as dropout_add_layer_norm
from cfp.operators.norms import LAYER_NORM as layer_norm
from cfp.operators.norms import RMS_NORM as rms_norm
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
