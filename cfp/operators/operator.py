"""Operators: their arguments, oracles, and implementations.

An operator is called like a function. It checks its arguments against the named dims
that it declares, and takes the first implementation that is available and accepts them,
or the one that was asked for. If there is none, one message has each reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array

from cfp.errors import CfpError, known_names

# Why something is not available or not accepted; None if it is.
Reason = str | None


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


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operator.

    Attributes:
        library: that it comes from.
        call: takes the operator's arguments and options.
        refuses: takes the arguments and options, and says why it does not take them.
        probe: says why it is not available here.
    """

    library: str
    call: Callable[..., Array]
    refuses: Callable[..., Reason] = lambda *args, **options: None
    probe: Callable[[], Reason] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator and its implementations; call it like a function.

    Attributes:
        summary: the value that it computes, in one line.
        arguments: in the order in which they are given.
        oracle: the plain formula, which is given float32.
        implementations: by name, the preferred ones first.
        flops: from sizes of dims by name to floating point operations of contractions,
            forward; an operator without any is bound by memory.
        options: names and defaults of keyword options.
    """

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    oracle: Callable[..., Array]
    implementations: Mapping[str, Implementation]
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
            CfpError: the arguments do not fit each other, or no implementation
                takes them.
        """
        chosen = self.choose(*args, implementation=implementation, **options)
        return self.implementations[chosen].call(*args, **{**self.options, **options})

    def choose(
        self, *args: Any, implementation: str | None = None, **options: Any
    ) -> str:
        """The name of the implementation that a call with these arguments takes.

        Raises:
            CfpError: as for a call.
        """
        if len(args) != len(self.arguments):
            raise CfpError(
                f"{self.name} takes {len(self.arguments)} arguments "
                f"({', '.join(a.name for a in self.arguments)}), got {len(args)}. See "
                f"help(cfp.operators.{self.name})."
            )
        self.bind({a.name: x for a, x in zip(self.arguments, args, strict=True)})
        for name in options:
            known(f"option of {self.name}", name, self.options)
        if implementation:
            known(
                f"implementation of {self.name}", implementation, self.implementations
            )
        against: dict[str, str] = {}
        for name in (implementation,) if implementation else self.implementations:
            one = self.implementations[name]
            reason = one.probe() or one.refuses(*args, **{**self.options, **options})
            if reason is None:
                return name
            against[name] = reason
        raise CfpError(
            f"{self.name} by {implementation or 'any implementation'} does not take "
            f"{', '.join(f'{x.dtype}{list(x.shape)}' for x in args)}: "
            f"{'; '.join(f'{name}: {why}' for name, why in against.items())}. cfp "
            f"operators --list --only-run {self.name} lists what takes which."
        )

    def check_implementation(self, name: str) -> None:
        """Checks that there is an implementation of a name.

        Raises:
            CfpError: there is none.
        """
        known(f"implementation of {self.name}", name, self.implementations)

    def bind(self, given: Mapping[str, Any]) -> dict[str, int]:
        """Sizes of the dims by name, as some of the arguments have them.

        Args:
            given: arrays by names of arguments.

        Raises:
            CfpError: they contradict each other.
        """
        found: dict[str, Any] = {}
        for argument in self.arguments:
            if argument.name in given:
                self._bind(argument, jnp.shape(given[argument.name]), found)
        return {**found, "*": prod(found.get("*", ()))}

    def _bind(
        self, argument: Argument, shape: tuple[int, ...], found: dict[str, Any]
    ) -> None:
        names, sizes = argument.dims.split(), list(shape)
        if names[0] == "*":
            count = max(len(sizes) - len(names) + 1, 0)
            sizes = [tuple(sizes[:count]), *sizes[count:]]
        right = {n: int(n) if n.isdigit() else found.get(n) for n in names}
        if len(sizes) != len(names) or any(
            right[name] not in (None, size)
            for name, size in zip(names, sizes, strict=True)
        ):
            expected = ", ".join(
                name if size is None or name.isdigit() else f"{name}={size}"
                for name, size in right.items()
            )
            every = ", ".join(f"{a.name} [{a.dims}]" for a in self.arguments)
            raise CfpError(
                f"{argument.name} of {self.name} has shape {list(shape)}, not "
                f"[{expected}]. Pass arguments {every}."
            )
        found |= {n: s for n, s in zip(names, sizes, strict=True) if not n.isdigit()}


def known(what: str, name: str, names: Iterable[str]) -> None:
    """Checks that a name is among those that there are.

    Raises:
        CfpError: it is not.
    """
    names = list(names)
    if name in names:
        return
    raise CfpError(f"There is no {what} called {name!r}. {known_names(name, names)}")
