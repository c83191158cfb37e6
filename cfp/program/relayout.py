"""Gives grouped convolutions a layout in which XLA's partitioner splits them right.

Where XLA splits a convolution along its groups, it shards the result by a permutation
of dims for which it takes the inverse of the right one (jaxlib 0.10.2 to 0.12, plain
``jax.jit`` with ``in_shardings`` too: groups of the input's channels or of its batch,
input in NCHW and result in NHWC). The numbers are then wrong. In layouts where both
permutations send the groups to the same dim all is well, so a convolution of another
layout is written as one whose result is laid out like its input, and a transpose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax.extend.mlir import ir

_CONVOLUTION = "stablehlo.convolution"
_NUMBERS = re.compile(r"(.*conv<\[)(.*?)(\]x\[.*?\]->\[)(.*?)(\]>)")
_SWAPPED = {"b": "f", "f": "b"}


def relayout(op: ir.Operation) -> None:
    """Rewrites a convolution, in place, if XLA might split it wrongly."""
    if op.name != _CONVOLUTION:
        return
    batch_groups = _count(op, "batch_group_count") > 1
    if not batch_groups and _count(op, "feature_group_count") == 1:
        return
    numbers = _NUMBERS.fullmatch(str(op.attributes["dimension_numbers"]))
    assert numbers is not None
    # Groups of the batch become features of the result.
    swapped = _SWAPPED if batch_groups else {}
    taken = [swapped.get(name, name) for name in numbers[2].split(", ")]
    made = numbers[4].split(", ")
    if is_split_right(taken, made):
        return
    permutation = [taken.index(name) for name in made]
    kind = ir.RankedTensorType(op.results[0].type)
    shape = [kind.shape[made.index(name)] for name in taken]
    layout = f"{numbers[1]}{numbers[2]}{numbers[3]}{', '.join(taken)}{numbers[5]}"
    attributes = {name: op.attributes[name] for name in op.attributes}
    attributes["dimension_numbers"] = ir.Attribute.parse(layout)
    with ir.InsertionPoint(op):
        convolution = ir.Operation.create(
            _CONVOLUTION,
            results=[ir.RankedTensorType.get(shape, kind.element_type)],
            operands=list(op.operands),
            attributes=attributes,
            loc=op.location,
        )
        transpose = ir.Operation.create(
            "stablehlo.transpose",
            results=[kind],
            operands=list(convolution.results),
            attributes={"permutation": ir.DenseI64ArrayAttr.get(permutation)},
            loc=op.location,
        )
    op.results[0].replace_all_uses_with(transpose.results[0])
    op.erase()


def is_split_right(taken: Sequence[str], made: Sequence[str]) -> bool:
    """True if XLA splits a grouped convolution of these layouts right.

    Args:
        taken: what each dim of the input becomes in the result, such as
            ``("b", "f", "0", "1")``.
        made: the dims of the result.
    """
    groups = made.index("f")
    return made.index(taken[groups]) == taken.index("f")


def _count(op: ir.Operation, name: str) -> int:
    return ir.IntegerAttr(op.attributes[name]).value
