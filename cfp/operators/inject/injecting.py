"""Injection after a model was made, and while it is made or called.

Operators compute calls of parts; the parts keep their parameters, which a policy maps
when a part is called. So checkpoints are the original's, and tied weights stay tied.
Calls of modules of `flax.linen` are intercepted. A part of a module of `flax.nnx` gets
a class of its own, derived from the part's, whose call is the operators'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import new_class
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax import Array

from cfp.operators.inject.policy import (
    Parameters,
    Policy,
    PolicyError,
    Refused,
    first_match,
    policies_of,
)
from cfp.operators.inject.report import Report

_ARRAYS = (Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of a model, and the policy that replaces its calls."""

    path: str
    kind: str
    policy: Policy
    report: Report

    def call(
        self,
        part: Any,
        parameters: Callable[[], Parameters],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the operators, or the original if the policy refuses."""
        policy = self.policy
        try:
            replacement = policy.build(part)
            adapted = policy.adapt(part, args, kwargs)
            with jax.named_scope(policy.name):
                made = replacement(policy.to_injected(parameters()), *adapted)
        except Refused as error:
            self.report.add_left(self.path, self.kind, policy, str(error))
            return original(*args, **kwargs)
        self.report.add_replaced(self.path, self.kind, policy)
        return made


def _replace(model: nnx.Module, policies: Sequence[Policy], report: Report) -> None:
    """Replaces calls of parts of a model, but not of the model itself."""
    for path, part in nnx.iter_modules(model):
        if part is model or isinstance(part, nnx.List | nnx.Dict):
            continue
        where, kind = "/".join(map(str, path)), type(part).__name__
        policy = first_match(policies, part)
        if policy is None:
            report.add_left(where, kind, None, "no policy matches")
            continue
        try:
            policy.build(part)
        except Refused as error:
            report.add_left(where, kind, policy, str(error))
            continue
        own = _Part(path=where, kind=kind, policy=policy, report=report)
        # A module takes this for an attribute of its own.
        object.__setattr__(part, "__class__", _injected(part, own))
        report.add_replaced(where, kind, policy)


def _injected(part: nnx.Module, own: _Part) -> type[nnx.Module]:
    """A class like a part's, whose calls are the operators'."""
    kind = type(part)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        def parameters() -> Parameters:
            return nnx.to_pure_dict(nnx.state(self, nnx.Param))

        def original(*args: Any, **kwargs: Any) -> Any:
            return kind.__call__(self, *args, **kwargs)

        return own.call(self, parameters, original, args, kwargs)

    body = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    is_pytree = not jax.tree_util.all_leaves([part])
    how = {"pytree": is_pytree}
    return new_class(kind.__name__, (kind,), how, lambda new: new.update(body))


def _interceptor(policies: Sequence[Policy], report: Report) -> Any:
    """Intercepts calls of `flax.linen`; policies are asked in their order."""

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

        def parameters() -> Parameters:
            return nn.meta.unbox(dict(module.variables.get("params", {})))

        own = _Part(path=path, kind=kind, policy=policy, report=report)
        return own.call(module, parameters, next_function, args, kwargs)

    return intercept


class InjectedLinen:
    """A module of linen with operators in the places of some of its parts.

    It has the module's `init` and `apply`, with the original's variables.
    """

    def __init__(self, module: nn.Module, policies: Sequence[Policy], report: Report):
        self.module, self.init = module, module.init
        self._intercept, self._report = _interceptor(policies, report), report

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
        """Fills the report for some inputs; computes nothing.

        Inputs that are no arrays, such as a flag, are given as they are.
        """
        leaves, tree = jax.tree.flatten(args)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

        def both(*arrays: Any) -> Any:
            every = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                every[place] = array
            inputs = jax.tree.unflatten(tree, every)
            variables = self.init(jax.random.key(0), *inputs)
            return self.apply(variables, *inputs, rngs={"dropout": jax.random.key(0)})

        jax.eval_shape(both, *(leaves[i] for i in places))


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A model with operators in the places of some of its parts.

    Attributes:
        model: of linen, an object with `init` and `apply`; of NNX, the given module.
        report: what was replaced and what was not. It is filled when the model is
            called; of linen also at once where inputs were given.
    """

    model: Any
    report: Report


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
        model: a module of linen or NNX (which is changed).
        inputs: of a module of linen, the arguments of its calls, or their shapes and
            types: fills the report at once.
        policies: in place of the registered ones.
        implementations: names by operator; the first that takes the arguments for the
            others.
        right_padded: says that masks given to attention are those of padding at the
            ends of sequences.
        strict: whether it is an error if nothing is replaced.

    Raises:
        PolicyError: nothing was replaced and `strict`, or this is no such module.
        OperatorError: there is no operator or implementation of a name.
    """
    made = policies_of(policies, implementations, right_padded)
    report = Report(strict=strict)
    if isinstance(model, nnx.Module):
        _replace(model, made, report)
        report.check()
        return Injection(model=model, report=report)
    if isinstance(model, nn.Module):
        linen = InjectedLinen(model, made, report)
        if inputs:
            linen.see(*inputs)
        return Injection(model=linen, report=report)
    raise PolicyError(
        f"inject takes a module of flax.linen or flax.nnx, got {type(model).__name__}."
    )


class Inside:
    """The context of `injection`, with the report so far."""

    def __init__(self, policies: Sequence[Policy], report: Report):
        self.report, self._policies = report, policies

    def build(self, make: Callable[[], nnx.Module]) -> nnx.Module:
        """Makes a module of NNX with its parts replaced while it is made.

        In one compiled program, so what is replaced never takes memory.
        """

        @nnx.jit
        def made() -> nnx.Module:
            model = make()
            _replace(model, self._policies, self.report)
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

    Modules of NNX are made with `build` of the context. Arguments are those of
    `inject`.

    Raises:
        PolicyError: as `inject`, when the block ends.
    """
    made = policies_of(policies, implementations, right_padded)
    inside = Inside(made, Report(strict=strict))
    with nn.intercept_methods(_interceptor(made, inside.report)):
        yield inside
    inside.report.check()
