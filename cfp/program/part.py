"""Parts of programs: some ops, and what crosses into and out of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cfp.program.graph import Program


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a program's ops, seen as a program of its own.

    Attributes:
        ops: ids of top-level ops, in program order, constants included.
        inputs: ids of the values it reads from outside.
        outputs: ids of the values that others read from it.
        instead: (id, id) pairs: what its ops read in the place of values that none
            of them makes.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instead: tuple[tuple[int, int], ...] = ()

    def is_whole(self, program: Program) -> bool:
        """True of a part that takes and gives all that a program does, in its order."""
        return (self.inputs, self.outputs) == (program.args, program.outputs)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A part's ops and values, numbered from its own start.

    Attributes:
        digest: the same for parts of any programs that have the same structure, as
            `cfp.program.structure` has it.
        values, ops: their numbers, by id.
    """

    digest: str
    values: Mapping[int, int]
    ops: Mapping[int, int]


def numbered(program: Program, part: Part) -> Numbered:
    """Numbers what a part is made of."""
    known = program.parts.get(part)
    if known is not None:
        return known
    values: dict[int, int] = {v: i for i, v in enumerate(part.inputs)}
    digest = hashlib.sha256()
    ops: dict[int, int] = {}
    instead = dict(part.instead)
    for op_id in sorted(program.with_bodies(part.ops)):
        op = program.ops[op_id]
        ops[op_id] = len(ops)
        for v in (*op.entries, *op.results):
            values.setdefault(v, len(values))
        reads = [
            values.setdefault(instead.get(v, v), len(values))
            for v in (*op.operands, *op.yields)
        ]
        types = [str(program.values[v]) for v in (*op.operands, *op.results)]
        digest.update(repr((op.name, op.structure, reads, types)).encode())
    found = Numbered(digest.hexdigest(), values, ops)
    program.parts[part] = found
    return found


def cut_part(program: Program, wanted: Sequence[int]) -> Part:
    """Completes a set of top-level ops with the constants that it needs."""
    key, parts = tuple(wanted), program.parts
    if key not in parts:
        parts[key] = _cut(program, key)
    return parts[key]


def whole(program: Program) -> Part:
    """All of a program, as a part.

    Its inputs and outputs are those of the step, in their order: arguments that nothing
    reads, results that are arguments, and results that stand there twice.
    """
    top = tuple(op.id for op in program.ops if op.parent < 0)
    return Part(top, program.args, program.outputs)


def _cut(program: Program, wanted: Sequence[int]) -> Part:
    chosen = set(wanted)
    stack = list(chosen)
    while stack:
        op = program.ops[stack.pop()]
        reads = [*op.operands, *op.yields]
        for inner in op.body:
            reads.extend(program.ops[inner].operands)
        for v in reads:
            producer = program.values[v].producer
            if producer >= 0 and producer not in chosen:
                if producer in program.leaf_ops and program.is_top_level(producer):
                    chosen.add(producer)
                    stack.append(producer)
        chosen.update(op.body)
    inside = {
        r for i in chosen for r in (*program.ops[i].results, *program.ops[i].entries)
    }
    inputs: dict[int, None] = {}
    outputs: dict[int, None] = {}
    for op_id in sorted(chosen):
        op = program.ops[op_id]
        for v in (*op.operands, *op.yields):
            if v not in inside:
                inputs[v] = None
        if not program.is_top_level(op_id) or op_id in program.leaf_ops:
            continue
        for r in op.results:
            if any(user not in chosen for user, _ in program.users[r]):
                outputs[r] = None
    made = {r for i in chosen for r in program.ops[i].results}
    for v in program.outputs:
        if v in made:
            outputs[v] = None
    top = tuple(i for i in sorted(chosen) if program.is_top_level(i))
    return Part(top, tuple(inputs), tuple(outputs))
