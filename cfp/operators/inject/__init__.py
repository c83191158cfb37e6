"""Operators put into existing models.

    from cfp.operators.inject import inject, injection

    print(inject(model))             # A module of NNX: replaced parts, and reasons.

    with injection() as report:      # Modules of linen, while they are called.
        logits = model.apply(variables, tokens)

Operators compute calls of parts. Parts keep their parameters, which a policy maps at a
call. So checkpoints are the original's, and tied weights stay tied. Calls of modules of
`flax.linen` are intercepted. A part of a module of `flax.nnx` gets a class of its own,
derived from the part's, whose call is the operators'.
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
    """Adds a policy for every injection; the newest is asked first.

    Raises:
        CfpError: the value is no policy.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise CfpError(
            f"{policy!r} is no policy: derive it from cfp.operators.inject.Policy."
        )
    registered.insert(0, policy)
    return policy


def inject(model: nnx.Module, **how: Any) -> Report:
    """Puts operators in the places of parts of a module of NNX, which is changed.

    Args:
        how: `policies`, in place of the registered ones; `implementations`, names by
            operator, the first that takes the arguments for the others;
            `right_padded`, True if masks given to attention are those of padding at
            the ends of sequences; `strict`, True if it is an error that nothing is
            replaced.

    Returns:
        The parts; the operators of each are known once it was called.

    Raises:
        CfpError: nothing was replaced and `strict`, this is no such module, or there is
            no operator or implementation of a name.
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
    """Puts operators in the places of parts of all modules of linen that are called.

    Args:
        how: see `inject`.

    Raises:
        CfpError: as `inject`, when the block ends.
    """
    injector = _Injector.of(**how)
    with nn.intercept_methods(injector.intercept):
        yield injector.report
    injector.check()


@dataclass(frozen=True, slots=True)
class _Injector:
    """The policies of an injection, which are asked in their order, and its report."""

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
        """The injector for the options of `inject`."""
        wanted = dict(implementations or {})
        for name, one in wanted.items():
            known(f"implementation of {name}", one, find(name).implementations)
        kinds = registered if policies is None else policies
        return cls([kind(wanted, right_padded) for kind in kinds], strict)

    def check(self) -> None:
        """Checks that something was replaced, if the injection is strict."""
        if self.strict and not self.report.replaced:
            seen = "; ".join(str(self.report).splitlines()[:6])
            raise CfpError(
                f"Nothing was replaced: {seen}. Register a policy for this model, or "
                "leave out strict=True."
            )

    def note(self, path: str, part: Any, policy: Policy | None, why: str = "") -> None:
        """Reports a part that was replaced, or why it was not."""
        self.report.parts[path] = Part(
            kind=type(part).__name__,
            policy=type(policy).__name__ if policy else "",
            operators=dict(policy.used) if policy and not why else {},
            reason=why,
        )

    def match(self, path: str, part: Any) -> Policy | None:
        """The policy that replaces a part; None if none does."""
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
        """Calls the operators, or the original if the policy refuses."""
        policy.used.clear()
        try:
            replacement = policy.build(part)
            try:
                signature(replacement).bind(None, *args, **kwargs)
            except TypeError as error:
                raise Refused(f"is called otherwise: {error}") from error
            with jax.named_scope(type(policy).__name__):
                made = replacement(parameters, *args, **kwargs)
        except Refused as reason:
            self.note(path, part, policy, str(reason))
            return original(*args, **kwargs)
        self.note(path, part, policy)
        return made

    def kind(self, path: str, part: nnx.Module, policy: Policy) -> type:
        """A class like a part's of NNX, whose calls are the operators'."""
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
        """Intercepts a call of `flax.linen`."""
        module, path = context.module, "/".join(map(str, context.module.path))
        if context.method_name != "__call__" or module.is_initializing():
            return original(*args, **kwargs)
        if (policy := self.match(path, module)) is None:
            return original(*args, **kwargs)
        parameters = nn.meta.unbox(dict(module.variables.get("params", {})))
        return self.call(policy, path, module, parameters, original, args, kwargs)
