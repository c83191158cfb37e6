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
    masked_softmax,
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
from cfp.operators.experts import grouped_matmul, moe_dispatch
from cfp.operators.losses import cross_entropy, linear_cross_entropy
from cfp.operators.norms import dropout_add_layer_norm, layer_norm, rms_norm
from cfp.operators.operator import (
    Argument,
    Implementation,
    Operator,
    OperatorError,
    unknown,
)

# In the order in which they are measured: those that matter most come first.
OPERATORS: dict[str, Operator] = {
    one.name: one
    for one in (
        gpt_attention,
        bert_attention,
        t5_attention,
        linear_cross_entropy,
        layer_norm,
        rms_norm,
        dropout_add_layer_norm,
        bias_gelu,
        swiglu,
        qkv_projection,
        cross_entropy,
        softmax,
        masked_softmax,
        causal_softmax,
        rotary_embedding,
        embedding,
        grouped_matmul,
        moe_dispatch,
    )
}

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
    "matching",
    "moe_dispatch",
    "qkv_projection",
    "rms_norm",
    "rotary_embedding",
    "softmax",
    "swiglu",
    "t5_attention",
]


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
