"""Operators that models are made of, each with all implementations of it.

    from cfp.operators import gpt_attention, layer_norm

    y = layer_norm(x, scale, bias)  # The first implementation that takes them.
    y = gpt_attention(q, k, v, implementation="cudnn")

Put into a model that is there already: `cfp.operators.inject`. All of them:
``python -m cfp.operators --list``.
"""

from typing import TYPE_CHECKING

from cfp.operators.operator import Argument, Operator, Refused, known
from cfp.operators.table import OPERATORS

# Each operator, by its name.
globals().update(OPERATORS)
if TYPE_CHECKING:

    def __getattr__(name: str) -> Operator: ...


__all__ = ["OPERATORS", "Argument", "Operator", "Refused", "find", "matching"]


def find(name: str) -> Operator:
    """Returns an operator by its name.

    Raises:
        CfpError: the name is unknown.
    """
    known("operator", name, OPERATORS)
    return OPERATORS[name]


def matching(words: str) -> list[Operator]:
    """The operators that have one of some words in their names.

    Args:
        words: with commas between them; empty for all.

    Raises:
        CfpError: a word is in no name.
    """
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    for word in wanted:
        if not any(word in name for name in OPERATORS):
            find(word)
    return [
        one
        for name, one in OPERATORS.items()
        if not wanted or any(word in name for word in wanted)
    ]
