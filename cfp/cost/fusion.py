"""Fusion by XLA: values with memory of their own, and those fused into readers.

Elementwise work is fused into its reader. Results and operands of heavy ops are in
memory. Some sums add a third kind: elementwise work may combine a tensor with another
whose dims come in another order, as in the backward pass of a softmax. A fusion has to
turn one of them, and cannot sum as well. The summed tensor is then in memory, in the
type of the sum.

Kernels without products move bytes by this rule: a kernel reads tensors in memory and
writes one that has to be there. So a softmax moves its scores three times, in whatever
ops it is written. The row's maximum reads them; one kernel reads them, sums the
exponentials of a row and writes the weights. Its backward pass reads scores and the
weights' gradient, and writes the scores' gradient.

A value with several reading kernels is written to memory if that moves fewer bytes than
computing it in each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from math import prod

from cfp.program.graph import Op, Program, is_dequantized, searched_once
from cfp.program.rematerialize import CHEAP

# Of these the reader reads what they are made of, where it lies.
_VIEWS = frozenset({"reshape", "transpose", "optimization_barrier"})
# What is made where it is read.
FUSED = CHEAP | _VIEWS | {"concatenate", "dynamic_slice", "pad", "reverse"}
# What reads as it goes, too, but has memory for what it makes, or a loop has.
_AS_IT_GOES = FUSED | {"reduce", "dynamic_update_slice"}

# How a tensor is read: its dims in the order in which they are read, those of size 1
# left out; none where it is read as it lies in memory.
Order = tuple[int, ...]
_AS_IT_LIES: frozenset[Order] = frozenset({()})
# An order that was reshaped since: no transpose is known to undo it.
_LOST: Order = (-1,)


def uses_through(
    program: Program, v: int, goes_on: Callable[[Op, int], bool]
) -> Iterator[tuple[Op, int]]:
    """Lists uses of a value as (op, operand number), also through views.

    Args:
        goes_on: decides whether uses of an op's result count, too.
    """
    stack, seen = [v], {v}
    while stack:
        for user, index in program.users[stack.pop()]:
            op = program.ops[user]
            yield op, index
            fresh = [w for w in op.results if w not in seen and goes_on(op, w)]
            seen.update(fresh)
            stack += fresh


def is_in_memory(program: Program, v: int) -> bool:
    """Returns True if a tensor has memory of its own."""
    return _is_written(program, v) or v in _find_shared(program)


@searched_once
def _find_shared(program: Program) -> frozenset[int]:
    """Finds what would be fused but for its many readers, and has no other memory."""
    kernels = (program.ops[op] for op in _find_kernels(program))
    shared = (v for op in kernels if op.kind in FUSED for v in op.results)
    return frozenset(shared) - _kept(program)


def _is_written(program: Program, v: int) -> bool:
    return _has_memory(program, v) or v in summed_in_two_orders(program)


def _has_memory(program: Program, v: int) -> bool:
    """Returns True if a tensor has memory because of its producer or its readers."""
    op = program.ops[program.values[v].producer]
    if _is_view(program, op) or op.kind == "dynamic_update_slice":
        return False  # An update is written into what a loop carries.
    if op.has_regions:
        # What a loop only hands through is read where it came from.
        return bool(program.users[v])
    # Behind a loop's own operands is what it returns, for which it has memory itself.
    return op.kind not in FUSED or any(
        user.kind not in _AS_IT_GOES and index < len(user.operands)
        for user, index in uses_through(program, v, lambda op, _: _is_view(program, op))
    )


def _is_view(program: Program, op: Op) -> bool:
    """True if readers of an op's result read the op's operand.

    Products read FP8 numbers, and scale their results.
    """
    return op.kind in _VIEWS or is_dequantized(program, op)


@searched_once
def summed_in_two_orders(program: Program) -> frozenset[int]:
    """Values that sums read and that are made of tensors read in two orders."""
    orders: dict[int, frozenset[Order]] = {}
    found = set()
    for op in program.ops:
        if op.id in program.leaf_ops:
            continue
        for v in op.results:
            if _has_memory(program, v):
                continue
            size = _elements(program, v)
            read = frozenset().union(
                *(
                    orders.get(w, _AS_IT_LIES)
                    for w in op.operands
                    # What is smaller, such as a row's sum, is no matter.
                    if _elements(program, w) == size
                    and program.values[w].producer not in program.leaf_ops
                )
            )
            if op.kind == "transpose":
                read = frozenset(_turned(op, order) for order in read)
            elif op.kind == "reshape" and _is_regrouped(program, op):
                read = frozenset(order and _LOST for order in read)
            if len({*map(bool, read)}) > 1 and _is_summed(program, v):
                found.add(v)
                read = _AS_IT_LIES
            orders[v] = read
    return frozenset(found)


def _is_regrouped(program: Program, op: Op) -> bool:
    """Returns True if a reshape does more than add and leave out dims of size 1."""
    before, after = (
        [size for size in program.values[v].shape if size != 1]
        for v in (op.operands[0], op.results[0])
    )
    return before != after


def _elements(program: Program, v: int) -> int:
    return prod(program.values[v].shape)


def _turned(op: Op, order: Order) -> Order:
    """Lists reads of a tensor through a transpose of it."""
    rule = op.rule
    if rule is None:
        return order or (1, 0)
    before, after = (
        [f for f in map(rule.major, dims) if f is not None]
        for dims in (rule.operands[0], rule.results[0])
    )
    moved = tuple(map(before.index, after))
    if before == after:
        return order
    if order and len(order) != len(moved):
        return _LOST
    if order:
        moved = tuple(order[place] for place in moved)
    return () if moved == tuple(sorted(moved)) else moved


def _is_summed(program: Program, v: int) -> bool:
    uses = uses_through(program, v, lambda _, w: not _has_memory(program, w))
    return any(op.kind == "reduce" for op, _ in uses)


# Random bits are made where they are read, by twenty rounds of shifts. An element's
# shift takes a kernel as long as so many bytes that it reads. H200: 0.27.
SHIFT_BYTES = 0.25
_SHIFTS = frozenset({"shift_left", "shift_right_logical"})

# Of these a kernel reads as much of an operand as it makes.
_IN_PART = frozenset({"slice", "dynamic_slice", "gather"})

# Bytes of tensors in memory, and as such of shifts, by numbers below 0.
Reads = dict[int, float]


@searched_once
def moved_bytes(program: Program) -> Mapping[int, float]:
    """Bytes that each op without products moves, of whole tensors.

    Returns:
        By op id: of the last op of each kernel what its kernel moves, and nothing of
        ops that are fused into others.
    """
    kernels = _find_kernels(program)
    within = _sums_within_others(program, kernels)
    return {
        op: 0.0 if op in within else _written(program, op) + sum(reads.values())
        for op, reads in kernels.items()
    }


@searched_once
def _find_kernels(program: Program) -> Mapping[int, Reads]:
    users = program.users
    made_of: dict[int, Reads] = {}
    kernels: dict[int, Reads] = {}
    kept = _kept(program)
    for op in program.ops:
        if op.id in program.leaf_ops or op.has_regions:
            continue
        if kept.isdisjoint(op.results) and not any(map(users.__getitem__, op.results)):
            continue  # Nothing needs it: the compiler leaves it out.
        reads: Reads = {}
        for w in op.operands[op.kind == "dynamic_update_slice" :]:
            for source, size in _read(program, op, w, made_of).items():
                reads[source] = max(size, reads.get(source, 0.0))
        if op.kind in _SHIFTS:
            reads[-1 - op.id] = SHIFT_BYTES * _elements(program, op.results[0])
        ends = {_elements(program, v) for v in (*op.results[:1], *op.operands[:1])}
        is_fused = (op.kind == "reduce" and len(ends) == 1) or (
            op.kind in FUSED
            and not any(
                _is_written(program, v) or _is_shared(program, v, reads)
                for v in op.results
            )
        )
        is_fused &= kept.isdisjoint(op.results)
        if is_fused:
            made_of.update(dict.fromkeys(op.results, reads))
        else:
            kernels[op.id] = reads
    return kernels


def _kept(program: Program) -> frozenset[int]:
    """Values that the program returns, or a loop's body or a branch."""
    yielded = (v for op in program.ops for v in op.yields)
    return frozenset((*program.outputs, *yielded))


