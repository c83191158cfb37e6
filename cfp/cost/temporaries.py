"""What a segment needs at most while it runs, estimated from its program.

Ops are gone through in program order. A tensor is in memory from the op that makes it
to the last one that reads it: results of heavy ops, what heavy ops read, and what is
kept for the backward pass. What cheap ops make for one another a compiler fuses. A loop
needs what it returns, such as the stacked gradients of its layers, and what one
iteration does, which may have a forward pass in it that is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from cfp.analysis.layout import Frame, Layout
from cfp.analysis.segments import Segment
from cfp.analysis.specs import spec_ways
from cfp.cost.kept import uses_through
from cfp.cost.memory import held_values
from cfp.cost.orders import summed_in_two_orders
from cfp.program.graph import Op, Program
from cfp.program.makeable import CHEAP

# Of these the reader reads what they are made of, where it lies.
_VIEWS = frozenset({"reshape", "transpose", "optimization_barrier"})
# What is fused like elementwise ops.
_FUSED = CHEAP | {"concatenate", "dynamic_slice", "pad", "reverse"}
# What reads as it goes, too, but has memory for what it makes, or a loop has.
_AS_IT_GOES = _FUSED | _VIEWS | {"reduce", "dynamic_update_slice"}


@dataclass(frozen=True, slots=True)
class _Step:
    """One op: what it makes, what happens within it, and what is not read after it."""

    made: tuple[int, ...]
    inner: tuple[_Step, ...]
    freed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Course:
    """What comes into memory and leaves it while a segment's ops run."""

    steps: tuple[_Step, ...]

    def peak_bytes(self, size_of: Callable[[int], int]) -> int:
        """The most that is in memory at once, of what the segment makes.

        Args:
            size_of: what a tensor takes on a device; 0 if it is not made.
        """
        size = cache(size_of)

        def peak(steps: Sequence[_Step]) -> int:
            live = most = 0
            for step in steps:
                live += sum(map(size, step.made))
                most = max(most, live + (peak(step.inner) if step.inner else 0))
                live -= sum(map(size, step.freed))
            return most

        return peak(self.steps)


def course_of(frame: Frame, segment: Segment) -> Course:
    """When tensors of a segment are in memory, those that it keeps in any case."""
    program = frame.program
    whole = summed_in_two_orders(program, lambda v: not is_in_memory(program, v))
    held = frozenset(held_values(frame, segment))
    return Course(_steps(program, segment.ops, held, whole))


def bytes_in_memory(layout: Layout, v: int) -> int:
    """What a tensor takes on each device, as those have it that read it.

    What only an update of the state reads, such as a gradient, is as that has it.
    """
    frame = layout.frame
    spec = layout.read_spec(v)
    if spec is None:
        for user, index in frame.program.users[v]:
            if user in frame.group_of:
                spec = layout.use_spec(user, index)
                break
    spec = spec or layout.spec(v) or ()
    return -(-frame.program.values[v].size_bytes // spec_ways(spec, frame.mesh))


def _steps(
    program: Program, ops: Sequence[int], held: frozenset[int], whole: frozenset[int]
) -> tuple[_Step, ...]:
    """The ops of a segment, or of a loop's body, one after another.

    Args:
        program: the program.
        ops: their ids.
        held: tensors that are kept for the backward pass.
        whole: tensors that are in memory although cheap ops make them.
    """
    order = sorted(ops)
    inside = set(order)
    last: dict[int, int] = {}
    made: dict[int, list[int]] = {}
    for op_id in order:
        if op_id in program.leaf_ops:
            continue
        for v in program.ops[op_id].results:
            if v not in held and v not in whole and not is_in_memory(program, v):
                continue
            made.setdefault(op_id, []).append(v)
            last[v] = max(_last_reader(program, v, inside, whole), op_id)
    freed: dict[int, list[int]] = {}
    for v, op_id in last.items():
        freed.setdefault(op_id, []).append(v)
    steps = []
    for op_id in order:
        op = program.ops[op_id]
        inner: tuple[_Step, ...] = ()
        if op.body:
            own = [o for o in op.body if program.ops[o].parent == op_id]
            inner = _steps(program, own, held, whole)
        if inner or op_id in made or op_id in freed:
            new, old = made.get(op_id, ()), freed.get(op_id, ())
            steps.append(_Step(tuple(new), inner, tuple(old)))
    return tuple(steps)


def _last_reader(
    program: Program, v: int, inside: set[int], whole: frozenset[int]
) -> int:
    """The last of some ops that reads a tensor, or a view of it.

    What is whole is read itself, not again what it was made of.
    """

    def own(op_id: int) -> int:
        while op_id >= 0 and op_id not in inside:
            op_id = program.ops[op_id].parent
        return op_id

    def is_made_where_it_is_read(op: Op, w: int) -> bool:
        fuses = op.kind in _VIEWS or op.kind in _FUSED
        fuses = fuses and w not in whole
        return fuses and own(op.id) >= 0 and not is_in_memory(program, w)

    uses = uses_through(program, v, is_made_where_it_is_read)
    return max((own(op.id) for op, _ in uses), default=-1)


def is_in_memory(program: Program, v: int) -> bool:
    """Whether a tensor has memory of its own."""
    op = program.ops[program.values[v].producer]
    if op.kind in _VIEWS:
        return False
    if op.kind == "dynamic_update_slice":
        return False  # It is written into what a loop carries.
    if op.has_regions:
        # What a loop only hands through is read where it came from.
        return bool(program.users[v])
    return op.kind not in _FUSED or _feeds_heavy(program, v)


def _feeds_heavy(program: Program, v: int) -> bool:
    # A loop's own operands: it has memory for what it returns.
    return any(
        op.kind not in _AS_IT_GOES and index < len(op.operands)
        for op, index in uses_through(program, v, lambda op, _: op.kind in _VIEWS)
    )
