"""State: which arguments a step updates, and the ops that update them.

A *storage group* is a parameter with its optimizer state and the elementwise ops
that compute their new values: everything that can be stored and updated in shards
independently of how the blocks use the parameter (ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass

from cfp.program.graph import Op, Program

_VIEWS = frozenset({"transpose", "reshape", "convert"})


@dataclass(frozen=True, slots=True)
class StorageGroup:
    """Arguments that are stored alike.

    Attributes:
        index: its place in the list of groups.
        args: argument positions, the parameter first: the one that the rest of the
            program reads, if any does.
        outputs: the outputs that carry their new values, aligned with ``args``;
            None for an argument that is read but not updated.
        ops: ids of the update ops.
        gradients: value ids that enter the update from the rest of the program.
        shape: the shape of the parameter.
    """

    index: int
    args: tuple[int, ...]
    outputs: tuple[int | None, ...]
    ops: tuple[int, ...]
    gradients: tuple[int, ...]
    shape: tuple[int, ...]


def pair_outputs(program: Program) -> tuple[int | None, ...]:
    """For each argument the output that is its new value, or None.

    Equal types with equal paths below the root say so. Donation speaks for the rest:
    JAX matches donated arguments with results by type alone, so it comes second.
    """
    paired: list[int | None] = [None] * len(program.args)
    taken: set[int] = set()
    by_path: dict[tuple, list[int]] = {}
    for index, name in enumerate(program.output_names):
        value = program.values[program.outputs[index]]
        for tail in {name, name.partition("/")[2]}:
            by_path.setdefault((tail, value.shape, value.dtype), []).append(index)
    for index, name in enumerate(program.arg_names):
        value = program.values[program.args[index]]
        tail = name.partition("/")[2]
        for candidate in by_path.get((tail, value.shape, value.dtype), ()):
            if candidate not in taken:
                paired[index] = candidate
                taken.add(candidate)
                break
    for index, output in enumerate(program.alias):
        if paired[index] is None and output is not None and output not in taken:
            paired[index] = output
            taken.add(output)
    return tuple(paired)


def find_storage(
    program: Program, paired: tuple[int | None, ...]
) -> tuple[StorageGroup, ...]:
    """Finds the storage groups of a program."""
    ends = _dead_ends(program)
    owner: dict[int, int] = {}  # update op -> union-find key (an argument position)
    parent: dict[int, int] = {}

    def find(a: int) -> int:
        while parent[a] != a:
            a = parent[a]
        return a

    arg_position = {v: i for i, v in enumerate(program.args)}
    for position, output in enumerate(paired):
        shape = program.values[program.args[position]].shape
        if output is None or not shape:
            continue
        parent.setdefault(position, position)
        stack, seen = [program.outputs[output]], set()
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            value = program.values[v]
            if v in arg_position:
                other = arg_position[v]
                if value.shape == shape:
                    parent.setdefault(other, other)
                    parent[find(other)] = find(position)
                continue
            op = program.ops[value.producer] if value.producer >= 0 else None
            if op is None or op.id not in ends or not _updates(program, op, shape):
                continue
            if op.id in owner:
                parent[find(owner[op.id])] = find(position)
                continue
            owner[op.id] = position
            stack.extend(op.operands)
    return _collect(program, paired, owner, {a: find(a) for a in parent})


def _collect(
    program: Program,
    paired: tuple[int | None, ...],
    owner: dict[int, int],
    root: dict[int, int],
) -> tuple[StorageGroup, ...]:
    ops: dict[int, list[int]] = {}
    for op, position in sorted(owner.items()):
        ops.setdefault(root[position], []).append(op)
    args: dict[int, list[int]] = {}
    for position in sorted(root):
        args.setdefault(root[position], []).append(position)
    groups = []
    for key, members in args.items():
        inside = set(ops.get(key, ()))

        def readers(position: int, inside: set[int] = inside) -> int:
            users = program.users[program.args[position]]
            return sum(user not in inside for user, _ in users)

        members.sort(key=lambda p: (-min(1, readers(p)), p))
        values = {program.args[p] for p in members}
        entering = []
        for op_id in sorted(inside):
            for v in program.ops[op_id].operands:
                value = program.values[v]
                outside = value.producer not in inside and v not in values
                is_leaf = value.producer in program.leaf_ops
                if outside and value.shape and not is_leaf and v not in entering:
                    entering.append(v)
        groups.append(
            StorageGroup(
                index=len(groups),
                args=tuple(members),
                outputs=tuple(paired[p] for p in members),
                ops=tuple(sorted(inside)),
                gradients=tuple(entering),
                shape=program.values[program.args[members[0]]].shape,
            )
        )
    return tuple(groups)


def _updates(program: Program, op: Op, shape: tuple[int, ...]) -> bool:
    """Whether an op computes elementwise on tensors of one shape."""
    if op.rule is None or op.rule.reduction or op.rule.fixed or op.body:
        return False
    if op.parent >= 0 or len(op.results) != 1:
        return False
    result = program.values[op.results[0]].shape
    if op.kind in _VIEWS and op.operands:
        source = program.values[op.operands[0]]
        single = len(program.users[op.operands[0]]) == 1 or source.shape == shape
        return single and sorted(source.shape) == sorted(shape)
    if result != shape:
        return False
    return all(
        program.values[v].shape in (shape, ()) or
        program.values[v].producer in program.leaf_ops
        for v in op.operands
    )


def _dead_ends(program: Program) -> set[int]:
    """Ops from which no contraction and no op with regions is reachable."""
    leads = [False] * len(program.ops)
    for op in reversed(program.ops):
        if op.body or op.kind in ("dot_general", "convolution", "gather", "scatter"):
            leads[op.id] = True
            continue
        leads[op.id] = any(
            leads[user] for result in op.results for user, _ in program.users[result]
        )
    return {op.id for op in program.ops if not leads[op.id]}
