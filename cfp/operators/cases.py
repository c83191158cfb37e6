"""Shapes and random arguments to test operators with, and comparison with the oracle.

The oracle is the plain formula in float32, with the same arguments. Two ratios to the
oracle's result are limited: of the difference's norm, and of its largest element. The
second finds a single wrong row. Gradients are for a random cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cfp.errors import CfpError
from cfp.operators.operator import Argument, Operator, Refused

EXPERTS = 8
# Relative differences of norms, by type. On GPUs products of float32 are computed in
# TF32, which has a mantissa of ten bits.
LIMITS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
TF32_LIMIT = 3e-3
# Limits of the largest difference, relative to the largest element, are 4 times these.
_LARGEST = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model; its text is ``batch,seq,hidden,heads,vocab``."""

    batch: int
    seq: int
    hidden: int
    heads: int
    vocab: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads ``batch,seq,hidden,heads,vocab``.

        Raises:
            CfpError: the text is not five positive integers, or heads do not divide
                hidden.
        """
        try:
            numbers = [int(word) for word in text.strip("() ").split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 5 or min(numbers) < 1 or numbers[2] % numbers[3]:
            raise CfpError(
                f"{text!r} is no shape: give batch,seq,hidden,heads,vocab, five whole "
                "numbers above 0, with hidden a multiple of heads."
            )
        names = ("batch", "seq", "hidden", "heads", "vocab")
        return cls(**dict(zip(names, numbers, strict=True)))

    def __str__(self) -> str:
        return f"{self.batch},{self.seq},{self.hidden},{self.heads},{self.vocab}"

    @property
    def dims(self) -> dict[str, int]:
        """Sizes by the dim names in `Argument.dims`."""
        tokens = self.batch * self.seq
        return {
            "b": self.batch,
            "s": self.seq,
            "q": self.seq,
            "t": tokens,
            "*": tokens,
            "h": self.hidden,
            "n": self.heads,
            "d": self.hidden // self.heads,
            "f": 4 * self.hidden,
            "w": self.hidden,
            "e": min(EXPERTS, max(2, tokens // 8)),
            "v": self.vocab,
        }

    def of(self, argument: Argument) -> tuple[int, ...]:
        """An argument's shape; the star becomes two dims, batch and seq."""
        dims = argument.dims.replace("*", "b s").split()
        return tuple(int(dim) if dim.isdigit() else self.dims[dim] for dim in dims)


def abstract(
    operator: Operator, shape: Shape, dtype: str
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and types of an operator's arguments."""
    types = {"float": dtype, "key": "uint32"}
    return tuple(
        jax.ShapeDtypeStruct(shape.of(one), types.get(one.kind, "int32"))
        for one in operator.arguments
    )


def refusal(operator: Operator, name: str, shape: Shape, dtype: str) -> str:
    """Reason why an implementation refuses this shape and type; "" if it accepts."""
    call = partial(operator.implementations[name], **operator.options)
    try:
        jax.eval_shape(call, *abstract(operator, shape, dtype))
    except Refused as reason:
        return str(reason)
    return ""


def output(operator: Operator, args: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Returns shape and type of an operator's result for some arguments."""
    return jax.eval_shape(partial(operator.oracle, **operator.options), *args)


def sample(
    operator: Operator, shape: Shape, dtype: str
) -> tuple[tuple[Array, ...], Array]:
    """Makes random arguments and a cotangent of the result, the same in each call."""
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 20))
    args = [
        _random(next(keys), one, shape, like.dtype)
        for one, like in zip(
            operator.arguments, abstract(operator, shape, dtype), strict=True
        )
    ]
    out = output(operator, args)
    return tuple(args), jax.random.normal(next(keys), out.shape, out.dtype)


def _random(key: Array, argument: Argument, shape: Shape, dtype: Any) -> Array:
    wanted = shape.of(argument)
    below = shape.dims.get(argument.below, 0)
    if argument.kind == "key":
        return jax.random.bits(key, wanted, dtype)
    if argument.kind == "groups":
        members = jax.random.randint(key, (below,), 0, wanted[0])
        return jnp.bincount(members, length=wanted[0]).astype(dtype)
    if argument.kind != "float":
        least = int(argument.kind == "lengths")
        return jax.random.randint(key, wanted, least, below + least, dtype)
    normal = jax.random.normal(key, wanted, jnp.float32)
    return (normal * argument.deviation(wanted) + argument.around).astype(dtype)


Program = Callable[..., dict[str, Array]]


def program(
    operator: Operator, call: Callable[..., Array], *, backward: bool = True
) -> Program:
    """Function (args, cotangent) -> {"output": y}; `backward` adds {argument: grad}."""
    places = [i for i, one in enumerate(operator.arguments) if one.kind == "float"]

    def run(args: Sequence[Array], cotangent: Array) -> dict[str, Array]:
        def of_floats(*floats: Array) -> Array:
            every = list(args)
            for place, value in zip(places, floats, strict=True):
                every[place] = value
            return call(*every, **operator.options)

        floats = [args[i] for i in places]
        if not backward:
            return {"output": of_floats(*floats)}
        out, transpose = jax.vjp(of_floats, *floats)
        names = [operator.arguments[i].name for i in places]
        gradients = transpose(cotangent.astype(out.dtype))
        return {"output": out, **dict(zip(names, gradients, strict=True))}

    return run


def oracle_program(operator: Operator, *, backward: bool = True) -> Program:
    """Returns the `program` of the oracle, in float32 without TF32."""
    inner = program(operator, operator.oracle, backward=backward)

    def run(args: Sequence[Array], cotangent: Array) -> dict[str, Array]:
        wide = [
            x.astype(jnp.float32) if one.kind == "float" else x
            for x, one in zip(args, operator.arguments, strict=True)
        ]
        with jax.default_matmul_precision("highest"):
            return inner(wide, cotangent.astype(jnp.float32))

    return run


def limit_of(dtype: str, platform: str) -> float:
    """Largest allowed norm of a difference, relative to that of the oracle's result."""
    return TF32_LIMIT if dtype == "float32" and platform == "gpu" else LIMITS[dtype]


def compare(
    found: Mapping[str, Array], right: Mapping[str, Array], limit: float
) -> tuple[dict[str, float], str]:
    """Compares the results `found` of an implementation with the oracle's, `right`.

    Args:
        limit: largest allowed norm of the difference, relative to that of `right`. An
            element may differ by four times the limit, relative to the largest element.

    Returns:
        These relative norms by name, and a message about results that exceed a limit or
        are NaN ("" if all are right).
    """
    errors, wrong = {}, []
    for name, value in found.items():
        other = np.asarray(right[name])
        off = np.asarray(value).astype(np.float32) - other
        # If the oracle's result is all zero, the differences are absolute.
        error = float(np.linalg.norm(off) / (np.linalg.norm(other) or 1.0))
        largest = float(np.abs(off).max() / (np.abs(other).max() or 1.0))
        errors[name] = error
        if not (error <= limit and largest <= _LARGEST * limit):
            wrong.append(
                f"{name} is off by {error:.2g} of its norm and {largest:.2g} of its "
                f"largest element (limits {limit:.2g} and {_LARGEST * limit:.2g})"
            )
    return errors, ", ".join(wrong)
