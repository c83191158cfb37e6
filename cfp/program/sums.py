"""Sums of table rows in float32, where a program adds them up in 16 bits.

The gradient of a lookup in a bfloat16 table adds up rows of updates, many into the
same row of the result. A GPU has no atomic sum of 16 bits and tries each one until no
other came between, one after another in a row that many tokens have: 12,288 tokens of
2 types took 66 ms on an H200, and 0.16 ms in float32
(``docs/results/narrow_sums_h200_202611.md``). The result is rounded once, where every
single sum was before.
"""

from __future__ import annotations

from collections.abc import Collection

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

SCATTER = "stablehlo.scatter"
_NARROW = ("bf16", "f16")


def add_up_in_float32(op: ir.Operation, tables: Collection[tuple[int, ...]]) -> bool:
    """Rewrites a scatter, in place, if it is a 16-bit gradient of a lookup.

    Args:
        tables: shapes of the program's arguments. Sums of other shapes stay: where
            tokens are put back in order few meet, and devices would send twice as much.

    Returns:
        Whether it was rewritten.
    """
    if not _adds_up_narrow_rows(op) or tuple(op.results[0].type.shape) not in tables:
        return False
    zeros, places, updates = op.operands
    wide = ir.F32Type.get()
    kind = op.results[0].type
    attributes = {name: op.attributes[name] for name in op.attributes}
    with ir.InsertionPoint(op), op.location:
        scatter = ir.Operation.create(
            SCATTER,
            results=[_of_type(kind, wide)],
            operands=[_converted(zeros, wide), places, _converted(updates, wide)],
            attributes=attributes,
            regions=1,
        )
        number = ir.RankedTensorType.get([], wide)
        body = scatter.regions[0].blocks.append(number, number)
        with ir.InsertionPoint(body):
            stablehlo.return_([stablehlo.add(*body.arguments)])
        narrowed = _converted(scatter.results[0], kind.element_type)
    op.results[0].replace_all_uses_with(narrowed)
    op.erase()
    return True


def _adds_up_narrow_rows(op: ir.Operation) -> bool:
    if len(op.operands) != 3 or ir.BoolAttr(op.attributes["unique_indices"]).value:
        return False
    if str(op.results[0].type.element_type) not in _NARROW:
        return False
    # One word of each token, as a cross-entropy's gradient puts it, meets no other.
    numbers = stablehlo.ScatterDimensionNumbers(
        op.attributes["scatter_dimension_numbers"]
    )
    if not numbers.update_window_dims:
        return False
    added = [one.operation.name for one in op.regions[0].blocks[0].operations]
    return added == ["stablehlo.add", "stablehlo.return"] and _is_zero(op.operands[0])


def _is_zero(value: ir.Value) -> bool:
    """True if all of a value's numbers are 0."""
    maker = _maker(value)
    while maker is not None and maker.name == "stablehlo.broadcast_in_dim":
        maker = _maker(maker.operands[0])
    if maker is None or maker.name != "stablehlo.constant":
        return False
    numbers = ir.DenseElementsAttr(maker.attributes["value"])
    return numbers.is_splat and ir.FloatAttr(numbers.get_splat_value()).value == 0.0


def _maker(value: ir.Value) -> ir.Operation | None:
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def _converted(value: ir.Value, element: ir.Type) -> ir.Value:
    """A value's numbers in another type."""
    return stablehlo.convert(_of_type(value.type, element), value)


def _of_type(kind: ir.Type, element: ir.Type) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(ir.RankedTensorType(kind).shape, element)
