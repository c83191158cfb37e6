"""Evaluates a few of a program's ops with NumPy, at some coordinates only.

To find out what some ops compute they need not run at their size: elementwise ops,
reductions and products of fewer coordinates of each dim are the same function, as long
as `iota` and constants are taken at those coordinates. All floating-point numbers are
float64 here: what is compared is what a program means, and not how it rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from cfp.program import shardy
from cfp.program.graph import Op, Program

Coordinates = Callable[[int, int], np.ndarray]  # of a value's dim

_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.logical_and,
    "cosine": np.cos,
    "divide": np.divide,
    "exponential": np.exp,
    "exponential_minus_one": np.expm1,
    "is_finite": np.isfinite,
    "log": np.log,
    "log_plus_one": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negate": np.negative,
    "not": np.logical_not,
    "or": np.logical_or,
    "power": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sine": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "subtract": np.subtract,
    "tanh": np.tanh,
    "xor": np.logical_xor,
}
_COMPARE: Mapping[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "GE": np.greater_equal,
    "GT": np.greater,
    "LE": np.less_equal,
    "LT": np.less,
}
_SHAPES = ("broadcast_in_dim", "convert", "reshape", "transpose")
_SOURCES = ("constant", "iota")
_OTHER = ("compare", "dot_general", "optimization_barrier", "reduce", "select")
KNOWN = frozenset((*_ELEMENTWISE, *_SHAPES, *_SOURCES, *_OTHER))
# Evaluated, too, but they change which coordinates there are.
_CUTS = frozenset(("pad", "slice"))
_REDUCE: Mapping[str, Callable[..., Any]] = {
    "stablehlo.add": np.sum,
    "stablehlo.maximum": np.max,
    "stablehlo.minimum": np.min,
    "stablehlo.or": np.any,
    "stablehlo.and": np.all,
}


class NotEvaluated(Exception):
    """An op is none of those that are evaluated here."""


class Evaluator:
    """Evaluates ops of one program."""

    def __init__(self, program: Program) -> None:
        """Parses the program's module, which is kept."""
        self._program = program
        self._module = shardy.parsed(program.text)
        self._ops = shardy.program_ops(shardy.main_function(self._module))

    def run(
        self,
        wanted: Sequence[int],
        known: Mapping[int, np.ndarray],
        coordinates: Coordinates,
        stands: Callable[[int], int] = lambda v: v,
    ) -> list[np.ndarray]:
        """Evaluates some values.

        Args:
            known: values by id, at their coordinates; nothing behind them is evaluated.
            coordinates: which coordinates of a value's dim there are to be.
            stands: the value that another one is the same as.

        Raises:
            NotEvaluated: an op, or an argument that is not known, is in the way.
        """
        found = dict(known)
        stack = [stands(v) for v in wanted]
        waiting: set[int] = set()
        while stack:
            v = stack[-1]
            if v in found:
                stack.pop()
                continue
            op = self._program.maker(v)
            if op is None:
                raise NotEvaluated("an argument")
            if op.kind not in KNOWN | _CUTS:
                raise NotEvaluated(op.name)
            reads = [stands(x) for x in op.operands]
            missing = [x for x in reads if x not in found]
            if missing:
                if v in waiting:
                    raise NotEvaluated("a value that is made of itself")
                waiting.add(v)
                stack += missing
                continue
            sizes = [self._sizes(r, coordinates) for r in op.results]
            try:
                arrays = [
                    self._as(v, found[x]).reshape(self._sizes(v, coordinates))
                    for v, x in zip(op.operands, reads, strict=True)
                ]
                with np.errstate(all="ignore"):
                    made = self._apply(op, arrays, sizes, coordinates)
            except ValueError as error:
                raise NotEvaluated(f"{op.name}: coordinates do not fit") from error
            for r, array, size in zip(op.results, made, sizes, strict=True):
                if list(array.shape) != size:
                    raise NotEvaluated(f"{op.name}: coordinates do not fit")
                found[r] = array
        return [self._as(v, found[stands(v)]) for v in wanted]

    def _as(self, v: int, x: np.ndarray) -> np.ndarray:
        """An array in the dtype in which a value is evaluated."""
        dtype = self._program.values[v].dtype
        if dtype == "i1":
            return np.asarray(x) != 0
        if is_float(dtype):
            return np.asarray(x, np.float64)
        if dtype.startswith("complex"):
            raise NotEvaluated("complex numbers")
        return np.asarray(x, np.int64)

    def _sizes(self, v: int, coordinates: Coordinates) -> list[int]:
        shape = self._program.shape(v)
        return [len(coordinates(v, d)) for d in range(len(shape))]

    def _apply(
        self,
        op: Op,
        reads: list[np.ndarray],
        sizes: list[list[int]],
        coordinates: Coordinates,
    ) -> list[np.ndarray]:
        kind = op.kind
        if kind == "optimization_barrier":
            return reads
        if kind in _ELEMENTWISE:
            return [self._elementwise(op, reads)]
        if kind == "select":
            return [np.where(*reads)]
        if kind == "compare":
            return [_COMPARE[op.direction](*reads)]
        if kind == "convert":
            return [self._as(op.results[0], reads[0])]
        if kind == "constant":
            return [self._constant(op, coordinates)]
        if kind == "iota":
            [dim] = op.integers("iota_dimension")
            along = [-1 if d == dim else 1 for d in range(len(sizes[0]))]
            values = coordinates(op.results[0], dim).reshape(along)
            return [self._as(op.results[0], np.broadcast_to(values, sizes[0]))]
        if kind == "transpose":
            return [np.transpose(reads[0], op.integers("permutation"))]
        if kind == "reshape":
            return [self._reshape(op, reads[0], sizes[0], coordinates)]
        if kind == "broadcast_in_dim":
            return [_broadcast(reads[0], op.integers("broadcast_dimensions"), sizes[0])]
        if kind == "reduce":
            return [self._reduce(op, reads)]
        if kind == "slice":
            return [self._slice(op, reads[0], coordinates)]
        if kind == "pad":
            return [self._pad(op, reads[0], reads[1], coordinates)]
        return [self._dot(op, reads)]

    def _elementwise(self, op: Op, reads: list[np.ndarray]) -> np.ndarray:
        dtype = self._program.values[op.results[0]].dtype
        if op.kind in ("and", "or", "xor") and dtype != "i1":
            raise NotEvaluated(f"{op.name} of integers")
        if op.kind == "divide" and not is_float(dtype):
            raise NotEvaluated(f"{op.name} of integers")
        return _ELEMENTWISE[op.kind](*reads)

    def _constant(self, op: Op, coordinates: Coordinates) -> np.ndarray:
        try:
            value: Any = self._ops[op.id].attributes["value"]
        except TypeError as error:  # no attribute class for complex numbers
            raise NotEvaluated("a constant of complex numbers") from error
        [result] = op.results
        rank = len(self._program.shape(result))
        every = [coordinates(result, d) for d in range(rank)]
        if not isinstance(value, ir.DenseElementsAttr):
            raise NotEvaluated("a large constant")
        if value.is_splat:
            splat: Any = value.get_splat_value()
            return self._as(result, np.full([len(c) for c in every], splat.value))
        try:
            array = np.array(value)
        except TypeError as error:  # bfloat16
            raise NotEvaluated("a table of small floats") from error
        return self._as(result, array[np.ix_(*every)] if every else array)

    def _reshape(
        self, op: Op, x: np.ndarray, size: list[int], coordinates: Coordinates
    ) -> np.ndarray:
        before = self._program.shape(op.operands[0])
        after = self._program.shape(op.results[0])
        squeezed = [n for n in before if n > 1] == [n for n in after if n > 1]
        if not squeezed and x.size != np.prod(before):
            own, wanted = (
                self._places(v, coordinates) for v in (op.operands[0], op.results[0])
            )
            if x.size != np.prod(size) or not np.array_equal(own, wanted):
                raise NotEvaluated("a reshape that merges dims")
        return x.reshape(size)

    def _places(self, v: int, coordinates: Coordinates) -> np.ndarray:
        """The places of the coordinates of a value, in row-major order."""
        found = np.zeros(1, np.int64)
        for dim, size in enumerate(self._program.shape(v)):
            found = (found[:, None] * size + coordinates(v, dim)).reshape(-1)
        return found

    def _slice(self, op: Op, x: np.ndarray, coordinates: Coordinates) -> np.ndarray:
        starts, strides = op.integers("start_indices"), op.integers("strides")
        for dim, (start, stride) in enumerate(zip(starts, strides, strict=True)):
            wanted = start + stride * coordinates(op.results[0], dim)
            x = np.take(x, _where(wanted, coordinates(op.operands[0], dim)), dim)
        return x

    def _pad(
        self, op: Op, x: np.ndarray, filling: np.ndarray, coordinates: Coordinates
    ) -> np.ndarray:
        if any(op.integers("interior_padding")):
            raise NotEvaluated("padding between elements")
        shape = self._program.shape(op.operands[0])
        for dim, low in enumerate(op.integers("edge_padding_low")):
            wanted = coordinates(op.results[0], dim) - low
            there = (wanted >= 0) & (wanted < shape[dim])
            own = coordinates(op.operands[0], dim)
            found = np.take(x, _where(np.where(there, wanted, own[0]), own), dim)
            along = [-1 if d == dim else 1 for d in range(x.ndim)]
            x = np.where(there.reshape(along), found, filling)
        return x

    def _reduce(self, op: Op, reads: list[np.ndarray]) -> np.ndarray:
        if len(reads) != 2:
            raise NotEvaluated("a reduction of several values")
        inner, *rest = self._ops[op.id].regions[0].blocks[0].operations
        name = inner.operation.name
        if name not in _REDUCE or len(rest) != 1:
            raise NotEvaluated("a reduction of another kind")
        return _REDUCE[name](reads[0], axis=op.integers("dimensions"))

    def _dot(self, op: Op, reads: list[np.ndarray]) -> np.ndarray:
        (lb, lc), (rb, rc) = op.product_dims(0), op.product_dims(1)
        lhs, rhs = reads
        letters = iter(range(lhs.ndim + rhs.ndim))
        left = [next(letters) for _ in range(lhs.ndim)]
        right = [next(letters) for _ in range(rhs.ndim)]
        for a, b in (*zip(lb, rb, strict=True), *zip(lc, rc, strict=True)):
            right[b] = left[a]
        free = [x for d, x in enumerate(left) if d not in (*lb, *lc)]
        free += [x for d, x in enumerate(right) if d not in (*rb, *rc)]
        out = [left[d] for d in lb] + free
        return np.einsum(lhs, left, rhs, right, out, optimize=True)


def _where(wanted: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The positions of some coordinates among the known ones."""
    found = np.searchsorted(known, wanted).clip(0, len(known) - 1)
    if not np.array_equal(known[found], wanted):
        raise NotEvaluated("coordinates that are not known")
    return found


def is_float(dtype: str) -> bool:
    """True of a type of floating-point numbers, as MLIR writes it."""
    return dtype.startswith(("f", "bf"))


def _broadcast(x: np.ndarray, dims: Sequence[int], size: list[int]) -> np.ndarray:
    shape = [1] * len(size)
    for own, dim in enumerate(dims):
        shape[dim] = x.shape[own]
    return np.broadcast_to(x.reshape(shape), size)
