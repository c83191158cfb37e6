"""Constraints that do not fit a program: numbers of values and ops from a damaged file.

A fingerprint says that a program is the one that was planned, and not that the numbers
beside it are. Constraints never change what a program computes, as long as they name
values of it; what is rematerialized has to give the same again.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from jax.sharding import Mesh

from cfp.program.constrain import Constraints
from cfp.program.graph import Program, Spec
from cfp.program.rematerialize import Rematerialization, repeatable


def misfit(program: Program, mesh: Mesh, constraints: Constraints) -> str | None:
    """The first constraint that does not fit a program, in words; None if all do.

    Args:
        program: the program.
        mesh: the devices.
        constraints: by the numbers of the program's values and ops.
    """
    for value, spec in constraints.values.items():
        if not 0 <= value < len(program.values):
            return f"value {value}, of {len(program.values)}"
        if (found := _spec_misfit(program, value, mesh, spec)) is not None:
            return f"value {value}: {found}"
    for (op, index), spec in constraints.uses.items():
        if not 0 <= op < len(program.ops):
            return f"op {op}, of {len(program.ops)}"
        reads = (*program.ops[op].operands, *program.ops[op].yields)
        if not 0 <= index < len(reads):
            return f"operand {index} of op {op}, which has {len(reads)}"
        if (found := _spec_misfit(program, reads[index], mesh, spec)) is not None:
            return f"operand {index} of op {op}: {found}"
    for one in constraints.rematerialized:
        if (found := _rematerialization_misfit(program, one)) is not None:
            return found
    return None


def uneven(shape: Collection[int], mesh: Mesh, spec: Spec) -> bool:
    """True if a spec cuts some dim into unequal pieces, or has the wrong rank."""
    sizes = mesh.shape
    return len(spec) != len(shape) or any(
        size % prod(sizes[name] for name in names)
        for size, names in zip(shape, spec, strict=True)
    )


def _spec_misfit(program: Program, value: int, mesh: Mesh, spec: Spec) -> str | None:
    rank = len(program.values[value].shape)
    if len(spec) != rank:
        return f"a sharding of {len(spec)} dims, where there are {rank}"
    axes = [name for names in spec for name in names]
    if not {*axes} <= {*mesh.shape} or len({*axes}) < len(axes):
        return f"axes {axes}, of a mesh {dict(mesh.shape)}"
    return None


def _rematerialization_misfit(program: Program, one: Rematerialization) -> str | None:
    top = {op.id for op in program.ops if op.parent < 0}
    forward, backward = one.forward, one.backward
    if not {*forward, *backward} <= top or not forward or not backward:
        return f"ops to rematerialize, of {len(program.ops)}: not all are there"
    if max(forward) >= min(backward):
        return "ops to rematerialize that come after what reads them"
    for op in forward:
        if not repeatable(program, op):
            return f"op {op} ({program.ops[op].name}) to rematerialize"
    return None
