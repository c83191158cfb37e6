"""Operators put into models that are there already.

from cfp.operators.inject import inject, injection

injected = inject(model)          # A module of linen or NNX.
print(injected.report)            # What was replaced, what was not, and why.

with injection() as inside:       # While models of linen are called.
    logits = model.apply(variables, tokens)
    print(inside.report)
"""

from cfp.operators.inject import parts  # noqa: F401  (registers the policies)
from cfp.operators.inject.injecting import Injection, inject, injection
from cfp.operators.inject.policy import (
    Part,
    Policy,
    Refused,
    Report,
    register_policy,
    unregister_policy,
)

__all__ = [
    "Injection",
    "Part",
    "Policy",
    "Refused",
    "Report",
    "inject",
    "injection",
    "register_policy",
    "unregister_policy",
]
