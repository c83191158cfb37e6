"""Work of a step: FLOPs, tokens and samples."""

from __future__ import annotations

from math import prod

from cfp.analysis.contractions import is_contraction
from cfp.analysis.flops import op_flops, program_flops, rematerialized_flops
from cfp.analysis.layout import Frame
from cfp.program.graph import Program, Value

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
