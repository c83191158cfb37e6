"""Policies: the parts of a model to replace by operators.

A part is a module of flax (linen or NNX). For each the first policy that matches makes
the replacement. `cfp.operators.inject.parts` has policies for known parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jax import Array

from cfp.errors import CfpError
from cfp.operators import find

# A part's parameters: nested dicts of arrays.
Parameters = dict[str, Any]
# Takes the parameters of the replacement, and the arguments that `adapt` gave.
Replacement = Callable[..., Any]


class PolicyError(CfpError):
    """A policy that cannot be right, or an injection that replaced nothing."""


class Refused(Exception):
    """A part, or a call of it, that a policy matches but does not replace."""


class Policy(ABC):
    """The replacement of one kind of part.

    A policy is made once for an injection. It must not keep arrays: a replacement gets
    its parameters when it is called.

    Args:
        implementations: names by operator; the first that takes the arguments for the
            others.
        right_padded: says that masks of padding that are given to attention mask ends
            of sequences only.

    Attributes:
        operators: names of the operators that it puts in.
    """

    operators: tuple[str, ...] = ()

    def __init__(self, implementations: Mapping[str, str], right_padded: bool):
        self.implementations, self.right_padded = implementations, right_padded
        self._used: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The name in reports."""
        return type(self).__name__

    @abstractmethod
    def match(self, part: Any) -> bool:
        """Returns True if the policy replaces parts like this one."""

    @abstractmethod
    def build(self, part: Any) -> Replacement:
        """The replacement: a function of parameters and adapted arguments.

        Raises:
            Refused: not this part, with the reason.
        """

    def to_injected(self, parameters: Parameters) -> Parameters:
        """The replacement's parameters from the part's, in each call; or the same."""
        return parameters

    def adapt(
        self, part: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Translates a part's arguments to those of its replacement.

        Raises:
            Refused: not this call, with the reason.
        """
        if kwargs:
            raise Refused(f"is called with {', '.join(kwargs)}")
        return args

    def call(self, operator: str, *args: Any, **options: Any) -> Array:
        """Calls an operator by the implementation that the user chose."""
        found, wanted = find(operator), self.implementations.get(operator)
        name = found.choose(*args, implementation=wanted, **options)
        self._used[operator] = name
        return found(*args, implementation=name, **options)

    def implementations_text(self) -> str:
        """The operators with the implementations that were taken or are wanted."""
        taken = {**self.implementations, **self._used}
        return ", ".join(
            f"{name} by {taken.get(name, 'the first that takes the arguments')}"
            for name in self.operators
        )


_P = TypeVar("_P", bound=type[Policy])
_registered: list[type[Policy]] = []


def register_policy(policy: _P) -> _P:
    """Adds a policy to those that every injection uses; the newest is asked first.

    Raises:
        PolicyError: it is no policy.
        OperatorError: it names an operator that there is not.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise PolicyError(
            f"{policy!r} is no policy.",
            expected="a class derived from cfp.operators.inject.Policy",
            got=type(policy).__name__,
            attempt="class MyPolicy(Policy): with match and build",
        )
    for name in policy.operators:
        find(name)
    _registered.insert(0, policy)
    return policy


def unregister_policy(policy: type[Policy]) -> None:
    """Takes a policy out again."""
    _registered.remove(policy)


def policies_of(
    given: Sequence[type[Policy]] | None,
    implementations: Mapping[str, str] | None,
    right_padded: bool,
) -> list[Policy]:
    """The policies of an injection, by default the registered ones.

    Raises:
        OperatorError: there is no operator or implementation of a name.
    """
    implementations = dict(implementations or {})
    for name, implementation in implementations.items():
        find(name).check_implementation(implementation)
    kinds = _registered if given is None else given
    return [kind(implementations, right_padded) for kind in kinds]


def first_match(policies: Sequence[Policy], part: Any) -> Policy | None:
    """The policy that replaces a part; None if none does."""
    return next((policy for policy in policies if policy.match(part)), None)
