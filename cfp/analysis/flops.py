"""FLOPs of a program, counted from its contractions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cfp.analysis.blocks import Block
from cfp.analysis.contractions import is_contraction
from cfp.analysis.layout import Frame
from cfp.program.flops import call_flops, op_flops
from cfp.program.graph import Program, Value


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


# ---------------------------------------------------------------------- work of a step

_NARROW = ("bf16", "f16")
_COUNTED = ("i32", "i64", "ui32", "ui64")


def model_work(frame: Frame, batch: dict[int, int]) -> dict[str, float]:
    """Returns a step's FLOPs and batch as a plan's counts.

    Args:
        frame: of the program.
        batch: positions of the arguments that hold a batch, with the ranks of their
            first dims; see `cfp.presets.batch.data_arguments`.

    Returns:
        ``model_flops`` of a step, without what the step itself rematerializes;
        ``narrow_share``, of these in types of 16 bits; ``batch_samples``, and
        ``batch_tokens`` where integers of two dims show them. Absent is what is not
        known.
    """
    program = frame.program
    flops = program_flops(program) - rematerialized_flops(program, frame.blocks)
    if not flops:
        return {}
    found: dict[str, float] = {
        "model_flops": float(flops),
        "narrow_share": _narrow_share(program),
    }
    leaves = [program.values[program.args[p]] for p, rank in batch.items() if not rank]
    if sizes := [leaf.shape[0] for leaf in leaves if leaf.shape]:
        found["batch_samples"] = float(max(set(sizes), key=sizes.count))
    if tokens := [prod(leaf.shape) for leaf in leaves if _has_tokens(leaf)]:
        found["batch_tokens"] = float(max(tokens))
    return found


def _narrow_share(program: Program) -> float:
    """Returns the share of FLOPs in contractions that read 16-bit types."""
    total = narrow = 0
    for op in filter(is_contraction, program.ops):
        flops = op_flops(program, op)
        total += flops
        if all(program.values[v].dtype in _NARROW for v in op.operands[:2]):
            narrow += flops
    return narrow / total if total else 0.0


def _has_tokens(value: Value) -> bool:
    return value.dtype in _COUNTED and len(value.shape) >= 2
