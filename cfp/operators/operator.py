"""Operators: their arguments, oracles, and implementations.

An operator is called like a function. It checks its arguments against the named dims
that it declares, takes the first implementation that is available and takes them, or
the one that was asked for, and says in one message why if there is none.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array

from cfp.errors import CfpError

# What an implementation or a probe says against something; None if nothing.
Reason = str | None
FLOAT_TYPES = ("float32", "bfloat16", "float16")


class OperatorError(CfpError):
    """No such operator or implementation, or none that takes these arguments."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator.

    Attributes:
        dims: names of its dims, such as "* h"; the star stands for any leading dims.
        kind: "float", or what random integers are made of it: "below" (0 up to the dim
            `below`), "lengths" (1 up to the dim `below`), "groups" (sizes that add up
            to the dim `below`) or "key" (two words of a random key).
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


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operator.

    Attributes:
        name: unique within the operator.
        library: that it comes from.
        call: takes the operator's arguments and options.
        probe: says why it is not available here.
        refuses: takes the arguments and options, and says why it does not take them.
        differentiable: whether the library gives it a backward pass.
    """

    name: str
    library: str
    call: Callable[..., Array]
    _: KW_ONLY
    probe: Callable[[], Reason] = lambda: None
    refuses: Callable[..., Reason] = lambda *args, **options: None
    differentiable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator and its implementations; call it like a function.

    Attributes:
        summary: what it computes, in one line.
        arguments: in the order in which they are given.
        oracle: the plain formula, which is given float32.
        implementations: the ones to be preferred first.
        flops: from sizes of dims by name to floating point operations of contractions,
            forward; what has none is bound by memory.
        options: names and defaults of keyword options.
    """

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    oracle: Callable[..., Array]
    implementations: tuple[Implementation, ...]
    flops: Callable[[Mapping[str, int]], float] = lambda dims: 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, *args: Any, implementation: str | None = None, **options: Any
    ) -> Array:
        """Computes the operator.

        Args:
            args: see `arguments`.
            implementation: by name; the first that takes the arguments, if not given.
            options: see `options`.

        Raises:
            OperatorError: the arguments do not fit each other, or no implementation
                takes them.
        """
        return self.choose(*args, implementation=implementation, **options).call(
            *args, **{**self.options, **options}
        )

    def choose(
        self, *args: Any, implementation: str | None = None, **options: Any
    ) -> Implementation:
        """The implementation that a call with these arguments takes.

        Raises:
            OperatorError: as for a call.
        """
        self.dims_of(*args)
        self._check_options(options)
        wanted = (
            [self.implementation(implementation)]
            if implementation
            else list(self.implementations)
        )
        against: dict[str, str] = {}
        for one in wanted:
            reason = one.probe() or one.refuses(*args, **{**self.options, **options})
            if reason is None:
                return one
            against[one.name] = reason
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in args)
        raise OperatorError(
            f"No implementation of {self.name} takes these arguments."
            if implementation is None
            else f"{self.name} by {implementation} does not take these arguments.",
            expected="; ".join(f"{name}: {why}" for name, why in against.items()),
            got=shapes,
            attempt=f"cfp operators --list --only-run {self.name}",
        )

    def implementation(self, name: str) -> Implementation:
        """An implementation by its name.

        Raises:
            OperatorError: there is none of that name.
        """
        for one in self.implementations:
            if one.name == name:
                return one
        names = [one.name for one in self.implementations]
        raise unknown(f"implementation of {self.name}", name, names)

    def dims_of(self, *args: Any) -> dict[str, int]:
        """Sizes of the dims by name, as some arguments have them.

        Raises:
            OperatorError: there are too few or too many, or they contradict each other.
        """
        if len(args) != len(self.arguments):
            raise OperatorError(
                f"{self.name} takes {len(self.arguments)} arguments.",
                expected=", ".join(a.name for a in self.arguments),
                got=f"{len(args)} arguments",
                attempt=f"help(cfp.operators.{self.name})",
            )
        names = (argument.name for argument in self.arguments)
        return self.bind(dict(zip(names, args, strict=True)))

    def bind(self, given: Mapping[str, Any]) -> dict[str, int]:
        """Sizes of the dims by name, as some of the arguments have them.

        Args:
            given: arrays by names of arguments.

        Raises:
            OperatorError: they contradict each other.
        """
        found: dict[str, Any] = {}
        for argument in self.arguments:
            if argument.name in given:
                self._bind(argument, jnp.shape(given[argument.name]), found)
        leading = found.pop("*", ())
        return {**found, "*": prod(leading)}

    def _bind(
        self, argument: Argument, shape: tuple[int, ...], found: dict[str, Any]
    ) -> None:
        names, sizes = argument.dims.split(), list(shape)
        if names[:1] == ["*"]:
            count = len(sizes) - len(names) + 1
            sizes = [tuple(sizes[: max(count, 0)]), *sizes[max(count, 0) :]]
        known = {
            name: int(name) if name.isdigit() else found.get(name) for name in names
        }
        fits = len(sizes) == len(names) and all(
            known[name] in (None, size) for name, size in zip(names, sizes, strict=True)
        )
        if not fits:
            expected = ", ".join(
                name if size is None or name.isdigit() else f"{name}={size}"
                for name, size in known.items()
            )
            raise OperatorError(
                f"The shapes of the arguments of {self.name} do not fit.",
                expected=f"{argument.name} [{expected}]",
                got=f"{list(shape)}",
                attempt="arguments "
                + ", ".join(f"{a.name} [{a.dims}]" for a in self.arguments),
            )
        found |= {n: s for n, s in zip(names, sizes, strict=True) if not n.isdigit()}

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in self.options:
                raise unknown(f"option of {self.name}", name, list(self.options))


def unknown(what: str, name: str, known: list[str]) -> OperatorError:
    """The error for a name that there is not."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return OperatorError(
        f"There is no {what} called {name!r}.",
        expected="one of " + ", ".join(known) if known else "none: it takes none",
        got=repr(name),
        attempt=near[0] if near else "cfp operators --list",
    )
