"""Tells which biases lose nothing where a kernel takes them in the dtype of queries.

A kernel may add a bias in the dtype of queries where the step adds it in float32. That
is the same where the bias is of numbers that both dtypes have, as one that was cast, or
of a mask's, 0 and far below: rounded or not, these hide a key. It follows from the ops
that make it, which are looked at one by one: what is not known is not exact.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntFlag
from functools import reduce
from operator import and_

import numpy as np

from cfp.attention.matching.found import View
from cfp.program.evaluate import NotEvaluated, is_float
from cfp.program.graph import Op, numpy_dtype

MASKED = -5e3  # What is added to, or stands for, the score of a key that is not seen.
_HIDDEN = -104.0  # Less than this is 0 as a power of e in float32.
_MOST_VALUES = 64
_SMALL_INTEGERS = frozenset({"i1", "i8", "ui8"})
_FROM_FIRST = frozenset(
    {
        "broadcast_in_dim",
        "convert",
        "dynamic_slice",
        "gather",
        "negate",
        "reshape",
        "reverse",
        "slice",
        "transpose",
    }
)
_FROM_ALL = frozenset({"clamp", "concatenate", "maximum", "minimum", "pad"})


class Holds(IntFlag):
    """Facts about all numbers of a value.

    Attributes:
        EXACT: the dtype of queries has each, or it is so low that it hides a key.
        WHOLE: they are integers.
        FAR: each is 0, or as far from it as what hides a key.
        NARROW: they are added in the dtype of queries.
    """

    EXACT = 1
    WHOLE = 2
    FAR = 4
    NARROW = 8


_NOTHING, _MASK = Holds(0), Holds.EXACT | Holds.FAR


class Numbers:
    """Facts about the numbers of a program's values."""

    def __init__(self, view: View, dtype: str) -> None:
        """Takes the dtype of queries, as MLIR writes it."""
        self.view, self.program, self.dtype = view, view.program, dtype
        self._known: dict[int, Holds] = {}

    def entering(self, entries: Collection[int], inside: Collection[int]) -> Holds:
        """Tells what is known of values, by number, wherever some ops read them."""
        reads = (v for op in inside for v in self.program.ops[op].operands)
        own = {v for v in reads if self.view.numbers.of[v] in entries}
        return reduce(and_, map(self._added, own)) if own else _NOTHING

    def _added(self, v: int) -> Holds:
        is_narrow = self.program.values[v].dtype == self.dtype
        return Holds.EXACT | Holds.NARROW if is_narrow else self._of(v)

    def _of(self, v: int) -> Holds:
        if v not in self._known:
            if len(self._known) >= _MOST_VALUES:
                return _NOTHING
            self._known[v] = _NOTHING  # of one that is made of itself
            self._known[v] = self._by_dtype(v) | self._made(v)
        return self._known[v]

    def _by_dtype(self, v: int) -> Holds:
        dtype = self.program.values[v].dtype
        if dtype == self.dtype:
            return Holds.EXACT
        if is_float(dtype):
            return _NOTHING
        return Holds.WHOLE | (Holds.EXACT if dtype in _SMALL_INTEGERS else _NOTHING)

    def _made(self, v: int) -> Holds:
        """Tells what follows from the op that makes a value."""
        op = self.program.maker(v)
        if op is None:
            origin, numbers = self.program.values[v].origin, self.view.numbers.of
            is_same = origin >= 0 and numbers[v] == numbers[origin]
            return self._of(origin) if is_same else _NOTHING
        if op.kind == "constant":
            return self._constant(v)
        if op.kind == "while":
            return self._looped(op, op.results.index(v))
        if op.kind == "optimization_barrier":
            return self._of(op.operands[op.results.index(v)])
        return self._computed(op)

    def _computed(self, op: Op) -> Holds:
        if op.kind in _FROM_FIRST:
            return self._of(op.operands[0])
        if op.kind in _FROM_ALL:
            return self._all(op.operands)
        if op.kind == "select":
            return self._all(op.operands[1:])
        if op.kind not in ("add", "subtract", "multiply"):
            return _NOTHING
        left, right = map(self._of, op.operands)
        found = left & right & Holds.WHOLE
        if op.kind == "add" and _MASK in (left & _MASK, right & _MASK):
            # What one of them hides is hidden; to all else it adds 0.
            found |= left & right & _MASK
        if op.kind == "multiply" and (
            (Holds.WHOLE in left and Holds.FAR in right)
            or (Holds.FAR in left and Holds.WHOLE in right)
        ):
            found |= _MASK  # Masks of integers are of 0 and 1.
        return found

    def _all(self, values: Collection[int]) -> Holds:
        return reduce(and_, map(self._of, values))

    def _looped(self, op: Op, place: int) -> Holds:
        """Tells what is known of what a loop passes on, or stacks."""
        entry, yielded = op.entries[len(op.operands) + place], op.yields[place]
        if entry == yielded:
            return self._of(op.operands[place])
        update = self.program.maker(yielded)
        is_stack = update is not None and update.kind == "dynamic_update_slice"
        if update is None or not is_stack or update.operands[0] != entry:
            return _NOTHING
        return self._all((op.operands[place], update.operands[1]))

    def _constant(self, v: int) -> Holds:
        shape = self.program.shape(v)
        try:
            [x] = self.view.evaluator.run([v], {}, lambda _, d: np.arange(shape[d]))
        except NotEvaluated:
            return _NOTHING
        with np.errstate(all="ignore"):
            narrow = x.astype(numpy_dtype(self.dtype)).astype(np.float64)
            tests = {
                Holds.EXACT: (narrow == x) | (x <= MASKED) | np.isnan(x),
                Holds.WHOLE: np.trunc(x) == x,
                Holds.FAR: (x == 0) | (np.abs(x) >= -MASKED),
            }
        passed = [holds for holds, each in tests.items() if each.all()]
        return reduce(Holds.__or__, passed, _NOTHING)


def is_rounded(biases: Collection[tuple[Holds, float]]) -> bool:
    """Tell whether the dtype of queries rounds the sum of biases times their factors.

    The step must add it in another dtype: what it rounds itself counts as the same.
    """
    if all(Holds.NARROW in holds for holds, _ in biases):
        return False
    rest = [
        (holds, factor)
        for holds, factor in biases
        if _MASK not in holds or factor * MASKED > _HIDDEN
    ]
    return len(rest) > 1 or not all(
        Holds.EXACT in holds and np.frexp(abs(factor))[0] == 0.5
        for holds, factor in rest
    )
