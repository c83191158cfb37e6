"""Operators: their arguments, oracles, and the functions of libraries.

An operator is called like a function. It checks its arguments against its named dims,
and takes the given implementation, or the first that does not refuse them. If all
refuse, one message has each reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array

from cfp.errors import CfpError, known_names


class Refused(Exception):
    """Arguments, a device or a part of a model that an implementation does not take."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator.

    Attributes:
        dims: names of its dims, such as "* h"; the star stands for any leading dims.
        kind: "float", or random integers: "below" (0 up to the dim `below`), "lengths"
            (1 up to the dim `below`), "groups" (sizes that add up to the dim `below`)
            or "key" (two words of a random key).
        below: name of a dim, see `kind`.
        around, spread: random floats are normal with this mean and deviation; the
            spreads "fan_in" and "fan_last" are one over the root of the last dim but
            one, and of the last.
    """

    name: str
    dims: str
    _: KW_ONLY
    kind: str = "float"
    below: str = ""
    around: float = 0.0
    spread: float | str = 1.0

    def deviation(self, shape: Sequence[int]) -> float:
        """The deviation of random floats of a shape."""
        if isinstance(self.spread, str):
            return shape[{"fan_in": -2, "fan_last": -1}[self.spread]] ** -0.5
        return self.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator and its implementations; call it like a function.

    Attributes:
        summary: its result, in one line.
        arguments: in the order of a call.
        oracle: the plain formula, for float32.
        implementations: functions by library, preferred ones first. They take the
            arguments and options, or raise `Refused`.
        flops: number of floating-point operations of contractions, forward, from sizes
            of dims by name; an operator without any is bound by memory.
        options: names and defaults of keyword options.
    """

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    oracle: Callable[..., Array]
    implementations: Mapping[str, Callable[..., Array]]
    flops: Callable[[Mapping[str, int]], float] = lambda dims: 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, *args: Any, implementation: str | None = None, **options: Any
    ) -> Array:
        """Computes the operator; see `by_first`."""
        return self.by_first(*args, implementation=implementation, **options)[1]

    def by_first(
        self, *args: Any, implementation: str | None = None, **options: Any
    ) -> tuple[str, Array]:
        """The name of the first implementation that takes a call, and its result.

        Args:
            args: see `arguments`.
            implementation: the name of the only one to ask.
            options: see `options`.

        Raises:
            CfpError: the arguments do not fit each other, or no implementation takes
                them.
        """
        names = [one.name for one in self.arguments]
        if len(args) != len(names):
            raise CfpError(
                f"{self.name} takes {len(names)} arguments, {', '.join(names)}: got "
                f"{len(args)}."
            )
        self.check_shapes(args)
        for name in options:
            known(f"option of {self.name}", name, self.options)
        if implementation:
            known(
                f"implementation of {self.name}", implementation, self.implementations
            )
        reasons = []
        for name in (implementation,) if implementation else self.implementations:
            try:
                call = self.implementations[name]
                return name, call(*args, **{**self.options, **options})
            except Refused as reason:
                reasons.append(f"{name} does not: {reason}")
        raise CfpError(
            f"No implementation of {self.name} takes these arguments. "
            f"{'; '.join(reasons)}."
        )

    def check_shapes(self, args: Sequence[Any]) -> None:
        """Checks the arguments' dims against the declared ones.

        Raises:
            CfpError: they contradict each other.
        """
        found: dict[str, Any] = {}
        for one, arg in zip(self.arguments, args, strict=True):
            names, sizes = one.dims.split(), list(jnp.shape(arg))
            known_sizes = (f"{n}={found[n]}" if n in found else n for n in names)
            message = (
                f"The {one.name} of {self.name} must be [{', '.join(known_sizes)}], "
                f"got {sizes}."
            )
            if names[0] == "*":
                leading = max(len(sizes) - len(names) + 1, 0)
                sizes = [tuple(sizes[:leading]), *sizes[leading:]]
            if len(sizes) != len(names):
                raise CfpError(message)
            for name, size in zip(names, sizes, strict=True):
                if size != (int(name) if name.isdigit() else found.get(name, size)):
                    raise CfpError(message)
                found[name] = size


def known(what: str, name: str, names: Iterable[str]) -> None:
    """Checks that a name is known.

    Raises:
        CfpError: the name is unknown.
    """
    if name not in (all_names := list(names)):
        there = known_names(name, all_names)
        raise CfpError(f"There is no {what} called {name!r}. {there}")
