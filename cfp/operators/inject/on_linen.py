"""Injection into modules of `flax.linen`, through interceptors of their calls.

A module keeps its parameters: `init` makes those of the original, and a replacement
gets them mapped when it is called. So checkpoints are the original's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from cfp.operators.inject.policy import (
    Policy,
    Refused,
    check_mapping,
    first_match,
)
from cfp.operators.inject.report import Report

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


def interceptor(
    policies: Sequence[Policy], report: Report
) -> Callable[[Callable[..., Any], tuple, dict, Any], Any]:
    """The interceptor for `flax.linen.intercept_methods`.

    Args:
        policies: in the order in which they are asked.
        report: called with every module that is called.
    """

    def intercept(
        next_function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        module = context.module
        if context.method_name != "__call__" or module.is_initializing():
            return next_function(*args, **kwargs)
        path, kind = "/".join(map(str, module.path)), type(module).__name__
        policy = first_match(policies, module)
        if policy is None:
            report.add_left(path, kind, None, "no policy matches")
            return next_function(*args, **kwargs)
        try:
            replacement = policy.build(module)
            adapted = policy.adapt(module, args, kwargs)
        except Refused as error:
            report.add_left(path, kind, policy, str(error))
            return next_function(*args, **kwargs)
        parameters = nn.meta.unbox(dict(module.variables.get("params", {})))
        check_mapping(policy, parameters, path or kind)
        try:
            with jax.named_scope(policy.name):
                made = replacement(policy.to_injected(parameters), *adapted)
        except Refused as error:
            report.add_left(path, kind, policy, str(error))
            return next_function(*args, **kwargs)
        report.add_replaced(path, kind, policy)
        return made

    return intercept


class InjectedLinen:
    """A module of linen with operators in the places of some of its parts.

    It has the module's `init` and `apply`, with the original's variables.

    Attributes:
        module: the original.
    """

    def __init__(self, module: nn.Module, policies: Sequence[Policy], report: Report):
        self.module = module
        self._intercept = interceptor(policies, report)
        self._report = report

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """As of the module: the original's variables."""
        return self.module.init(*args, **kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """As of the module, with its parts replaced.

        Raises:
            PolicyError: the injection is strict, and nothing was replaced.
        """
        with nn.intercept_methods(self._intercept):
            made = self.module.apply(*args, **kwargs)
        self._report.check()
        return made

    def see(self, *args: Any) -> None:
        """Fills the report for some inputs; computes nothing."""

        def both(*inputs: Any) -> Any:
            variables = self.module.init(jax.random.key(0), *inputs)
            return self.apply(variables, *inputs, rngs={"dropout": jax.random.key(0)})

        abstractly(both, *args)


def abstractly(function: Callable[..., Any], *args: Any) -> None:
    """Traces a function; what is no array, such as a flag, is given as it is."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

    def of_arrays(*arrays: Any) -> Any:
        every = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            every[place] = array
        return function(*jax.tree.unflatten(tree, every))

    jax.eval_shape(of_arrays, *(leaves[i] for i in places))
