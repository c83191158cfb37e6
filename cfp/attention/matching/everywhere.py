"""Refuses attentions whose masks are not shown to be the kernel's on all positions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cfp.attention.matching.exact import MASKED
from cfp.attention.matching.found import Found, View
from cfp.attention.matching.functions import Meaning
from cfp.attention.problem import bounds
from cfp.program.constants import NotConstant
from cfp.program.replace import Different

_FLOATS = frozenset({"f32", "bf16", "f16"})
_MOST_POSITIONS = 2**28


def check_closed(view: View, found: Found) -> None:
    """Checks that only floats of three dtypes, and constants, take part.

    Raises:
        Different: it has a cast to another dtype, a branch, or a side that is computed
            of arguments.
    """
    program = view.program
    for op in (program.ops[i] for i in found.inside):
        dtypes = {program.values[v].dtype for v in (*op.operands, *op.results)}
        if op.kind == "convert" and not dtypes <= _FLOATS:
            raise Different(f"its scores or weights are cast: {', '.join(dtypes)}")
    ops = {*found.inside, *found.dots.values()}
    parents = {program.ops[i].parent for i in ops}
    kinds = {program.ops[p].kind for p in parents if p >= 0}
    if len(parents) > 1 and not kinds <= {"while"}:
        raise Different("a part of it stands in a branch")
    if () not in found.options:
        raise Different("a mask or bias that is no constant enters it")


def check_everywhere(view: View, found: Found, meaning: Meaning) -> None:
    """Checks every constant that enters, on all positions, in its own dtype.

    Raises:
        Different: one is neither the mask nor its opposite.
    """
    if meaning.sides:
        raise Different("a mask or bias that is no constant enters it")
    queries, keys = found.sizes.get(meaning.tokens, 1), found.sizes["k"]
    seen = None
    for v in _entering(view, found):
        if queries * keys > _MOST_POSITIONS:
            raise Different(f"a mask of {queries} by {keys} positions")
        if seen is None:
            seen = _seen(meaning, queries, keys)
        try:
            x = view.constants.value(v, view.made)
        except NotConstant as error:
            raise Different(f"its mask is made by {error}") from error
        if x.size == 1:
            continue
        rows = x.reshape(-1, *x.shape[-2:])
        if not (rows == rows[:1]).all():
            raise Different("a constant that differs between sequences or heads")
        x = rows[0]
        if x.dtype == bool:
            is_mask = np.array_equal(x, seen) or np.array_equal(~x, seen)
        else:
            x = x.astype(np.float64)
            is_mask = np.array_equal(x > MASKED, seen) and not x[seen].any()
        if not is_mask:
            raise Different("a mask of its own, other than causal or a window")


def _entering(view: View, found: Found) -> Iterator[int]:
    program, numbers = view.program, view.numbers.of
    own = {numbers[v] for i in found.inside for v in program.ops[i].results}
    own.add(numbers[found.scores.value])
    done: set[int] = set()
    for op in (program.ops[i] for i in found.inside):
        for v in op.operands:
            if numbers[v] not in own and view.is_leaf(v) and numbers[v] not in done:
                done.add(numbers[v])
                yield v


def _seen(meaning: Meaning, queries: int, keys: int) -> np.ndarray:
    query, key = np.arange(queries)[:, None], np.arange(keys)
    seen = np.ones((queries, keys), bool)
    for allowed in bounds(meaning.by_position, query, key):
        seen &= allowed
    if not seen.any(axis=-1).all():
        raise Different("a query sees no key")
    return seen
