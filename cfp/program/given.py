"""Values of example arguments that a step may branch on: predicates and scalars.

A step that is planned with arrays is measured with their scalars, and with their masks
unless these are large. All other values are random (:mod:`cfp.profiling.inputs`).
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from cfp.program.graph import Program

# A mask is a constant of the program that makes it: of this many elements at most.
MOST_ELEMENTS = 1 << 16
_DECIDES = ("if", "case", "while")


def may_be_given(leaf: Any) -> bool:
    """True if an argument's value is kept: a scalar, or a few booleans."""
    if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
        return False
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, bool | int | float | complex)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    shape = tuple(np.shape(leaf))
    return not shape or (bool(dtype == np.bool_) and prod(shape) <= MOST_ELEMENTS)


def given_bytes(leaf: Any, dtype: Any) -> bytes:
    """An argument's value as an array of a type; empty if it cannot be read.

    Args:
        leaf: what the caller passed, or None.
        dtype: of the program's argument.
    """
    if leaf is None:
        return b""
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted() or not leaf.is_fully_addressable:
            return b""
        leaf = jax.device_get(leaf)
    return np.asarray(leaf, dtype).tobytes()


def deciding(program: Program, value: int) -> bool:
    """True if a branch or a loop's end depends on an argument, by scalars alone."""
    stack, seen = [value], set()
    while stack:
        v = stack.pop()
        if v in seen or program.values[v].shape:
            continue
        seen.add(v)
        for user, index in program.users[v]:
            op = program.ops[user]
            if op.kind in _DECIDES and (op.kind == "while" or index == 0):
                return True
            stack.extend(op.results)
    return False
