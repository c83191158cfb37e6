"""Replacement of submodules in existing flax models by operators.

    from cfp.operators.inject import inject, injection

    print(inject(model))             # NNX: lists replaced parts, and reasons.

    with injection() as report:      # Linen: replaces calls inside the block.
        logits = model.apply(variables, tokens)

A part is a submodule, in linen also the outermost module. Operators compute the calls
of a replaced part, except for calls that its policy refuses. Parameters stay in place:
checkpoints do not change, and tied weights stay tied. Calls in linen are intercepted.
In NNX a replaced part gets a subclass of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from types import new_class
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from cfp.errors import CfpError
from cfp.operators import find, known
from cfp.operators.inject.parts import POLICIES
from cfp.operators.inject.policy import Part, Policy, Report
from cfp.operators.operator import Refused

__all__ = ["Policy", "Refused", "Report", "inject", "injection", "register_policy"]
registered: list[type[Policy]] = [*POLICIES]


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Registers a policy for later injections, ahead of all others; returns it.

    Raises:
        CfpError: the value is not a subclass of `Policy`.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise CfpError(
            f"{policy!r} is no policy: give a subclass of cfp.operators.inject.Policy."
        )
    registered.insert(0, policy)
    return policy


def inject(model: nnx.Module, **how: Any) -> Report:
    """Replaces parts of an NNX module by operators, in place.

    Args:
        how: `policies` replaces the registered policies; `implementations` maps an
            operator to its implementation (a refusal raises CfpError in the call), by
            default the first that accepts; `right_padded=True` promises that masks hide
            only padding at sequence ends; `strict=True` raises if nothing is replaced.

    Returns:
        Report of all parts; each call of a replaced part updates its entry.

    Raises:
        CfpError: the model is not an NNX module, an operator or implementation is
            unknown, or `strict` and nothing was replaced.
    """
    injector = _Injector.of(**how)
    if not isinstance(model, nnx.Module):
        kind = type(model).__name__
        raise CfpError(
            f"inject takes a module of flax.nnx, got {kind}. For modules of "
            "flax.linen: with injection()."
        )
    for path, part in nnx.iter_modules(model):
        where = "/".join(map(str, path))
        if part is model or isinstance(part, nnx.List | nnx.Dict):
            continue
        if (policy := injector.match(where, part)) is not None:
            # A module takes this for an attribute of its own.
            object.__setattr__(part, "__class__", injector.kind(where, part, policy))
    injector.check()
    return injector.report


@contextmanager
def injection(**how: Any) -> Iterator[Report]:
    """Replaces calls of linen modules in the `with` block, except in initialization.

    Args:
        how: as in `inject`.

    Raises:
        CfpError: an operator or implementation is unknown; or, when the block ends,
            `strict` and nothing was replaced.
    """
    injector = _Injector.of(**how)
    with nn.intercept_methods(injector.intercept):
        yield injector.report
    injector.check()


@dataclass(frozen=True, slots=True)
class _Injector:
    """Policies of an injection (the first that matches decides), and its report."""

    policies: Sequence[Policy]
    strict: bool
    report: Report = field(default_factory=Report)

    @classmethod
    def of(
        cls,
        policies: Sequence[type[Policy]] | None = None,
        implementations: Mapping[str, str] | None = None,
        right_padded: bool = False,
        strict: bool = False,
    ) -> _Injector:
        wanted = dict(implementations or {})
        for name, one in wanted.items():
            known(f"implementation of {name}", one, find(name).implementations)
        kinds = registered if policies is None else policies
        return cls([kind(wanted, right_padded) for kind in kinds], strict)

    def check(self) -> None:
        """Raises CfpError if the injection is strict and nothing was replaced."""
        if self.strict and not self.report.replaced:
            seen = str(self.report).splitlines()[1:6] or ["the model has no parts"]
            raise CfpError(
                f"Nothing was replaced: {'; '.join(seen)}. Register a policy for this "
                "model, or leave out strict=True."
            )

    def note(self, path: str, part: Any, policy: Policy | None, why: str = "") -> None:
        """Records a part in the report; `why` is the reason against a replacement."""
        self.report.parts[path] = Part(
            kind=type(part).__name__,
            policy=type(policy).__name__ if policy else "",
            operators=dict(policy.used) if policy and not why else {},
            reason=why,
        )

    def match(self, path: str, part: Any) -> Policy | None:
        """Returns the policy that replaces a part, or None; records the result."""
        policy = next((one for one in self.policies if one.match(part)), None)
        try:
            if policy is None:
                raise Refused("no policy matches")
            policy.used.clear()
            policy.build(part)
        except Refused as reason:
            self.note(path, part, policy, str(reason))
            return None
        self.note(path, part, policy)
        return policy

    def call(
        self,
        policy: Policy,
        path: str,
        part: Any,
        parameters: Any,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Calls the replacement by a policy, or `original` if the policy refuses."""
        policy.used.clear()
        try:
            replacement = policy.build(part)
            try:
                signature(replacement).bind(None, *args, **kwargs)
            except TypeError as error:
                raise Refused(f"is called in an unsupported way: {error}") from error
            with jax.named_scope(type(policy).__name__):
                made = replacement(parameters, *args, **kwargs)
        except Refused as reason:
            self.note(path, part, policy, str(reason))
            return original(*args, **kwargs)
        self.note(path, part, policy)
        return made

    def kind(self, path: str, part: nnx.Module, policy: Policy) -> type:
        """A subclass of an NNX part's class, whose `__call__` uses the policy."""
        kind = type(part)

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = nnx.to_pure_dict(nnx.state(module, nnx.Param))
            original = partial(kind.__call__, module)
            return self.call(policy, path, module, parameters, original, args, kwargs)

        body = {"__call__": call, "__doc__": kind.__doc__}
        how = {"pytree": not jax.tree_util.all_leaves([part])}
        return new_class(kind.__name__, (kind,), how, lambda new: new.update(body))

    def intercept(
        self, original: Callable[..., Any], args: Any, kwargs: Any, context: Any
    ) -> Any:
        """Interceptor of linen modules' `__call__`, except during initialization."""
        module, path = context.module, "/".join(map(str, context.module.path))
        if context.method_name != "__call__" or module.is_initializing():
            return original(*args, **kwargs)
        if (policy := self.match(path, module)) is None:
            return original(*args, **kwargs)
        parameters = nn.meta.unbox(dict(module.variables.get("params", {})))
        return self.call(policy, path, module, parameters, original, args, kwargs)
