"""Values that need not be kept: cheap ops make them of what is kept anyway."""

from __future__ import annotations

from collections.abc import Iterable, Set

from cfp.program.graph import Program

# Fused into what reads them, and cheap to do twice.
CHEAP = frozenset(
    "abs add and broadcast_in_dim ceil clamp compare convert cosine divide erf "
    "exponential exponential_minus_one floor is_finite log log_plus_one logistic "
    "maximum minimum multiply negate not or power remainder reshape rsqrt select sign "
    "sine slice sqrt square subtract tanh transpose xor".split()
)
_CHEAP_OR_SUM = CHEAP | {"reduce"}
# A norm takes some twenty ops.
_MOST_OPS = 64


def makeable(
    program: Program, values: Iterable[int], within: Set[int] | None = None
) -> dict[int, set[int]]:
    """Finds values that cheap ops can compute from the others and from arguments.

    A norm, for one, is made of the residual stream that it reads.

    Args:
        program: the program.
        values: ids of top-level values that are needed.
        within: ids of the ops that may be done again; None for all.

    Returns:
        For each such value the ids of the ops that make it.
    """
    rest = set(values)
    found = {}
    for v in sorted(rest, key=lambda v: program.values[v].producer, reverse=True):
        ops = _ops_from(program, v, rest - {v}, within)
        if ops is not None:
            found[v] = ops
            rest.discard(v)
    return found


def _ops_from(
    program: Program, v: int, known: Set[int], within: Set[int] | None
) -> set[int] | None:
    """Cheap ops that make a value of known ones, or None."""
    found: set[int] = set()
    stack = [v]
    while stack:
        w = stack.pop()
        producer = program.values[w].producer
        if w in known or producer < 0 or producer in found | program.leaf_ops:
            continue
        op = program.ops[producer]
        is_cheap = op.kind in _CHEAP_OR_SUM and not op.has_regions
        if not is_cheap or not (within is None or producer in within):
            return None
        found.add(producer)
        if len(found) > _MOST_OPS:
            return None
        stack.extend(op.operands)
    return found
