"""Policies: the parts of a model to replace by operators, and the report of it.

A part is a module of flax (linen or NNX). For each the first policy that matches makes
the replacement. `cfp.operators.inject.parts` has policies for known parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jax import Array

from cfp.errors import CfpError
from cfp.operators import find


class Refused(Exception):
    """A part, or a call of it, that a policy matches but does not replace."""


class Policy(ABC):
    """The replacement of one kind of part.

    A policy is made once for an injection. It must not keep arrays: a replacement gets
    the part's parameters when it is called.

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

    @abstractmethod
    def match(self, part: Any) -> bool:
        """Returns True if the policy replaces parts like this one."""

    @abstractmethod
    def build(self, part: Any) -> Callable[..., Any]:
        """The replacement: a function of the part's parameters and arguments.

        Parameters are nested dicts of arrays. A call with arguments that the function
        does not have is the original's; so is one for which it raises `Refused`.

        Raises:
            Refused: not this part, with the reason.
        """

    def call(self, operator: str, *args: Any, **options: Any) -> Array:
        """Calls an operator by the implementation that the user chose."""
        found, wanted = find(operator), self.implementations.get(operator)
        name = found.choose(*args, implementation=wanted, **options)
        self._used[operator] = name
        return found(*args, implementation=name, **options)

    def __str__(self) -> str:
        """The operators with the implementations that were taken or are wanted."""
        taken = {**self.implementations, **self._used}
        return ", ".join(
            f"{name} by {taken.get(name, 'the first that takes the arguments')}"
            for name in self.operators
        )


_P = TypeVar("_P", bound=type[Policy])
registered: list[type[Policy]] = []


def register_policy(policy: _P) -> _P:
    """Adds a policy to those that every injection uses; the newest is asked first.

    Raises:
        CfpError: it is no policy.
        CfpError: it names an operator that there is not.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise CfpError(
            f"{policy!r} is no policy. Derive a class from "
            "cfp.operators.inject.Policy, with match and build."
        )
    for name in policy.operators:
        find(name)
    registered.insert(0, policy)
    return policy


def unregister_policy(policy: type[Policy]) -> None:
    """Takes a policy out again."""
    registered.remove(policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a model.

    Attributes:
        path: its place; empty for the model itself.
        kind: its class.
        policy: that matched; empty if none did.
        operators: its replacement, in words; empty if it has none.
        reason: why it was not replaced.
    """

    path: str
    kind: str
    policy: str
    operators: str
    reason: str


@dataclass(slots=True)
class Report:
    """The parts of a model, as far as they were seen.

    Parts of modules of linen are seen when the model is called.
    """

    strict: bool = False
    parts: dict[str, Part] = field(default_factory=dict)

    def add(self, path: str, part: Any, policy: Policy | None, why: str = "") -> None:
        """Notes a part that was replaced, or why it was not."""
        self.parts[path] = Part(
            path=path,
            kind=type(part).__name__,
            policy=type(policy).__name__ if policy else "",
            operators="" if why else str(policy),
            reason=why,
        )

    @property
    def replaced(self) -> list[Part]:
        """Parts that were replaced."""
        return [part for part in self.parts.values() if part.operators]

    @property
    def left(self) -> list[Part]:
        """Parts that were not."""
        return [part for part in self.parts.values() if not part.operators]

    def text(self) -> str:
        """A line for each part."""
        lines = [f"{len(self.replaced)} parts replaced, {len(self.left)} left"]
        for part in (*self.replaced, *self.left):
            now = f"{part.operators} [{part.policy}]"
            now = now if part.operators else f"left, {part.reason}"
            lines.append(f"{part.path or '.'} ({part.kind}): {now}")
        return "\n".join(lines)

    __str__ = text

    def check(self) -> None:
        """Checks that something was replaced, if the injection is strict.

        Raises:
            CfpError: nothing was.
        """
        if self.strict and not self.replaced:
            raise CfpError(
                "Nothing was replaced, since no policy matches a part: "
                f"{'; '.join(self.text().splitlines()[:6])}. Add a policy for this "
                "model with @register_policy, or pass strict=False."
            )
