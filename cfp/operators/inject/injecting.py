"""Injection after a model was made, and while it is made or called.

Into modules of `flax.linen` operators come through interceptors of their calls. A
module keeps its parameters: `init` makes those of the original, and a replacement gets
them mapped when it is called. So checkpoints are the original's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from cfp.operators.inject import on_functions, on_nnx
from cfp.operators.inject.policy import (
    Choices,
    Policy,
    PolicyError,
    Refused,
    check_mapping,
    first_match,
    registered,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A model with operators in the places of some of its parts.

    Attributes:
        model: of linen, what has `init` and `apply`; of NNX, the module that was given;
            of a function, one like it.
        report: what was replaced and what was not. Of linen and of functions it is
            filled when the model is called, or at once where inputs were given.
        replaced: policies by path, of NNX.
    """

    model: Any
    report: Report
    replaced: Mapping[on_nnx.Path, Policy] = field(default_factory=dict)

    def to_injected(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of the injected model from those of the original.

        Args:
            state: nested dicts, as of `flax.nnx.to_pure_dict`. Of linen and of
                functions they are the same.
        """
        return on_nnx.mapped_state(state, self.replaced, back=False)

    def to_original(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of the original from those of the injected model."""
        return on_nnx.mapped_state(state, self.replaced, back=True)


def inject(
    model: Any,
    *inputs: Any,
    policies: Sequence[type[Policy]] | None = None,
    implementations: Mapping[str, str] | None = None,
    right_padded: bool = False,
    strict: bool = False,
) -> Injection:
    """Puts operators in the places of a model's parts.

    Args:
        model: a module of linen or NNX (which is changed), or a function.
        inputs: of a module of linen or a function, what it is called with, or shapes
            and types of that: fills the report at once.
        policies: in place of the registered ones.
        implementations: names by operator; the first that takes the arguments for the
            others.
        right_padded: says that masks given to attention are those of padding at the
            ends of sequences.
        strict: whether it is an error if nothing is replaced.

    Raises:
        PolicyError: a policy drops a parameter, or nothing was replaced and `strict`.
        OperatorError: there is no operator or implementation of a name.
    """
    made = _policies(policies, implementations, right_padded)
    report = Report(strict=strict)
    if isinstance(model, nnx.Module):
        replaced = on_nnx.surgery(model, made, report)
        report.check()
        return Injection(model=model, report=report, replaced=replaced)
    if isinstance(model, nn.Module):
        injected = InjectedLinen(model, made, report)
        if inputs:
            injected.see(*inputs)
        return Injection(model=injected, report=report)
    if not callable(model):
        raise PolicyError(
            "inject takes a module of flax.linen or flax.nnx, or a function, got "
            f"{type(model).__name__}."
        )
    function = on_functions.injected(model, made, report)
    if inputs:
        abstractly(function, *inputs)
    return Injection(model=function, report=report)


class Inside:
    """The context of `injection`.

    Attributes:
        report: what was replaced so far, and what was not.
    """

    def __init__(self, policies: Sequence[Policy], strict: bool):
        self.report = Report(strict=strict)
        self._policies = policies

    def build(self, make: Callable[[], nnx.Module]) -> nnx.Module:
        """Makes a module of NNX with its parts replaced while it is made.

        In one compiled program, so what is replaced never takes memory.

        Args:
            make: makes the module.
        """

        @nnx.jit
        def made() -> nnx.Module:
            model = make()
            on_nnx.surgery(model, self._policies, self.report)
            return model

        return made()


@contextmanager
def injection(
    *,
    policies: Sequence[type[Policy]] | None = None,
    implementations: Mapping[str, str] | None = None,
    right_padded: bool = False,
    strict: bool = False,
) -> Iterator[Inside]:
    """Puts operators in the places of parts of all modules of linen that are called.

    Modules of NNX are made with `build` of what this gives. Arguments are those of
    `inject`.

    Raises:
        PolicyError: as `inject`, when the block ends.
    """
    made = _policies(policies, implementations, right_padded)
    inside = Inside(made, strict)
    with nn.intercept_methods(interceptor(made, inside.report)):
        yield inside
    inside.report.check()


def _policies(
    given: Sequence[type[Policy]] | None,
    implementations: Mapping[str, str] | None,
    right_padded: bool,
) -> list[Policy]:
    choices = Choices(
        implementations=dict(implementations or {}), right_padded=right_padded
    )
    return [policy(choices) for policy in (registered() if given is None else given)]
