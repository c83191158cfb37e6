"""Elementwise ops as expressions that can be computed on other arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cfp.program.graph import numpy_dtype

# Leaves. A token's has an entry for each row, a vocabulary's one for each column;
# INSIDE tells for each row if it is one of those that a slice kept.
LOGITS, INDEX, TOKEN, VOCABULARY, SCALAR, INSIDE = (
    "logits",
    "index",
    "token",
    "vocabulary",
    "scalar",
    "inside",
)
CONSTANT = "constant"
CONVERT, COMPARE, SELECT = "convert", "compare", "select"

_DENSE = re.compile(r"dense<([^\[\]\">]+)>")


@dataclass(frozen=True, slots=True)
class Expr:
    """A value by what it is computed of.

    Attributes:
        kind: of a leaf, or an op's.
        dtype: element type as MLIR writes it.
        args: what an op takes.
        detail: a constant's value, or the direction of a comparison.
        number: a leaf's, among those that are read.
    """

    kind: str
    dtype: str
    args: tuple[Expr, ...] = ()
    detail: str = ""
    number: int = 0

    def walk(self) -> Iterator[Expr]:
        """All that it is made of, itself first."""
        yield self
        for one in self.args:
            yield from one.walk()

    def has(self, *kinds: str) -> bool:
        """True if leaves or ops of these kinds are in it."""
        return any(one.kind in kinds for one in self.walk())


def constant(text: str, dtype: str) -> Expr | None:
    """A constant whose elements are all alike, from its attributes."""
    match = _DENSE.match(text.strip())
    return Expr(CONSTANT, dtype, detail=match[1].strip()) if match else None


def is_constant(expr: Expr, number: float) -> bool:
    """True if an expression is this number, whatever it is converted to."""
    expr = stripped(expr)
    return expr.kind == CONSTANT and float(_value(expr.detail, expr.dtype)) == number


def stripped(expr: Expr) -> Expr:
    """An expression without conversions around it."""
    while expr.kind == CONVERT:
        expr = expr.args[0]
    return expr


@lru_cache(maxsize=4096)
def _value(detail: str, dtype: str) -> Any:
    kind = numpy_dtype(dtype)
    if detail in ("true", "false"):
        return np.asarray(detail == "true")
    if detail.startswith("0x"):
        bits = np.dtype(f"uint{8 * kind.itemsize}")
        return np.asarray(int(detail, 16), bits).view(kind)
    number = float(detail) if jnp.issubdtype(kind, jnp.floating) else int(detail)
    return np.asarray(number, kind)


def _compare(direction: str) -> Callable[..., jax.Array]:
    return {
        "EQ": lax.eq,
        "NE": lax.ne,
        "LT": lax.lt,
        "LE": lax.le,
        "GT": lax.gt,
        "GE": lax.ge,
    }[direction]


OPS: Mapping[str, Callable[..., jax.Array]] = {
    "add": lax.add,
    "subtract": lax.sub,
    "multiply": lax.mul,
    "divide": lax.div,
    "maximum": lax.max,
    "minimum": lax.min,
    "negate": lax.neg,
    "exponential": lax.exp,
    "exponential_minus_one": lax.expm1,
    "log": lax.log,
    "log_plus_one": lax.log1p,
    "logistic": lax.logistic,
    "tanh": lax.tanh,
    "sqrt": lax.sqrt,
    "rsqrt": lax.rsqrt,
    "abs": lax.abs,
    "sign": lax.sign,
    "square": lax.square,
    "is_finite": lax.is_finite,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "not": lax.bitwise_not,
}
KINDS = frozenset({*OPS, CONVERT, COMPARE, SELECT})


def evaluate(expr: Expr, known: Mapping[Expr, jax.Array]) -> jax.Array:
    """Computes an expression of what is known of its parts, leaves above all."""
    done: dict[Expr, jax.Array] = dict(known)

    def run(one: Expr) -> jax.Array:
        if one not in done:
            done[one] = _apply(one, [run(arg) for arg in one.args])
        return done[one]

    return run(expr)


def _apply(one: Expr, args: list[jax.Array]) -> jax.Array:
    if one.kind == CONSTANT:
        return jnp.asarray(_value(one.detail, one.dtype), numpy_dtype(one.dtype))
    if one.kind == CONVERT:
        return args[0].astype(numpy_dtype(one.dtype))
    args = list(jnp.broadcast_arrays(*args))
    if one.kind == COMPARE:
        return _compare(one.detail)(*args)
    if one.kind == SELECT:
        return lax.select(*args)
    return OPS[one.kind](*args)


def widened(expr: Expr, types: Mapping[str, str]) -> Expr:
    """The same in other element types."""
    args = tuple(widened(one, types) for one in expr.args)
    dtype = types.get(expr.dtype, expr.dtype)
    detail = expr.detail
    if expr.kind == CONSTANT and dtype != expr.dtype:
        detail = repr(float(_value(expr.detail, expr.dtype)))
    return Expr(expr.kind, dtype, args, detail, expr.number)
