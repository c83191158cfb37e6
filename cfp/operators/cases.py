"""Shapes and arguments that operators are tried at, and comparison with the oracle.

The oracle is the plain formula in float32, of the same arguments. What is compared are
relative differences: of norms, and of the largest element, which finds a single wrong
row. Gradients are taken of a random cotangent, so that no sum hides an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cfp.operators.operator import FLOAT_TYPES, Argument, Operator, OperatorError

EXPERTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that a model has; written as five numbers with commas between them."""

    batch: int
    seq: int
    hidden: int
    heads: int
    vocab: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads ``batch,seq,hidden,heads,vocab``.

        Raises:
            OperatorError: it is no shape.
        """
        try:
            numbers = [int(word) for word in text.strip("() ").split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 5 or min(numbers) < 1 or numbers[2] % numbers[3]:
            raise OperatorError(
                f"{text!r} is no shape.",
                expected="batch,seq,hidden,heads,vocab: five whole numbers above 0 "
                "with hidden a multiple of heads",
                got=repr(text),
                attempt="--shapes 8,1024,1024,16,50257",
            )
        batch, seq, hidden, heads, vocab = numbers
        return cls(batch=batch, seq=seq, hidden=hidden, heads=heads, vocab=vocab)

    def __str__(self) -> str:
        return f"{self.batch},{self.seq},{self.hidden},{self.heads},{self.vocab}"

    @property
    def dims(self) -> dict[str, int]:
        """Sizes by the names that operators give their dims."""
        return {
            "b": self.batch,
            "s": self.seq,
            "q": self.seq,
            "t": self.batch * self.seq,
            "*": self.batch * self.seq,
            "h": self.hidden,
            "n": self.heads,
            "d": self.hidden // self.heads,
            "f": 4 * self.hidden,
            "w": self.hidden,
            "e": min(EXPERTS, max(2, self.batch * self.seq // 8)),
            "v": self.vocab,
        }


def check_dtype(name: str) -> str:
    """A type that operators compute in.

    Raises:
        OperatorError: it is none.
    """
    if name not in FLOAT_TYPES:
        raise OperatorError(
            f"{name!r} is no type that operators are tried in.",
            expected=" or ".join(FLOAT_TYPES),
            got=repr(name),
            attempt="--dtypes bfloat16",
        )
    return name


def sizes(argument: Argument, shape: Shape) -> tuple[int, ...]:
    """The sizes of an argument's dims."""
    found: list[int] = []
    for name in argument.dims.split():
        if name == "*":
            found += [shape.batch, shape.seq]
        else:
            found.append(int(name) if name.isdigit() else shape.dims[name])
    return tuple(found)


def abstract(
    operator: Operator, shape: Shape, dtype: str
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and types of an operator's arguments."""
    types = {"float": dtype, "key": "uint32"}
    return tuple(
        jax.ShapeDtypeStruct(sizes(one, shape), types.get(one.kind, "int32"))
        for one in operator.arguments
    )


def sample(
    operator: Operator, shape: Shape, dtype: str
) -> tuple[tuple[Array, ...], Array]:
    """Random arguments, and a random cotangent of what the operator makes of them."""

    floats = [one for one in operator.arguments if one.kind == "float"]
    others = [one for one in operator.arguments if one.kind != "float"]
    out = output(operator, abstract(operator, shape, dtype))
    normals = sum(prod(sizes(one, shape)) for one in floats)
    words = sum(_words(one, shape) for one in others)

    def make(key: Array) -> tuple[tuple[Array, ...], Array]:
        # Drawn at once, and by this generator, what is random compiles soonest.
        one, other = jax.random.split(key)
        drawn = jax.random.normal(one, (normals + out.size,), jnp.float32)
        bits = jax.random.bits(other, (words,), jnp.uint32)
        args, done, used = [], 0, 0
        for argument in operator.arguments:
            if argument.kind == "float":
                size = prod(sizes(argument, shape))
                part = drawn[done : done + size]
                args.append(_float(argument, shape, part).astype(dtype))
                done += size
            else:
                count = _words(argument, shape)
                args.append(_integer(argument, shape, bits[used : used + count]))
                used += count
        return tuple(args), drawn[done:].reshape(out.shape).astype(out.dtype)

    return jax.jit(make)(jax.random.key(0, impl="unsafe_rbg"))


def output(operator: Operator, args: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Shape and type of what an operator makes of some arguments."""
    return jax.eval_shape(lambda *a: operator.oracle(*a, **operator.options), *args)


def _words(argument: Argument, shape: Shape) -> int:
    """Returns the number of random words in an argument of integers."""
    if argument.kind == "groups":
        return shape.dims[argument.below]
    return prod(sizes(argument, shape))


def _integer(argument: Argument, shape: Shape, bits: Array) -> Array:
    wanted = sizes(argument, shape)
    if argument.kind == "key":
        return bits.reshape(wanted)
    if argument.kind == "groups":
        members = (bits % wanted[0]).astype(jnp.int32)
        return jnp.bincount(members, length=wanted[0]).astype(jnp.int32)
    found = (bits % shape.dims[argument.below]).astype(jnp.int32).reshape(wanted)
    return found + 1 if argument.kind == "lengths" else found


def _float(argument: Argument, shape: Shape, normal: Array) -> Array:
    wanted = sizes(argument, shape)
    return normal.reshape(wanted) * argument.deviation(wanted) + argument.around


# Of norms, by type. On GPUs products of float32 are computed in TF32, which has a
# mantissa of ten bits.
LIMITS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
TF32_LIMIT = 3e-3
# How much more the largest difference may be, as a part of the largest element.
_LARGEST = 4.0

Program = Callable[..., dict[str, Array]]


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
    operator: Operator, call: Callable[..., Array], *, backward: bool = True
) -> Program:
    """A function of arguments and cotangent to output and gradients, by name."""
    places = [i for i, one in enumerate(operator.arguments) if is_float(one)]

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
    """The oracle as a function like the others; its arguments become float32."""
    inner = program(operator, operator.oracle, backward=backward)

    def run(args: Sequence[Array], cotangent: Array) -> dict[str, Array]:
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
    found: Mapping[str, Array], right: Mapping[str, Array], limit: float
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
