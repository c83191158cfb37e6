"""Peak memory of a segment while it runs, estimated from its program.

Ops are gone through in program order. A tensor is in memory from the op that makes it
to the last one that reads it: what has memory of its own, and what is kept for the
backward pass. A loop needs what it returns, such as the stacked gradients of its
layers, and what one iteration does, which may have a forward pass in it that is
rematerialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from cfp.cost.fusion import FUSED, is_in_memory, uses_through
from cfp.program.graph import Op, Program

# Of one op: the tensors that it makes, and those that are not read after it.
Step = tuple[Sequence[int], Sequence[int]]


def peak_bytes(steps: Iterable[Step], size_of: Callable[[int], int]) -> int:
    """The most that is in memory at once, of what some steps make.

    Args:
        steps: one after another.
        size_of: what a tensor takes on a device; 0 if it is not made.
    """
    live = most = 0
    for made, freed in steps:
        live += sum(map(size_of, made))
        most = max(most, live)
        live -= sum(map(size_of, freed))
    return most


def steps_of(
    program: Program,
    ops: Iterable[int],
    held: Set[int],
    spans: Sequence[tuple[int, int]] = (),
) -> list[Step]:
    """The ops of a segment, or of a loop's body, one after another.

    What a loop makes is there before what happens within it.

    Args:
        program: the program.
        ops: their ids.
        held: tensors that are kept for the backward pass.
        spans: ids of ops, each from a first to a last, that happen at once: what they
            read stays until the last. What is in memory meanwhile besides is tensor -1
            of the first span, -2 of the second.
    """
    inside = set(ops)
    own = [span for span in spans if inside.issuperset(span)]
    made: dict[int, list[int]] = {op: [] for op in sorted(inside)}
    freed: dict[int, list[int]] = {op: [] for op in inside}
    for op in made.keys() - program.leaf_ops:
        for v in program.ops[op].results:
            if v in held or is_in_memory(program, v):
                made[op].append(v)
                read = max(op, _last_reader(program, v, inside))
                ends = (last for first, last in own if first <= read <= last)
                freed[max(ends, default=read)].append(v)
    for number, (first, last) in enumerate(spans, 1):
        if (first, last) in own:
            made[first].append(-number)
            freed[last].append(-number)
    steps: list[Step] = []
    for op, new in made.items():
        body = program.ops[op].body
        inner = [other for other in body if program.ops[other].parent == op]
        steps += [(new, ()), *steps_of(program, inner, held, spans), ((), freed[op])]
    return [step for step in steps if any(step)]


def _last_reader(program: Program, v: int, inside: Set[int]) -> int:
    """The last of some ops that reads a tensor, or what is made of it on the way."""

    def own(op_id: int) -> int:
        while op_id >= 0 and op_id not in inside:
            op_id = program.ops[op_id].parent
        return op_id

    def is_made_where_it_is_read(op: Op, w: int) -> bool:
        fuses = op.kind in FUSED and own(op.id) >= 0
        return fuses and not is_in_memory(program, w)

    uses = uses_through(program, v, is_made_where_it_is_read)
    return max((own(op.id) for op, _ in uses), default=-1)
