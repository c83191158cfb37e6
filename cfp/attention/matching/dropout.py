"""Detection of random numbers in what looks like attention, as with dropout."""

from __future__ import annotations

from collections.abc import Iterable

from cfp.attention.matching.view import View
from cfp.program.evaluate import KNOWN

# Random bits: of a generator, or made into numbers by what a float is in memory.
_RANDOM = frozenset({"bitcast_convert", "rng", "rng_bit_generator"})
_THROUGH = (KNOWN - {"dot_general", "reduce"}) | {"concatenate", "slice"}
_MOST_STEPS = 64


def dropout(view: View, inside: Iterable[int]) -> str:
    """Returns a message if random numbers enter some ops, or "".

    Args:
        view: of the program.
        inside: ids of ops between scores and mix.
    """
    numbers, ops = view.numbers.of, [view.program.ops[op] for op in inside]
    own = {numbers[v] for op in ops for v in op.results}
    entering = (v for op in ops for v in op.operands if numbers[v] not in own)
    if any(_is_random(view, v, own) for v in entering):
        return "dropout: random numbers enter its scores or weights"
    return ""


def _is_random(view: View, v: int, own: set[int]) -> bool:
    """True if elementwise ops make a value of random numbers."""
    stack, seen = [v], set[int]()
    while stack and len(seen) < _MOST_STEPS:
        number = view.numbers.of[v := stack.pop()]
        op = view.producer(v)
        if op is None or number in seen or number in own or view.is_leaf(v):
            continue
        seen.add(number)
        if op.kind in _RANDOM:
            return True
        if op.kind in _THROUGH:
            stack += op.operands
    return False
