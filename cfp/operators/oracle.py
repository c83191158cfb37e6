"""Comparison of an implementation with its oracle: outputs and gradients.

The oracle is the plain formula in float32, of the same arguments. What is compared are
relative differences: of norms, and of the largest element, which finds a single wrong
row. Gradients are taken of a random cotangent, so that no sum hides an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfp.operators.operator import Argument, Operator

# Of norms, by type. On GPUs products of float32 are computed in TF32, which has a
# mantissa of ten bits.
LIMITS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
TF32_LIMIT = 3e-3
# How much more the largest difference may be, as a part of the largest element.
_LARGEST = 4.0

Program = Callable[..., dict[str, jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Distance of an implementation from the oracle.

    Attributes:
        errors: relative differences of norms, by "output" and names of arguments.
        largest: the largest differences, as parts of the largest elements.
        limit: that the first may have; the second may have four times that.
    """

    errors: Mapping[str, float]
    largest: Mapping[str, float]
    limit: float

    @property
    def wrong(self) -> list[str]:
        """Names of what is too far off; a not-a-number is."""
        return [
            name
            for name, error in self.errors.items()
            if not (error <= self.limit and self.largest[name] <= _LARGEST * self.limit)
        ]

    @property
    def worst(self) -> float:
        """The largest relative difference."""
        return max(self.errors.values())

    def text(self) -> str:
        """The differences in words; empty if there are none."""
        return ", ".join(
            f"{name} is off by {self.errors[name]:.2g} of its norm and "
            f"{self.largest[name]:.2g} of its largest element (limits {self.limit:.2g} "
            f"and {_LARGEST * self.limit:.2g})"
            for name in self.wrong
        )


def is_float(argument: Argument) -> bool:
    """Returns True if an argument has a gradient."""
    return argument.kind == "float"


def program(
    operator: Operator,
    call: Callable[..., jax.Array],
    *,
    backward: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Program:
    """A function of arguments and cotangent to output and gradients, by name."""
    options = {**operator.options, **(options or {})}
    places = [i for i, one in enumerate(operator.arguments) if is_float(one)]

    def run(args: Sequence[jax.Array], cotangent: jax.Array) -> dict[str, jax.Array]:
        def of_floats(*floats: jax.Array) -> jax.Array:
            every = list(args)
            for place, value in zip(places, floats, strict=True):
                every[place] = value
            return call(*every, **options)

        floats = [args[i] for i in places]
        if not backward:
            return {"output": of_floats(*floats)}
        out, transpose = jax.vjp(of_floats, *floats)
        names = [operator.arguments[i].name for i in places]
        gradients = transpose(cotangent.astype(out.dtype))
        return {"output": out, **dict(zip(names, gradients, strict=True))}

    return run


def oracle_program(operator: Operator, *, backward: bool = True) -> Program:
    """The oracle as a function like the others; its arguments become float32."""
    inner = program(operator, operator.oracle, backward=backward)

    def run(args: Sequence[jax.Array], cotangent: jax.Array) -> dict[str, jax.Array]:
        wide = [
            x.astype(jnp.float32) if is_float(one) else x
            for x, one in zip(args, operator.arguments, strict=True)
        ]
        with jax.default_matmul_precision("highest"):
            return inner(wide, cotangent.astype(jnp.float32))

    return run


def limit_of(dtype: str, platform: str) -> float:
    """The limit of relative differences of norms."""
    return TF32_LIMIT if dtype == "float32" and platform == "gpu" else LIMITS[dtype]


def _distances(found: Any, right: Any, xp: Any) -> dict[str, tuple[Any, Any]]:
    """Relative differences, with numpy or what is like it."""
    distances = {}
    for name, value in found.items():
        other = xp.asarray(right[name])
        off = xp.asarray(value).astype(xp.float32) - other
        # Of what should be zero, the difference itself counts.
        size, most = xp.linalg.norm(other.ravel()), xp.max(xp.abs(other))
        distances[name] = (
            xp.linalg.norm(off.ravel()) / xp.where(size > 0, size, 1.0),
            xp.max(xp.abs(off)) / xp.where(most > 0, most, 1.0),
        )
    return distances


_on_device = jax.jit(functools.partial(_distances, xp=jnp))


def check(
    found: Mapping[str, jax.Array], right: Mapping[str, jax.Array], limit: float
) -> Check:
    """Compares what an implementation found with what the oracle did."""
    expected = {name: right[name] for name in found}
    if jax.default_backend() == "cpu":  # The arrays are numpy's, too: no compile.
        distances = _distances(jax.device_get(dict(found)), expected, np)
    else:
        distances = jax.device_get(_on_device(dict(found), expected))
    return Check(
        errors={name: float(pair[0]) for name, pair in distances.items()},
        largest={name: float(pair[1]) for name, pair in distances.items()},
        limit=limit,
    )
