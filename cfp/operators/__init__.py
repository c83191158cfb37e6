"""Operators that models are made of, most with several implementations.

    from cfp.operators import gpt_attention, layer_norm

    y = layer_norm(x, scale, bias)  # By the first implementation that accepts these.
    y = gpt_attention(q, k, v, implementation="cudnn")

`cfp.operators.inject` puts operators into an existing model. ``python -m cfp.operators
--list`` lists all operators.
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
    """Lists operators whose names contain one of the words.

    Args:
        words: comma-separated; "" selects all operators.

    Raises:
        CfpError: one of the words is in no operator's name.
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
