"""The shapes that operators are tried at, and random arguments of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from cfp.errors import compose
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
                compose(
                    f"{text!r} is no shape.",
                    expected="batch,seq,hidden,heads,vocab: five whole numbers above 0 "
                    "with hidden a multiple of heads",
                    got=repr(text),
                    attempt="--shapes 8,1024,1024,16,50257",
                )
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
            compose(
                f"{name!r} is no type that operators are tried in.",
                expected=" or ".join(FLOAT_TYPES),
                got=repr(name),
                attempt="--dtypes bfloat16",
            )
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
    operator: Operator, shape: Shape, dtype: str, seed: int = 0
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Random arguments, and a random cotangent of what the operator makes of them."""

    floats = [one for one in operator.arguments if one.kind == "float"]
    others = [one for one in operator.arguments if one.kind != "float"]
    out = output(operator, abstract(operator, shape, dtype))
    normals = sum(prod(sizes(one, shape)) for one in floats)
    words = sum(_words(one, shape) for one in others)

    def make(key: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
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

    return jax.jit(make)(jax.random.key(seed, impl="unsafe_rbg"))


def output(operator: Operator, args: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Shape and type of what an operator makes of some arguments."""
    return jax.eval_shape(lambda *a: operator.oracle(*a, **operator.options), *args)


def _words(argument: Argument, shape: Shape) -> int:
    """Returns the number of random words in an argument of integers."""
    if argument.kind == "groups":
        return shape.dims[argument.below]
    return prod(sizes(argument, shape))


def _integer(argument: Argument, shape: Shape, bits: jax.Array) -> jax.Array:
    wanted = sizes(argument, shape)
    if argument.kind == "key":
        return bits.reshape(wanted)
    if argument.kind == "groups":
        members = (bits % wanted[0]).astype(jnp.int32)
        return jnp.bincount(members, length=wanted[0]).astype(jnp.int32)
    found = (bits % shape.dims[argument.below]).astype(jnp.int32).reshape(wanted)
    return found + 1 if argument.kind == "lengths" else found


def _float(argument: Argument, shape: Shape, normal: jax.Array) -> jax.Array:
    wanted, spread = sizes(argument, shape), argument.spread
    if isinstance(spread, str):
        spread = wanted[{"fan_in": -2, "fan_last": -1}[spread]] ** -0.5
    return normal.reshape(wanted) * spread + argument.around
