"""FLOPs of a program, counted from its contractions."""

from __future__ import annotations

from collections.abc import Sequence

from cfp.analysis.blocks import Block
from cfp.analysis.contractions import is_contraction
from cfp.program.flops import call_flops, op_flops
from cfp.program.graph import Program

__all__ = ["op_flops", "program_flops", "rematerialized_flops"]


def program_flops(program: Program) -> int:
    """Floating-point operations of one step: two per multiply-add of a contraction.

    Elementwise ops and reductions are left out, as is usual; what a loop repeats
    counts as often as it runs. Those of a custom_partitioning op that is not sharded
    count, too.
    """
    every = (op for op in program.ops if is_contraction(op) or call_flops(op))
    return sum(op_flops(program, op) for op in every)


def rematerialized_flops(program: Program, blocks: Sequence[Block]) -> int:
    """Counts the FLOPs of `program_flops` that the step itself rematerializes.

    That is what the step itself asks for, as with ``jax.checkpoint``; what a plan
    rematerializes is no part of its program.
    """
    again = [
        program.ops[member.op]
        for block in blocks
        for member in block.members[1:]  # The first is the anchor.
        if not member.derived
    ]
    return sum(op_flops(program, op) for op in again if is_contraction(op))
