"""Runs a function on parts of its operands, and compares with the whole.

Two properties are tested for dims that might be one factor. *Parts*: what the function
makes of the parts, put together, is what it makes of the whole, for several inputs,
numbers of parts and sizes. *Independence*: a part's results stay the same bit by bit,
whatever the other parts hold: other numbers, huge and tiny ones, zeros, NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfp.discovery.rule import OpDim
from cfp.errors import CfpError, summary_of

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

# Inputs of the comparison of parts with the whole; "example" is what the user gave.
_KINDS = ("example", "normal", "resampled", "scaled")
# What the other parts are replaced by, and zeros of all that is split.
_OTHERS = ("normal", "resampled", "huge", "tiny", "zeros", "nan")
# Rounding that is allowed, in units of the last place of the largest number of a part:
# so much may change where sums run in another order, in float32 and in less.
_ULPS = 64.0
_LOW_ULPS = 4.0
# Of both signs in exponents, so that squares are still numbers.
_SCALE = 0.45


class Differs(Exception):
    """Dims are not one factor; the text says what differed."""


@dataclass(frozen=True, slots=True)
class Role:
    """Relation of a result to its parts: joined along a dim, the same, or summed.

    Attributes:
        dim: along which the parts' results stand behind each other; None if along none.
        is_sum: whether they add up.
    """

    dim: int | None = None
    is_sum: bool = False


class Probe:
    """A function and examples of its operands.

    Args:
        fn: of arrays, giving a tuple of arrays.
        avals: types of the operands.
        examples: values of the operands; None for those of which only types are known.
        names: of the operands, for messages.

    Attributes:
        runs: how often the function was run.
        shapes: combinations of shapes for which it was compiled.
        largest_error: as of :class:`cfp.discovery.rule.Evidence`.
        results: types of its results for the examples' shapes.
    """

    def __init__(
        self,
        fn: Callable[..., tuple[Any, ...]],
        avals: Sequence[jax.ShapeDtypeStruct],
        examples: Sequence[Array | None],
        names: Sequence[str],
        seed: int,
    ) -> None:
        self._fn = jax.jit(fn)
        self.avals = tuple(avals)
        self._examples = tuple(examples)
        self.names = tuple(names)
        self._random = np.random.default_rng(seed)
        self.runs = 0
        self.shapes: set[tuple[Shape, ...]] = set()
        self.largest_error = 0.0
        self.results = self.made_from([aval.shape for aval in avals])
        low = [_epsilon(aval.dtype) for aval in avals]
        self._low = max(
            (eps for eps in low if eps > _epsilon(jnp.float32)), default=0.0
        )

    # ------------------------------------------------------------------------ running

    def made_from(self, shapes: Sequence[Shape]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the results for operands of these shapes; nothing runs."""
        avals = [
            jax.ShapeDtypeStruct(shape, aval.dtype)
            for shape, aval in zip(shapes, self.avals, strict=True)
        ]
        return tuple(
            jax.ShapeDtypeStruct(one.shape, one.dtype)
            for one in jax.eval_shape(self._fn, *avals)
        )

    def run(self, operands: Sequence[Array]) -> tuple[Array, ...]:
        """Runs the function."""
        self.runs += 1
        self.shapes.add(tuple(one.shape for one in operands))
        return tuple(np.asarray(one) for one in self._fn(*operands))

    # ------------------------------------------------------------------------- inputs

    def inputs(self, kind: str, shapes: Sequence[Shape]) -> list[Array]:
        """Makes operands of some shapes."""
        return [self.operand(n, kind, shape) for n, shape in enumerate(shapes)]

    def operand(self, number: int, kind: str, shape: Shape) -> Array:
        """Makes one operand. Integers and booleans are drawn from the example."""
        example, dtype = self._examples[number], self.avals[number].dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            if kind == "zeros":
                return np.zeros(shape, dtype)
            if kind == "nan":
                return np.full(shape, np.nan, dtype)
            if example is None or kind in ("normal", "scaled", "huge", "tiny"):
                made = self._random.standard_normal(shape)
                if kind in ("huge", "tiny"):
                    most = math.log10(float(jnp.finfo(dtype).max))
                    made *= 10.0 ** ((1 if kind == "huge" else -1) * _SCALE * most)
                return np.asarray(made).astype(dtype)
        assert example is not None, "integers come with an example"
        if kind == "example":
            at = [np.arange(n) % m for n, m in zip(shape, example.shape, strict=True)]
            return example[np.ix_(*at)] if shape else example
        if example.size == 0:
            return np.zeros(shape, dtype)
        drawn = self._random.choice(example.reshape(-1), shape)
        if jnp.issubdtype(dtype, jnp.inexact) and np.all(example == example.flat[0]):
            drawn = drawn * self._random.uniform(0.5, 1.5, shape)
        return np.asarray(drawn).astype(dtype)

    # -------------------------------------------------------------------------- links

    def changed(self, place: OpDim, ways: int) -> list[list[list[set[int]]]]:
        """Looks what changes with each part of one dim of one operand.

        Returns:
            For each part, for each result, for each of its dims: the parts that change;
            none of a dim that the number of parts does not divide.
        """
        number, dim = place
        shapes = [aval.shape for aval in self.avals]
        found = [
            [[set() for _ in one.shape] for one in self.results] for _ in range(ways)
        ]
        for kind in ("normal", "resampled"):
            operands = self.inputs(kind, shapes)
            before = self.run(operands)
            for part in range(ways):
                other = operands[number].copy()
                here = _part(other, dim, ways, part)
                here[...] = self.operand(number, kind, here.shape)
                after = self.run([*operands[:number], other, *operands[number + 1 :]])
                for result, (a, b) in enumerate(zip(before, after, strict=True)):
                    differs = ~_same(a, b)
                    for at in range(a.ndim):
                        if a.shape[at] % ways == 0:
                            found[part][result][at] |= {
                                i
                                for i in range(ways)
                                if _part(differs, at, ways, i).any()
                            }
        return found

    # -------------------------------------------------------------------------- parts

    def check(
        self, dims: Sequence[OpDim], ways: int, shapes: Sequence[Shape]
    ) -> tuple[Role, ...]:
        """Tests that dims of operands are one factor.

        Args:
            dims: at most one of each operand.
            ways: into how many parts they are split.

        Returns:
            For each result its relation to the parts.

        Raises:
            Differs: they are not.
        """
        of = dict(dims)
        parts = parts_of(shapes, dims, ways)
        try:
            whole_types, part_types = self.made_from(shapes), self.made_from(parts)
        except Exception as error:  # Functions raise whatever they like.
            raise Differs(f"refused for {ways} parts ({summary_of(error)})") from error
        joins = [
            _joined(*both, ways) for both in zip(whole_types, part_types, strict=True)
        ]
        may = [{"same", "sum"} for _ in joins]
        is_number = [False] * len(joins)
        for kind in (*_KINDS, "zeros"):
            operands = self.inputs("normal" if kind == "zeros" else kind, shapes)
            for number, dim in dims:
                if kind == "zeros":
                    operands[number] = self.operand(number, kind, shapes[number])
                elif kind == "scaled":
                    operands[number] = self._scaled(operands[number], dim, ways)
            split = [
                [
                    _part(one, of[t], ways, part) if t in of else one
                    for t, one in enumerate(operands)
                ]
                for part in range(ways)
            ]
            whole = self._ran(operands)
            made = [self._ran(one) for one in split]
            for number, join in enumerate(joins):
                is_number[number] |= bool(np.isfinite(_wide(whole[number])).any())
                pieces = [one[number] for one in made]
                if join is not None:
                    self._compare_joined(number, whole[number], pieces, join)
                else:
                    self._compare_others(number, whole[number], pieces, may[number])
        if missing := [number for number, is_any in enumerate(is_number) if not is_any]:
            raise Differs(
                f"result {missing[0]} is no number for any input that was tried"
            )
        roles = tuple(
            Role(dim=join) if join is not None else Role(is_sum="same" not in left)
            for join, left in zip(joins, may, strict=True)
        )
        self._check_independence(dims, ways, shapes, roles)
        return roles

    def _ran(self, operands: Sequence[Array]) -> tuple[Array, ...]:
        try:
            return self.run(operands)
        except Exception as error:  # Kernels fail in many ways.
            shapes = ", ".join(str(one.shape) for one in operands)
            raise Differs(
                f"it fails on operands of {shapes} ({summary_of(error)})"
            ) from error

    def _scaled(self, operand: Array, dim: int, ways: int) -> Array:
        """Scales each part by another power of ten, so that one drowns in another."""
        if not jnp.issubdtype(operand.dtype, jnp.inexact):
            return operand
        scaled = operand.copy()
        for part in range(ways):
            here = _part(scaled, dim, ways, part)
            here[...] = (_wide(here) * 10.0 ** self._random.uniform(-3, 3)).astype(
                operand.dtype
            )
        return scaled

    def _compare_joined(
        self, number: int, whole: Array, pieces: Sequence[Array], dim: int
    ) -> None:
        for part, piece in enumerate(pieces):
            wanted = _part(whole, dim, len(pieces), part)
            if (error := self._error(piece, wanted)) is not None:
                raise Differs(
                    f"part {part} of {len(pieces)} alone gives another part of result "
                    f"{number} than the whole ({error})"
                )

    def _compare_others(
        self, number: int, whole: Array, pieces: Sequence[Array], may: set[str]
    ) -> None:
        """Takes away what a result that is whole in each part cannot be."""
        errors = [self._error(piece, whole) for piece in pieces]
        is_same = all(error is None for error in errors)
        wide = [_wide(piece) for piece in pieces]
        with np.errstate(invalid="ignore", over="ignore"):
            total = np.sum(wide, axis=0)
            size = np.sum([np.abs(one) for one in wide], axis=0)
        apart = self._error(total, whole, size)
        if not is_same:
            may.discard("same")
        if apart is not None:
            may.discard("sum")
        if not may:
            raise Differs(
                f"result {number} of the parts is neither that of the whole nor adds "
                f"up to it ({apart or next(filter(None, errors))})"
            )

    def _error(
        self, got: Array, wanted: Array, size: Array | None = None
    ) -> str | None:
        """Compares numbers; None if they differ by rounding at most.

        Args:
            got: what the parts give.
            wanted: what the whole gives; its type says how it is rounded.
            size: of what was added up; by default the largest of what is wanted.
        """
        is_exact = not jnp.issubdtype(wanted.dtype, jnp.inexact)
        a, b = _wide(got), _wide(wanted)
        same = _same(a, b)
        if same.all():
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.where(same, 0.0, np.abs(a - b))
        numbers = np.isfinite(distance)
        if not numbers.all():
            at = tuple(int(i) for i in np.argwhere(~numbers)[0])
            return f"at {list(at)} {a[at]:.6g} instead of {b[at]:.6g}"
        sizes = np.abs(b) if size is None else size
        finite = sizes[np.isfinite(sizes)]
        scale = float(finite.max()) if finite.size else 0.0
        relative = float(distance.max()) / scale if scale else math.inf
        epsilon = _epsilon(wanted.dtype)
        allowed = _LOW_ULPS if epsilon > _epsilon(jnp.float32) else _ULPS
        if is_exact or relative > max(allowed * epsilon, _LOW_ULPS * self._low):
            at = tuple(int(i) for i in np.argwhere(distance == distance.max())[0])
            return f"at {list(at)} {a[at]:.6g} instead of {b[at]:.6g}"
        self.largest_error = max(self.largest_error, relative)
        return None

    # ------------------------------------------------------------------- independence

    def _check_independence(
        self,
        dims: Sequence[OpDim],
        ways: int,
        shapes: Sequence[Shape],
        roles: Sequence[Role],
    ) -> None:
        """Tests that a part's results stay, whatever the other parts hold."""
        operands = self.inputs("normal", shapes)
        before, again = self._ran(operands), self._ran(operands)
        is_steady = all(map(_is_same, before, again))
        for kind in _OTHERS:
            kept = int(self._random.integers(ways))
            others = [*operands]
            for number, dim in dims:
                others[number] = self.operand(number, kind, shapes[number])
                _part(others[number], dim, ways, kept)[...] = _part(
                    operands[number], dim, ways, kept
                )
            after = self._ran(others)
            for number, role in enumerate(roles):
                if role.is_sum:
                    continue
                a, b = before[number], after[number]
                if role.dim is not None:
                    a, b = (_part(one, role.dim, ways, kept) for one in (a, b))
                if is_steady and not _is_same(a, b):
                    at = tuple(int(i) for i in np.argwhere(~_same(a, b))[0])
                    x, y = _wide(b)[at], _wide(a)[at]
                    text = f"at {list(at)} {x:.9g} instead of {y:.9g}"
                elif (text := self._error(b, a)) is None:
                    continue
                raise Differs(
                    f"result {number} of part {kept} of {ways} changes with the other "
                    f"parts ({_WORDS[kind]} there: {text})"
                )


