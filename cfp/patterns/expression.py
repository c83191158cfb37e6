"""Elementwise ops as expressions that can be computed on other arrays.

A program may have logits as [tokens, words], [words, tokens], with the tokens' dims in
any order, merged, split, or cut. Everything is computed with one row for each token, in
the order that the logits' own dims have; `Dims` describes how an array has these rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cfp.program.graph import DIRECTION, Op, numpy_dtype
from cfp.program.replace import Different

A = TypeVar("A", jax.Array, np.ndarray)
Axes = tuple[str, ...]
# Of tokens' dims that have not all tokens: (dim, first token, end).
Cut = tuple[tuple[int, int, int], ...]
# In the place of a tokens' dim: the words, or what is contracted to make logits.
OTHER = -1


class Split(Exception):
    """A tokens' dim that has to be two."""

    def __init__(self, dim: int, sizes: tuple[int, int]):
        super().__init__(f"tokens' dim {dim} is two of sizes {sizes}")
        self.dim, self.sizes = dim, sizes


@dataclass(frozen=True, slots=True)
class Dims:
    """The tokens' dims that the dims of an array consist of.

    Attributes:
        of: for each dim of the array, the tokens' dims that it merges, in row-major
            order; none of a dim of size one. OTHER stands alone.
        cut: the tokens that it has, if these are not all.
    """

    of: tuple[tuple[int, ...], ...]
    cut: Cut = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens' dims that an array has."""
        return tuple(one for dim in self.of for one in dim if one != OTHER)

    @property
    def place(self) -> int | None:
        """The dim that is none of the tokens', if there is one."""
        return self.of.index((OTHER,)) if (OTHER,) in self.of else None

    def sizes(self, tokens: Sequence[int]) -> dict[int, int]:
        """The sizes of the tokens' dims in an array, which may be cut."""
        found = dict(enumerate(tokens))
        return found | {dim: end - first for dim, first, end in self.cut}

    def picked(self, dims: Sequence[int]) -> Dims:
        """The dims of an array that has some of these dims, in an order."""
        return self.made_of([self.of[dim] for dim in dims])

    def made_of(self, of: Sequence[tuple[int, ...]]) -> Dims:
        """Other dims of the same tokens."""
        there = {one for dim in of for one in dim}
        return Dims(tuple(of), tuple(one for one in self.cut if one[0] in there))

    def reshaped(
        self, before: Sequence[int], after: Sequence[int], tokens: Sequence[int]
    ) -> Dims:
        """The dims of an array after a reshape.

        Args:
            before: shape of the array that has these dims.
            after: shape of the other.

        Raises:
            Split: a tokens' dim is two of the other array.
            Different: a dim of the other array is part of what is no tokens' dim, or
                several of which one is none.
        """
        sizes = self.sizes(tokens)
        waiting = [
            (one, sizes.get(one, size))
            for dim, size in zip(self.of, before, strict=True)
            for one in dim
        ]
        waiting.reverse()
        of: list[tuple[int, ...]] = []
        for size in after:
            dim: list[int] = []
            while size > 1:
                one, own = waiting.pop()
                if size % own:
                    if one == OTHER or own % size or one in {c[0] for c in self.cut}:
                        raise Different("a reshape mixes words or tokens")
                    raise Split(one, (size, own // size))
                dim.append(one)
                size //= own
            if OTHER in dim and len(dim) > 1:
                raise Different("a reshape mixes words and tokens")
            of.append(tuple(dim))
        return self.made_of(of)

    def axes(
        self, tokens: Sequence[int], spread: Sequence[Axes], sizes: Mapping[str, int]
    ) -> list[Axes]:
        """The mesh axes of each dim of an array; none for OTHER.

        Args:
            spread: axes of each of them.

        Raises:
            ValueError: a dim merges a spread tokens' dim behind another one, or it is
                cut.
        """
        if not any(spread):
            return [()] * len(self.of)
        if any(spread[dim] for dim, _, _ in self.cut):
            raise ValueError("a tokens' dim that is spread is cut")
        found: list[Axes] = []
        for dim in self.of:
            own: Axes = ()
            whole = False
            for one in dim:
                axes = spread[one] if one != OTHER else ()
                if axes and whole:
                    raise ValueError("the tokens' dims are not kept apart")
                own += axes
                whole |= one != OTHER and tokens[one] > prod(sizes[a] for a in axes)
            found.append(own)
        return found

    def resized(self, sizes: Mapping[int, int]) -> Dims:
        """The same of fewer tokens."""
        return replace(self, cut=resized_cut(self.cut, sizes))


NO_DIMS = Dims(())


def resized_cut(cut: Cut, sizes: Mapping[int, int]) -> Cut:
    """Cuts of fewer tokens: one is left before those that are there."""
    return tuple(
        (dim, min(first, 1), min(first, 1) + sizes[end - first])
        for dim, first, end in cut
    )


def to_rows(array: A, dims: Dims, tokens: Sequence[int]) -> A:
    """Arranges an array as one row for each token.

    Args:
        array: of some tokens' dims; others are as if it had been broadcast.
        tokens: local sizes of the tokens' dims.

    Returns:
        [tokens, n], n being the size of the OTHER dim, or 1. What is cut off is zero.
    """
    xp: Any = np if isinstance(array, np.ndarray) else jnp
    sizes = dims.sizes(tokens)
    shape = [
        sizes.get(one, size)
        for dim, size in zip(dims.of, array.shape, strict=True)
        for one in dim
    ]
    order = [one for dim in dims.of for one in dim]
    last = [order.index(OTHER)] if OTHER in order else []
    kept = sorted(one for one in order if one != OTHER)
    found = array.reshape(shape)
    found = found.transpose([*(order.index(one) for one in kept), *last])
    width = found.shape[-1] if last else 1
    found = found.reshape([sizes[d] if d in kept else 1 for d in sizes] + [width])
    ends = {dim: (first, tokens[dim] - end) for dim, first, end in dims.cut}
    found = xp.pad(found, [*(ends.get(d, (0, 0)) for d in sizes), (0, 0)])
    return xp.broadcast_to(found, (*tokens, width)).reshape(prod(tokens), width)


def from_rows(rows: A, dims: Dims, tokens: Sequence[int], shape: Sequence[int]) -> A:
    """Arranges rows as an array; the reverse of `to_rows`.

    Args:
        rows: [tokens, n].
        dims: of the array. Tokens' dims that it does not have are summed over.
        tokens: local sizes of the tokens' dims.
        shape: local shape of the array.
    """
    found: Any = rows.reshape(*tokens, rows.shape[-1])
    kept = {dim: slice(first, end) for dim, first, end in dims.cut}
    found = found[tuple(kept.get(d, slice(None)) for d in range(len(tokens)))]
    missing = tuple(d for d in range(len(tokens)) if d not in dims.tokens)
    found = found.sum(missing, keepdims=True) if missing else found
    order = [one if one != OTHER else len(tokens) for dim in dims.of for one in dim]
    rest = [d for d in range(found.ndim) if d not in order]
    return found.transpose([*order, *rest]).reshape(tuple(shape))


def inside(cut: Cut, tokens: Sequence[int]) -> jax.Array:
    """[tokens, 1]: true for tokens that are not cut off."""
    found = jnp.ones(tuple(tokens), bool)
    for dim, first, end in cut:
        place = jax.lax.broadcasted_iota(jnp.int32, tuple(tokens), dim)
        found &= (place >= first) & (place < end)
    return found.reshape(-1, 1)


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

    def cast(self, dtype: str) -> Expr:
        """The same in a type, converted unless it has it."""
        return self if self.dtype == dtype else Expr(CONVERT, dtype, (self,))


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


_COMPARE: Mapping[str, Callable[..., jax.Array]] = {
    "EQ": lax.eq,
    "NE": lax.ne,
    "LT": lax.lt,
    "LE": lax.le,
    "GT": lax.gt,
    "GE": lax.ge,
}
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
        return _COMPARE[one.detail](*args)
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


def at_label(expr: Expr) -> tuple[Expr, Expr] | None:
    """The label, and what stands there, of what is zero at all other words."""
    kind, args = expr.kind, expr.args
    if kind == COMPARE and expr.detail == "EQ":
        label = _label(args)
        return (label, Expr("constant", "i1", detail="true")) if label else None
    if kind == SELECT and is_constant(args[2], 0.0) and args[0].kind == COMPARE:
        found = at_label(args[0])
        return (found[0], args[1]) if found else None
    if kind in (CONVERT, "negate"):
        found = at_label(args[0])
        if found is None:
            return None
        return found[0], Expr(kind, expr.dtype, (found[1],), expr.detail)
    if kind in ("multiply", "divide"):
        for place in (0, 1) if kind == "multiply" else (0,):
            if (found := at_label(args[place])) is not None:
                parts = list(args)
                parts[place] = found[1]
                return found[0], Expr(kind, expr.dtype, tuple(parts))
    return None


def _label(args: Sequence[Expr]) -> Expr | None:
    one, other = (stripped(arg) for arg in args)
    if one.kind == TOKEN:
        one, other = other, one
    return other if one.kind == INDEX and other.kind == TOKEN else None


_OF_WORDS = (LOGITS, INDEX, VOCABULARY)


def is_exponential(expr: Expr, base: Expr) -> bool:
    """True if it grows by exp(d) where the base grows by d."""
    kind, args = expr.kind, expr.args
    if kind in (CONVERT, "negate"):
        return is_exponential(args[0], base)
    if kind == "multiply":
        return any(
            is_exponential(args[i], base) and not args[1 - i].has(*_OF_WORDS)
            for i in (0, 1)
        )
    if kind == "divide":
        return is_exponential(args[0], base) and not args[1].has(*_OF_WORDS)
    return kind == "exponential" and _is_shifted(args[0], base)


def _is_shifted(expr: Expr, base: Expr) -> bool:
    """True if it is the base plus something of the token."""
    if stripped(expr) == base or expr == base:
        return True
    kind, args = expr.kind, expr.args
    if kind == CONVERT:
        return _is_shifted(args[0], base)
    per_token = [not arg.has(*_OF_WORDS) for arg in args]
    if kind == "subtract":
        return _is_shifted(args[0], base) and per_token[1]
    if kind == "add":
        return any(_is_shifted(args[i], base) and per_token[1 - i] for i in (0, 1))
    return False


# --------------------------------------------------- attributes of ops, from their text

_IN_BODY = re.compile(r"(%\d+):\S+=stablehlo\.(\w+)\(([^;)]*)")
# The body of an argmax of values %0, %2 at places %1, %3, as JAX writes it.
_ARGMAX = (
    ("compare", "%0,%2", "GT"),
    ("compare", "%0,%0", "NE"),
    ("or", "%4,%5", ""),
    ("compare", "%0,%2", "EQ"),
    ("compare", "%1,%3", "LT"),
    ("and", "%7,%8", ""),
    ("or", "%6,%9", ""),
    ("select", "%6,%0,%2", ""),
    ("select", "%10,%1,%3", ""),
)


def is_argmax(op: Op) -> bool:
    """True for the reduction of values and places to the place of the largest."""
    _, _, body = op.attributes.partition("body=")
    directions = iter(DIRECTION.findall(body))
    found = [
        (kind, operands, next(directions, "") if kind == COMPARE else "")
        for _, kind, operands in _IN_BODY.findall(body)
    ]
    ends = body.rpartition("stablehlo.return(")[2]
    return tuple(found) == _ARGMAX and ends.startswith("%11,%12")
