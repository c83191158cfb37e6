"""Evaluates constants of a program, on all positions and in the program's own dtypes.

A mask that is made of iotas and constants is the same in every step. Its values are
computed as the program computes them: integers wrap, bfloat16 rounds. Arrays have one
entry along dims in which they do not vary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from cfp.program import shardy
from cfp.program.graph import Op, Program, numpy_dtype

_MOST_ELEMENTS = 2**28
_MOST_KEPT = 2**16
_NOTHING: Mapping[int, np.ndarray] = MappingProxyType({})
_SAME_IN_EVERY_DTYPE: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negate": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "select": np.where,
    "sign": np.sign,
    "subtract": np.subtract,
    "xor": np.bitwise_xor,
}
_COMPARE: Mapping[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "GE": np.greater_equal,
    "GT": np.greater,
    "LE": np.less_equal,
    "LT": np.less,
}


class NotConstant(Exception):
    """A value is not evaluated: an op, or its size, is in the way."""


class Constants:
    """Values of one program that depend on no argument."""

    def __init__(self, program: Program) -> None:
        """Parses the program's module, which is kept."""
        self._program = program
        self._module = shardy.parsed(program.text)
        self._ops = shardy.program_ops(shardy.main_function(self._module))
        self._known: dict[int, np.ndarray] = {}

    def value(
        self,
        v: int,
        stands: Callable[[int], int],
        given: Mapping[int, np.ndarray] = _NOTHING,
    ) -> np.ndarray:
        """All of a value, with one entry along dims in which it does not vary.

        Args:
            stands: the value that another one is the same as.
            given: some values, by which others are computed.

        Raises:
            NotConstant: it depends on an argument that is not given, or an op is not
                known.
        """
        known = dict(given) if given else self._known
        stack = [wanted := stands(v)]
        while stack:
            one = stack[-1]
            if one in known:
                stack.pop()
                continue
            op = self._program.maker(one)
            if op is None or len(op.results) > 1:
                raise NotConstant("an argument")
            reads = [stands(x) for x in op.operands]
            missing = [x for x in reads if x not in known]
            stack += missing
            if not missing:
                known[one] = self._made(op, [known[x] for x in reads])
        found = known[wanted]
        for one in [x for x, array in known.items() if array.size > _MOST_KEPT]:
            del known[one]
        return found

    def _made(self, op: Op, reads: list[np.ndarray]) -> np.ndarray:
        [result] = op.results
        value = self._program.values[result]
        dtype, shape = numpy_dtype(value.dtype), value.shape
        with np.errstate(all="ignore"):
            found = self._applied(op, reads, dtype, shape)
        if found.ndim != len(shape) or found.size > _MOST_ELEMENTS:
            raise NotConstant(f"{op.kind} of {value}")
        return found.astype(dtype, copy=False)

    def _applied(
        self, op: Op, reads: list[np.ndarray], dtype: np.dtype, shape: tuple[int, ...]
    ) -> np.ndarray:
        kind = op.kind
        if kind in _SAME_IN_EVERY_DTYPE:
            return np.asarray(_SAME_IN_EVERY_DTYPE[kind](*reads))
        if kind == "compare":
            return np.asarray(_COMPARE[op.direction](*reads))
        if kind == "divide" and dtype.kind in "iu":
            return _divided(*reads)
        if kind == "divide":
            return np.asarray(np.divide(*reads))
        if kind == "remainder" and reads[1].all():
            return np.fmod(*reads)
        if kind == "convert":
            return _converted(reads[0], dtype)
        if kind == "constant":
            return self._constant(op, shape)
        if kind == "iota":
            [dim] = op.integers("iota_dimension")
            along = [n if d == dim else 1 for d, n in enumerate(shape)]
            return _converted(np.arange(shape[dim]).reshape(along), dtype)
        if kind == "transpose":
            return reads[0].transpose(op.integers("permutation"))
        if kind == "broadcast_in_dim":
            sizes = [1] * len(shape)
            places = op.integers("broadcast_dimensions")
            for dim, n in zip(places, reads[0].shape, strict=True):
                sizes[dim] = n
            return reads[0].reshape(sizes)
        if kind == "reshape":
            before = self._program.shape(op.operands[0])
            return _reshaped(reads[0], before, shape)
        if kind == "slice":
            whole = np.broadcast_to(reads[0], self._program.shape(op.operands[0]))
            ends = ("start_indices", "limit_indices", "strides")
            cuts = zip(*(op.integers(name) for name in ends), strict=True)
            return whole[tuple(slice(*cut) for cut in cuts)]
        raise NotConstant(op.name)

    def _constant(self, op: Op, shape: tuple[int, ...]) -> np.ndarray:
        try:
            value = shardy.numbers_of(self._ops[op.id])
            if value is None:
                raise NotConstant("a large constant, or of complex numbers")
            if value.is_splat:
                splat: Any = value.get_splat_value()
                return np.full([1] * len(shape), splat.value)
            return np.array(value).reshape(shape)
        except TypeError as error:  # of small floats
            raise NotConstant("a constant of another dtype") from error


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divides integers towards zero, as XLA does."""
    if not y.all():
        raise NotConstant("a division by zero")
    quotient = np.floor_divide(x, y)
    return quotient + ((quotient < 0) & (quotient * y != x)).astype(x.dtype)


def _converted(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts as XLA does; numbers beyond an integer's range are refused."""
    if dtype.kind == "b":
        return x != 0
    if dtype.kind in "iu" and x.dtype.kind not in "iub":
        wide, ends = x.astype(np.float64), np.iinfo(dtype)
        if not ((wide >= ends.min) & (wide <= ends.max)).all():
            raise NotConstant("numbers that an integer does not hold")
        return np.trunc(wide).astype(dtype)
    return x.astype(dtype)


def _reshaped(
    x: np.ndarray, before: tuple[int, ...], after: tuple[int, ...]
) -> np.ndarray:
    if [n for n in before if n > 1] != [n for n in after if n > 1]:
        if prod(before) > _MOST_ELEMENTS:
            raise NotConstant("a reshape of a large value")
        return np.broadcast_to(x, before).reshape(after)
    sizes = iter([n for n, size in zip(x.shape, before, strict=True) if size > 1])
    return x.reshape([next(sizes) if n > 1 else 1 for n in after])
