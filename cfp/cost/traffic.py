"""Bytes that kernels without products move between memory and the device.

XLA fuses elementwise ops into what reads them: a kernel reads tensors that are in
memory and writes one that has to be. So a softmax of scores moves each of them three
times, whatever ops it is written in: the row's maximum reads them; then one kernel
reads them, adds up the exponentials of a row and writes the weights. Its backward pass
reads scores and the weights' gradient, and writes the scores'.

A value that several kernels read is written to memory where that moves less than to
compute it in each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod

from cfp.cost.fusion import FUSED, is_in_memory
from cfp.program.graph import Op, Program

_KEY = "moved by kernels"
# Of these a kernel reads as much of an operand as it makes.
_IN_PART = frozenset({"slice", "dynamic_slice", "gather"})

Reads = dict[int, float]  # Bytes of tensors in memory.


def moved_bytes(program: Program) -> Mapping[int, float]:
    """Bytes that each op without products moves, of whole tensors.

    Returns:
        By op id: of the last op of each kernel what its kernel moves, and nothing of
        ops that are fused into others.
    """
    known = program.looked_for
    if _KEY not in known:
        known[_KEY] = _find(program)
    return known[_KEY]


def _find(program: Program) -> Mapping[int, float]:
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
        for w in op.operands:
            for source, size in _read(program, op, w, made_of).items():
                reads[source] = max(size, reads.get(source, 0.0))
        is_fused = _sums_nothing(program, op) or (
            op.kind in FUSED
            and not any(
                is_in_memory(program, v) or _is_shared(program, v, reads)
                for v in op.results
            )
        )
        is_fused &= kept.isdisjoint(op.results)
        if is_fused:
            made_of.update(dict.fromkeys(op.results, reads))
        else:
            kernels[op.id] = reads
    within = _sums_within_others(program, kernels)
    return {
        op: 0.0 if op in within else _written(program, op) + sum(reads.values())
        for op, reads in kernels.items()
    }


def _kept(program: Program) -> frozenset[int]:
    """Values that the program returns, or a loop's body or a branch."""
    yielded = (v for op in program.ops for v in op.yields)
    return frozenset((*program.outputs, *yielded))


def _read(
    program: Program, op: Op, w: int, made_of: Mapping[int, Reads]
) -> Mapping[int, float]:
    """Bytes that an op reads for one operand, by the tensors in memory."""
    if program.values[w].producer in program.leaf_ops:
        return {}
    found = made_of.get(w, {w: float(program.values[w].size_bytes)})
    if op.kind in _IN_PART and op.operands[0] == w:
        share = _elements(program, op.results[0]) / max(1, _elements(program, w))
        return {v: size * min(1.0, share) for v, size in found.items()}
    return found


def _is_shared(program: Program, v: int, reads: Reads) -> bool:
    """Returns True if a value's readers would read more than it, each again."""
    readers = len({user for user, _ in program.users[v]})
    once = sum(reads.values())
    return (readers - 1) * once > (readers + 1) * program.values[v].size_bytes


def _written(program: Program, op_id: int) -> float:
    op = program.ops[op_id]
    # An update in place touches what it writes, not all of what it is part of.
    written = op.operands[1:2] if op.kind == "dynamic_update_slice" else op.results
    return float(sum(program.values[v].size_bytes for v in written))


def _sums_within_others(program: Program, kernels: Mapping[int, Reads]) -> set[int]:
    """Sums along rows that are computed in the kernels that read these rows anyway.

    Of two in a row over the same tensors, a maximum and what is summed less it, the
    compiler does so with the second.
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


def _sums_nothing(program: Program, op: Op) -> bool:
    """Returns True if a sum is over dims of size 1."""
    if op.kind != "reduce":
        return False
    return _elements(program, op.results[0]) == _elements(program, op.operands[0])


def _is_along_rows(op: Op) -> bool:
    """Returns True if a sum is over the last dim of what it reads."""
    rule = op.rule
    if rule is None or not rule.operands[0]:
        return False
    return any(f in rule.reduction for f in rule.operands[0][-1])


def _elements(program: Program, v: int) -> int:
    return prod(program.values[v].shape)
