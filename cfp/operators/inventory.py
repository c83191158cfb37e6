"""The operators of the inventory, by name."""

from __future__ import annotations

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
from cfp.operators.operator import Operator, unknown

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
