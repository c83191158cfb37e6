"""What a segment needs at most while it runs, estimated from its program.

Ops are gone through in program order. A tensor is in memory from the op that makes it
to the last one that reads it: what has memory of its own, and what is kept for the
backward pass. A loop needs what it returns, such as the stacked gradients of its
layers, and what one iteration does, which may have a forward pass in it that is
computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from cfp.cost.fusion import FUSED, is_in_memory, uses_through
from cfp.program.graph import Op, Program


@dataclass(frozen=True, slots=True)
class Step:
    """One op: what it makes, what happens within it, and what is not read after it."""

    made: tuple[int, ...]
    inner: tuple[Step, ...]
    freed: tuple[int, ...]


def peak_bytes(steps: Sequence[Step], size_of: Callable[[int], int]) -> int:
    """The most that is in memory at once, of what some steps make.

    Args:
        steps: one after another.
        size_of: what a tensor takes on a device; 0 if it is not made.
    """
    live = most = 0
    for step in steps:
        live += sum(map(size_of, step.made))
        most = max(most, live + peak_bytes(step.inner, size_of))
        live -= sum(map(size_of, step.freed))
    return most


def steps_of(program: Program, ops: Sequence[int], held: Set[int]) -> tuple[Step, ...]:
    """The ops of a segment, or of a loop's body, one after another.

    Args:
        program: the program.
        ops: their ids.
        held: tensors that are kept for the backward pass.
    """
    order, inside = sorted(ops), set(ops)
    made: dict[int, list[int]] = {}
    freed: dict[int, list[int]] = {}
    for op_id in order:
        if op_id in program.leaf_ops:
            continue
        for v in program.ops[op_id].results:
            if v in held or is_in_memory(program, v):
                made.setdefault(op_id, []).append(v)
                last = max(op_id, _last_reader(program, v, inside))
                freed.setdefault(last, []).append(v)
    steps = []
    for op_id in order:
        body = program.ops[op_id].body
        own = [op for op in body if program.ops[op].parent == op_id]
        inner = steps_of(program, own, held) if own else ()
        if inner or op_id in made or op_id in freed:
            new, old = made.get(op_id, ()), freed.get(op_id, ())
            steps.append(Step(tuple(new), inner, tuple(old)))
    return tuple(steps)


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
