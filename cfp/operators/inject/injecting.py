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
from functools import partial
from inspect import signature
from types import new_class
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax import Array

from cfp.errors import CfpError
from cfp.operators import find
from cfp.operators.inject.policy import (
    Policy,
    Refused,
    Report,
    registered,
)

_ARRAYS = (Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


@dataclass(frozen=True, slots=True)
class _Injector:
    """The policies of an injection, which are asked in their order, and its report."""

    policies: Sequence[Policy]
    report: Report

    def match(self, path: str, part: Any) -> Policy | None:
        policy = next((one for one in self.policies if one.match(part)), None)
        if policy is None:
            self.report.add(path, part, None, "no policy matches")
        return policy

    def call(
        self,
        path: str,
        part: Any,
        policy: Policy,
        parameters: Callable[[], Any],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the operators, or the original if the policy refuses."""
        try:
            replacement = policy.build(part)
            try:
                signature(replacement).bind(None, *args, **kwargs)
            except TypeError as error:
                raise Refused(f"is called otherwise: {error}") from error
            with jax.named_scope(type(policy).__name__):
                made = replacement(parameters(), *args, **kwargs)
        except Refused as error:
            self.report.add(path, part, policy, str(error))
            return original(*args, **kwargs)
        self.report.add(path, part, policy)
        return made

    def replace(self, model: nnx.Module) -> None:
        """Replaces calls of parts of a module of NNX, but not of the model itself."""
        for path, part in nnx.iter_modules(model):
            if part is model or isinstance(part, nnx.List | nnx.Dict):
                continue
            where = "/".join(map(str, path))
            if (policy := self.match(where, part)) is None:
                continue
            try:
                policy.build(part)
            except Refused as error:
                self.report.add(where, part, policy, str(error))
                continue
            kind = self._injected(where, part, policy)
            # A module takes this for an attribute of its own.
            object.__setattr__(part, "__class__", kind)
            self.report.add(where, part, policy)

    def _injected(self, path: str, part: nnx.Module, policy: Policy) -> type:
        """A class like a part's, whose calls are the operators'."""
        kind = type(part)

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return self.call(
                path,
                module,
                policy,
                lambda: nnx.to_pure_dict(nnx.state(module, nnx.Param)),
                partial(kind.__call__, module),
                args,
                kwargs,
            )

        body = {"__call__": call, "__doc__": kind.__doc__}
        how = {"pytree": not jax.tree_util.all_leaves([part])}
        return new_class(kind.__name__, (kind,), how, lambda new: new.update(body))

    def intercept(
        self, original: Callable[..., Any], args: Any, kwargs: Any, context: Any
    ) -> Any:
        """Intercepts a call of `flax.linen`."""
        module, path = context.module, "/".join(map(str, context.module.path))
        if context.method_name != "__call__" or module.is_initializing():
            return original(*args, **kwargs)
        if (policy := self.match(path, module)) is None:
            return original(*args, **kwargs)
        return self.call(
            path,
            module,
            policy,
            lambda: nn.meta.unbox(dict(module.variables.get("params", {}))),
            original,
            args,
            kwargs,
        )


def _injector(
    policies: Sequence[type[Policy]] | None = None,
    implementations: Mapping[str, str] | None = None,
    right_padded: bool = False,
    strict: bool = False,
) -> _Injector:
    wanted = dict(implementations or {})
    for name, implementation in wanted.items():
        find(name).check_implementation(implementation)
    kinds = registered if policies is None else policies
    made = [kind(wanted, right_padded) for kind in kinds]
    return _Injector(made, Report(strict=strict))


@dataclass(frozen=True, slots=True)
class InjectedLinen:
    """A module of linen with operators in the places of some of its parts.

    It has the module's `init` and `apply`, with the original's variables.
    """

    module: nn.Module
    _injector: _Injector

    @property
    def init(self) -> Callable[..., Any]:
        """The module's."""
        return self.module.init

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """As of the module, with its parts replaced.

        Raises:
            CfpError: the injection is strict, and nothing was replaced.
        """
        with nn.intercept_methods(self._injector.intercept):
            made = self.module.apply(*args, **kwargs)
        self._injector.report.check()
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
        report: the parts that were replaced or not. It is filled when the model is
            called; of linen also at once where inputs were given.
    """

    model: Any
    report: Report


def inject(model: Any, *inputs: Any, **how: Any) -> Injection:
    """Puts operators in the places of a model's parts.

    Args:
        model: a module of linen or NNX (which is changed).
        inputs: of a module of linen, the arguments of its calls, or their shapes and
            types: fills the report at once.
        how: `policies`, in place of the registered ones; `implementations`, names by
            operator, the first that takes the arguments for the others;
            `right_padded`, True if masks given to attention are those of padding at
            the ends of sequences; `strict`, True if it is an error that nothing is
            replaced.

    Raises:
        CfpError: nothing was replaced and `strict`, or this is no such module.
        CfpError: there is no operator or implementation of a name.
    """
    injector = _injector(**how)
    if isinstance(model, nnx.Module):
        injector.replace(model)
        injector.report.check()
    elif isinstance(model, nn.Module):
        model = InjectedLinen(model, injector)
        if inputs:
            model.see(*inputs)
    else:
        kind = type(model).__name__
        raise CfpError(f"inject takes a module of flax.linen or flax.nnx, got {kind}.")
    return Injection(model=model, report=injector.report)


@dataclass(frozen=True, slots=True)
class Inside:
    """The context of `injection`, with the report so far."""

    _injector: _Injector

    @property
    def report(self) -> Report:
        """The parts so far."""
        return self._injector.report

    def build(self, make: Callable[[], nnx.Module]) -> nnx.Module:
        """Makes a module of NNX with its parts replaced while it is made.

        In one compiled program, so what is replaced never takes memory.
        """

        @nnx.jit
        def made() -> nnx.Module:
            model = make()
            self._injector.replace(model)
            return model

        return made()


@contextmanager
def injection(**how: Any) -> Iterator[Inside]:
    """Puts operators in the places of parts of all modules of linen that are called.

    Modules of NNX are made with `build` of the context.

    Args:
        how: see `inject`.

    Raises:
        CfpError: as `inject`, when the block ends.
    """
    injector = _injector(**how)
    with nn.intercept_methods(injector.intercept):
        yield Inside(injector)
    injector.report.check()