_WORDS = {
    "normal": "other numbers",
    "resampled": "other numbers of the example",
    "huge": "huge numbers",
    "tiny": "tiny numbers",
    "zeros": "zeros",
    "nan": "NaN",
}


def check_operand(name: str, aval: jax.ShapeDtypeStruct, value: Array | None) -> None:
    """Checks that inputs can be made for an operand.

    Raises:
        CfpError: they cannot.
    """
    is_float = jnp.issubdtype(aval.dtype, jnp.inexact)
    got = ""
    if not (is_float or jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == bool):
        got = f"{name} of type {aval.dtype}"
    elif not is_float and value is None:
        got = f"{name} of type {aval.dtype}, without values"
    elif not is_float and value is not None and value.size > 1:
        if np.all(value == value.flat[0]):
            got = f"{name}, integers that are all {value.flat[0]}"
    if got:
        raise CfpError(
            "A rule cannot be discovered with this argument.",
            expected="arrays of floating point numbers, and integers or booleans "
            "with values that vary, since others like them are drawn",
            got=got,
            attempt="give an example as the function meets it; keys of "
            "jax.random as their data; or write a rule: cfp.ShardingRule",
        )


def blocks(size: int, most: int) -> Iterator[int]:
    """Yields numbers of equal parts of a size: the largest first, up to so many."""
    return (n for n in range(min(size, most), 1, -1) if size % n == 0)