def _read(
    program: Program, op: Op, w: int, made_of: Mapping[int, Reads]
) -> Mapping[int, float]:
    """Bytes that an op reads for one operand, by the tensors in memory."""
    if program.is_leaf(_handed_in(program, w)):
        return {}
    found = made_of.get(w, {w: float(program.values[w].size_bytes)})
    if op.kind in _IN_PART and op.operands[0] == w:
        share = _elements(program, op.results[0]) / max(1, _elements(program, w))
        return {v: size * min(1.0, share) for v, size in found.items()}
    return found


def _handed_in(program: Program, v: int) -> int:
    """Returns where a value came from that loops only hand through."""
    while (origin := program.values[v].origin) >= 0 and any(
        v in program.ops[op].entered(place - len(program.ops[op].operands))
        for op, place in program.users[v]
    ):
        v = origin
    return v


def _is_shared(program: Program, v: int, reads: Reads) -> bool:
    """Returns True if a value's readers would read more than it, each again."""
    readers = len({user for user, _ in program.users[v]})
    once = sum(size for source, size in reads.items() if source >= 0)
    return (readers - 1) * once > (readers + 1) * program.values[v].size_bytes


def _written(program: Program, op_id: int) -> float:
    op = program.ops[op_id]
    # An update in place touches what it writes, not all of what it is part of.
    written = op.operands[1:2] if op.kind == "dynamic_update_slice" else op.results
    return float(sum(program.values[v].size_bytes for v in written))


def _sums_within_others(program: Program, kernels: Mapping[int, Reads]) -> set[int]:
    """Finds sums along rows that kernels compute while they read these rows anyway.

    A softmax has two sums over the same tensors: the maximum, and the sum of
    exponentials. The compiler fuses the second.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    rows: dict[int, set[int]] = {}
    for op_id, reads in kernels.items():
        op = program.ops[op_id]
        own = sum(program.values[v].size_bytes for v in op.results)
        for v in reads:
            readers[v].append(op_id)
        if op.kind == "reduce" and _is_along_rows(op):
            rows[op_id] = {v for v, size in reads.items() if size > own}
    found = set()
    for op_id, read in rows.items():
        users = [user for v in program.ops[op_id].results for user in readers[v]]
        if users and all(
            read <= kernels[user].keys() and rows.get(user) != read for user in users
        ):
            found.add(op_id)
    return found


def _is_along_rows(op: Op) -> bool:
    """True if a sum is over the last dim of its operand."""
    rule = op.rule
    if rule is None or not rule.operands[0]:
        return False
    return any(f in rule.reduction for f in rule.operands[0][-1])
