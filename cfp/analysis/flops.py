"""How much a program computes, counted from its contractions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from cfp.analysis.blocks import Block
from cfp.analysis.contractions import is_contraction
from cfp.program.graph import Op, Program

_SPREAD = re.compile(r"lhs_dilation\W+array<i64:([^>]*)>")


def program_flops(program: Program) -> int:
    """Floating-point operations of one step: two per multiply-add of a contraction.

    Elementwise ops and reductions are left out, as is usual; what a loop repeats
    counts as often as it runs.
    """
    return sum(op_flops(program, op) for op in program.ops if is_contraction(op))


def rematerialized_flops(program: Program, blocks: Sequence[Block]) -> int:
    """Of `program_flops` those of the forward pass that is rematerialized.

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


def op_flops(program: Program, op: Op) -> int:
    """Floating-point operations of a contraction, over all its runs in one step."""
    rule = op.rule
    assert rule is not None
    if op.kind == "convolution":
        # The rule's spatial factors are those of the input: it says which dims may
        # be split, and not how often a window is placed.
        result = program.values[op.results[0]].shape
        kernel = program.values[op.operands[1]].shape
        features = {f for dim in rule.operands[1] for f in dim}
        made = [f for dim in rule.results[0] for f in dim if f in features]
        window = prod(kernel) // max(1, prod(rule.sizes[f] for f in made))
        # A dilated input is mostly zeros, which are not multiplied by.
        spread = _SPREAD.search(op.attributes)
        zeros = prod(map(int, spread[1].split(","))) if spread else 1
        return 2 * prod(result) * window * op.repeat // zeros
    return 2 * prod(rule.sizes) * op.repeat
