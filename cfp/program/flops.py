"""Floating-point operations of single ops."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import prod
from typing import Any

from jax.extend.mlir import ir

from cfp.program.graph import Op, Program

# A custom_partitioning op's call: see `cfp.program.partitioned`.
PARTITIONED = re.compile(r'backend_config="(cfp:\w*:(\d+):\w+)"')
_SPREAD = re.compile(r"lhs_dilation\W+array<i64:([^>]*)>")
# cuDNN's attention: its backward pass has five matrix products, its forward pass two.
_ATTENTION = "__cudnn$fmha"
_BACKWARD_TIMES = 2.5
_SCORES = ("cudnn_fmha_backend_config", "intermediate_tensor_shape", "dimensions")


def op_flops(program: Program, op: Op) -> int:
    """Floating-point operations of a contraction, over all its runs in one step."""
    if PARTITIONED.search(op.attributes):
        return call_flops(op) * op.repeat
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


def call_flops(op: Op) -> int:
    """Floating-point operations of one run of a custom_partitioning op; 0 of others.

    They were counted in what it computes on one device, see :func:`inner_flops`, and
    stand in its name.
    """
    found = PARTITIONED.search(op.attributes)
    return int(found[2]) if found else 0


def inner_flops(program: Program, ops: Sequence[ir.Operation]) -> int:
    """Floating-point operations of a program's products, convolutions and attentions.

    Those of attentions that cuDNN computes are counted from the shapes of the scores,
    masked or not.

    Args:
        program: the program.
        ops: its ops in MLIR.
    """
    return sum(
        _inner_flops(program, record, op)
        for record, op in zip(program.ops, ops, strict=True)
    )


def _inner_flops(program: Program, record: Op, op: ir.Operation) -> int:
    if record.kind in ("dot_general", "convolution") and record.rule is not None:
        return op_flops(program, record)
    if record.kind != "custom_call":
        return 0
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if not target.startswith(_ATTENTION):
        return 0
    found: Any = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
    for name in _SCORES:
        found = found[name]
    scores = prod(map(int, found))
    q, _, v = (program.values[v].shape for v in record.operands[:3])
    products = 2 * scores * (q[-1] + v[-1]) * record.repeat
    return int(products * (_BACKWARD_TIMES if "Backward" in target else 1))
