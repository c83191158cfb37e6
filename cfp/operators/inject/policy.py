"""Policies: the parts of a model to replace by operators, and the report of it.

A part is a module of flax (linen or NNX). For each the first policy that matches makes
the replacement. `cfp.operators.inject.parts` has policies for known parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax import Array

from cfp.operators import find


@dataclass
class Policy(ABC):
    """The replacement of one kind of part.

    A policy is made once for an injection. It must not keep arrays: a replacement gets
    the part's parameters at its call.

    Attributes:
        implementations: names by operator; other operators take the first
            implementation that accepts the arguments.
        right_padded: True promises that padding masks of attention mask ends of
            sequences only.
        used: names of the called implementations, by operator.
    """

    implementations: Mapping[str, str]
    right_padded: bool = False
    used: dict[str, str] = field(default_factory=dict)

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
        wanted = self.implementations.get(operator)
        found = find(operator).by_first(*args, implementation=wanted, **options)
        self.used[operator], made = found
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a model.

    Attributes:
        kind: its class.
        policy: name of the matching policy, or "".
        operators: implementations of its last call, by operator.
        reason: reason against a replacement; "" if replaced.
    """

    kind: str
    policy: str
    operators: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The parts of a model by their paths, as far as they were seen.

    Parts of modules of linen are seen when the model is called.
    """

    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def replaced(self) -> list[Part]:
        """Parts that were replaced."""
        return [part for part in self.parts.values() if not part.reason]

    @property
    def left(self) -> list[Part]:
        """Parts that were not."""
        return [part for part in self.parts.values() if part.reason]

    def __str__(self) -> str:
        """Lists the parts, one a line, parts without a replacement last."""
        lines = [f"{len(self.replaced)} parts replaced, {len(self.left)} left"]
        for path, part in sorted(
            self.parts.items(), key=lambda one: one[1].reason != ""
        ):
            used = "".join(f", {name} by {one}" for name, one in part.operators.items())
            now = f"left, {part.reason}" if part.reason else f"{part.policy}{used}"
            lines.append(f"{path or '.'} ({part.kind}): {now}")
        return "\n".join(lines)
