"""Policy: base class of replacements of flax submodules by operators; and the report.

A part is a submodule (linen or NNX). The first policy that matches a part makes or
refuses its replacement. `cfp.operators.inject.parts` has the built-in policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax import Array

from cfp.operators import find
from cfp.printable import counted


@dataclass
class Policy(ABC):
    """The replacement of one kind of part.

    An injection makes one instance of each policy. An instance must not keep arrays:
    its replacement gets the part's parameters at each call.

    Attributes:
        implementations: {operator: the implementation to use}; other operators use the
            first that accepts the arguments.
        right_padded: True promises that attention masks only mask padding at the ends
            of sequences.
        used: {operator: implementation} in the latest call of a part.
    """

    implementations: Mapping[str, str]
    right_padded: bool = False
    used: dict[str, str] = field(default_factory=dict)

    @abstractmethod
    def match(self, part: Any) -> bool:
        """Returns True if the policy is for such parts; `build` may refuse one."""

    @abstractmethod
    def build(self, part: Any) -> Callable[..., Any]:
        """Returns the replacement: a function (parameters, *args, **kwargs) -> result.

        Called at the match and at each call. Parameters are nested dicts of arrays.
        If arguments do not fit, or the function raises `Refused`, the original runs.

        Raises:
            Refused: this part cannot be replaced; has the reason.
        """

    def call(self, operator: str, *args: Any, **options: Any) -> Array:
        """Returns an operator's result, fills `used`; CfpError if all refuse."""
        wanted = self.implementations.get(operator)
        found = find(operator).by_first(*args, implementation=wanted, **options)
        self.used[operator], made = found
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a model in the report.

    Attributes:
        kind: name of its class.
        policy: class name of the matching policy, or "".
        operators: implementations in its last replaced call, by operator; or {}.
        reason: why it, or its last call, was not replaced; "" if it was.
    """

    kind: str
    policy: str
    operators: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Parts of a model by path; parts of linen modules appear when they are called."""

    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def replaced(self) -> list[Part]:
        """Parts with a replacement that did not refuse their last call."""
        return [part for part in self.parts.values() if not part.reason]

    @property
    def left(self) -> list[Part]:
        """Parts without a replacement, or that refused their last call."""
        return [part for part in self.parts.values() if part.reason]

    def __str__(self) -> str:
        """Counts and lists the parts, one a line, replaced parts first."""
        replaced = counted(len(self.replaced), "part", "parts")
        lines = [f"{replaced} replaced, {len(self.left)} left"]
        for path, part in sorted(
            self.parts.items(), key=lambda one: one[1].reason != ""
        ):
            used = "".join(f", {name} by {one}" for name, one in part.operators.items())
            now = f"left, {part.reason}" if part.reason else f"{part.policy}{used}"
            lines.append(f"{path or '.'} ({part.kind}): {now}")
        return "\n".join(lines)
