"""Operators that models are made of, each with all implementations of it.

    from cfp.operators import gpt_attention, layer_norm

    y = layer_norm(x, scale, bias)  # The first implementation that takes them.
    y = gpt_attention(q, k, v, implementation="cudnn")

As modules: `cfp.operators.linen` and `cfp.operators.nnx`. Put into a model that is
there already: `cfp.operators.inject`. What each takes: ``python -m cfp.operators``.
"""

from typing import TYPE_CHECKING

from cfp.operators.inventory import OPERATORS, find
from cfp.operators.operator import Argument, Implementation, Operator, OperatorError

__all__ = ["OPERATORS", "Argument", "Implementation", "Operator", "OperatorError"]
__all__ += ["find", *OPERATORS]

# Each operator, by its name.
globals().update(OPERATORS)
if TYPE_CHECKING:

    def __getattr__(name: str) -> Operator: ...