def parts_of(shapes: Sequence[Shape], dims: Sequence[OpDim], ways: int) -> list[Shape]:
    """Shapes with some of their dims split into parts."""
    return [
        tuple(n // ways if (t, d) in dims else n for d, n in enumerate(shape))
        for t, shape in enumerate(shapes)
    ]


def _part(array: Array, dim: int, ways: int, part: int) -> Array:
    """A view of one of several equal parts along a dim."""
    size = array.shape[dim] // ways
    at = [slice(None)] * array.ndim
    at[dim] = slice(part * size, (part + 1) * size)
    return array[tuple(at)]


def _joined(
    whole: jax.ShapeDtypeStruct, part: jax.ShapeDtypeStruct, ways: int
) -> int | None:
    """The dim along which parts' results are joined; None if they are as the whole."""
    if whole.dtype == part.dtype and len(whole.shape) == len(part.shape):
        apart = [d for d, n in enumerate(whole.shape) if part.shape[d] != n]
        if not apart:
            return None
        if len(apart) == 1 and part.shape[apart[0]] * ways == whole.shape[apart[0]]:
            return apart[0]
    raise Differs(
        f"for {ways} parts it makes {part.dtype}{list(part.shape)} of each, and of the "
        f"whole {whole.dtype}{list(whole.shape)}"
    )


def _epsilon(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _wide(array: Array) -> Array:
    """The same numbers with room to calculate."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return array.astype(np.complex128 if is_complex else np.float64)


def _same(a: Array, b: Array) -> Array:
    """Tells equal numbers, each by itself; NaN equals NaN."""
    a, b = _wide(a), _wide(b)
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _is_same(a: Array, b: Array) -> bool:
    return bool(_same(a, b).all())
