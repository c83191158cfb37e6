"""Policies: the parts of a model to replace by operators.

A part is a module of flax (linen or NNX) or a jitted function with a name. For each the
first policy that matches makes the replacement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from cfp.errors import CfpError, compose
from cfp.operators.inventory import find

# A part's parameters: nested dicts of arrays.
Parameters = dict[str, Any]
# Takes the parameters of the replacement, and what `adapt` made of a call.
Replacement = Callable[..., Any]


class PolicyError(CfpError):
    """A policy that cannot be right, or an injection that replaced nothing."""


class Refused(Exception):
    """A part, or a call of it, that a policy matches but does not replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Options of a whole injection.

    Attributes:
        implementations: names by operator; the first that takes the arguments for the
            others.
        right_padded: whether masks of padding that are given to attention mask ends of
            sequences only.
    """

    implementations: Mapping[str, str] = field(default_factory=dict)
    right_padded: bool = False

    def __post_init__(self) -> None:
        for name, implementation in self.implementations.items():
            find(name).implementation(implementation)


class Policy(ABC):
    """The replacement of one kind of part.

    A policy is made once for an injection. It must not keep arrays: a replacement gets
    its parameters when it is called.

    Attributes:
        operators: names of the operators that it puts in.
        choices: of the user.
    """

    operators: tuple[str, ...] = ()

    def __init__(self, choices: Choices):
        self.choices = choices
        self.used: dict[str, str] = {}

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
        """The replacement's parameters from the part's; by default the same."""
        return parameters

    def to_original(self, parameters: Parameters) -> Parameters:
        """The part's parameters from the replacement's; by default the same."""
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

    def call(self, operator: str, *args: Any, **options: Any) -> jax.Array:
        """Calls an operator by the implementation that the user chose."""
        found = find(operator)
        wanted = self.choices.implementations.get(operator)
        chosen = found.choose(*args, implementation=wanted, **options)
        self.used[operator] = chosen.name
        return chosen.call(*args, **{**found.options, **options})

    def implementations_text(self) -> str:
        """The operators with the implementations that were taken or are wanted."""
        taken = {**self.choices.implementations, **self.used}
        return ", ".join(
            f"{name} by {taken.get(name, 'the first that takes the arguments')}"
            for name in self.operators
        )


_P = TypeVar("_P", bound=type[Policy])
_registered: list[type[Policy]] = []


def register_policy(policy: _P) -> _P:
    """Adds a policy to those that every injection uses; the newest is asked first.

    Raises:
        PolicyError: it is no policy, or names an operator that there is not.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise PolicyError(
            compose(
                f"{policy!r} is no policy.",
                expected="a class derived from cfp.operators.inject.Policy",
                got=type(policy).__name__,
                attempt="class MyPolicy(Policy): with match and build",
            )
        )
    for name in policy.operators:
        find(name)
    _registered.insert(0, policy)
    return policy


def unregister_policy(policy: type[Policy]) -> None:
    """Takes a policy out again."""
    _registered.remove(policy)


def registered() -> tuple[type[Policy], ...]:
    """All registered policies, in the order in which they are asked."""
    return tuple(_registered)


def paths(parameters: Parameters) -> dict[str, Any]:
    """Leaves by their paths, such as "query/kernel"."""
    found, _ = jax.tree_util.tree_flatten_with_path(parameters)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in found
    }


def check_mapping(policy: Policy, parameters: Parameters, where: str) -> None:
    """Sees that a policy maps all parameters there and back; computes nothing.

    Args:
        policy: maps them.
        parameters: of a part.
        where: the part's path, for the message.

    Raises:
        PolicyError: one is dropped, added, or comes back in another shape or type.
    """
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parameters
    )
    before = paths(abstract)
    try:
        there = jax.eval_shape(policy.to_injected, abstract)
        back = jax.eval_shape(policy.to_original, there)
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(
            compose(
                f"{policy.name} cannot map the parameters of {where}.",
                expected=", ".join(before),
                got=f"{type(error).__name__}: {error}",
                attempt="to_injected takes the part's parameters, to_original gives "
                "them back",
            )
        ) from error
    after = paths(back)
    lost = [
        name
        for name, leaf in before.items()
        if name not in after
        or (after[name].shape, after[name].dtype) != (leaf.shape, leaf.dtype)
    ]
    added = [name for name in after if name not in before]
    if lost or added:
        raise PolicyError(
            compose(
                f"{policy.name} "
                + (f"drops {', '.join(lost)}" if lost else f"adds {', '.join(added)}")
                + f" of {where}.",
                expected=f"to_original(to_injected(p)) has {_shapes(before)}",
                got=_shapes(after) or "nothing",
                attempt="map every parameter both ways, so that checkpoints can be "
                "loaded",
            )
        )


def _shapes(leaves: Mapping[str, Any]) -> str:
    return ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in leaves.items())


def first_match(policies: Sequence[Policy], part: Any) -> Policy | None:
    """The policy that replaces a part; None if none does."""
    return next((policy for policy in policies if policy.match(part)), None)
