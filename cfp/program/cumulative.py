"""Writes cumulative sums, as JAX lowers them for GPUs, as ops that have sharding rules.

From jax 0.12 on ``jax.numpy.cumsum`` is ``chlo.scan`` there, for which Shardy has no
rule: every device would compute the sums of all rows. Elsewhere, and before, it is a
``reduce_window``, which is sharded along all dims but the one that is summed over.
Sums over the only dim of an array are left to the kernel.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from cfp.program.rules import Rule

SCAN = "chlo.scan"
_REDUCERS = frozenset(
    f"stablehlo.{kind}" for kind in ("add", "multiply", "maximum", "minimum")
)


def expand_scan(op: ir.Operation) -> None:
    """Replaces a cumulative sum over one of several dims by a window's reduction."""
    reducer = _reducer(op)
    if reducer is None or len(op.results[1].type.shape) == 0:
        return
    init = _splat_of(op.operands[1])
    if init is None:
        return
    kind = ir.RankedTensorType(op.results[0].type)
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    size = kind.shape[dim]
    ones = [1] * kind.rank
    windows, padding = [*ones], [[0, 0] for _ in ones]
    windows[dim] = size
    padding[dim][ir.BoolAttr(op.attributes["is_reverse"]).value] = size - 1
    scalar = ir.RankedTensorType.get([], kind.element_type)
    attributes: dict[str, ir.Attribute] = {
        name: ir.DenseI64ArrayAttr.get(values)
        for name, values in (
            ("window_dimensions", windows),
            ("window_strides", ones),
            ("base_dilations", ones),
            ("window_dilations", ones),
        )
    }
    pairs = f"tensor<{kind.rank}x2xi64>"
    attributes["padding"] = ir.Attribute.parse(f"dense<{padding}> : {pairs}")
    with ir.InsertionPoint(op):
        start = ir.Operation.create(
            "stablehlo.constant",
            results=[scalar],
            attributes={"value": ir.DenseElementsAttr.get_splat(scalar, init)},
            loc=op.location,
        )
        window = ir.Operation.create(
            "stablehlo.reduce_window",
            results=[kind],
            operands=[op.operands[0], start.results[0]],
            attributes=attributes,
            regions=1,
            loc=op.location,
        )
    block = window.regions[0].blocks.append(
        scalar, scalar, arg_locs=[op.location, op.location]
    )
    with ir.InsertionPoint(block):
        made = ir.Operation.create(
            reducer, results=[scalar], operands=[*block.arguments], loc=op.location
        )
        ir.Operation.create(
            "stablehlo.return", operands=[made.results[0]], loc=op.location
        )
    op.results[0].replace_all_uses_with(window.results[0])
    op.erase()


def scan_rule(shape: tuple[int, ...]) -> Rule | None:
    """The rule of a scan over an array's only dim, which runs on the whole of it.

    Args:
        shape: of the array.
    """
    if len(shape) != 1:
        return None
    whole, number = ((0,),), ()
    return Rule(shape, (whole, number), (whole, number), fixed=frozenset({0}))


def _reducer(op: ir.Operation) -> str | None:
    """The op that a scan of one array repeats, if it is nothing but one such op."""
    if (len(op.operands), len(op.results)) != (2, 2):
        return None
    [block] = op.regions[0].blocks
    *inner, last = (each.operation for each in block.operations)
    is_plain = len(inner) == 1 and inner[0].name in _REDUCERS
    if not is_plain or [*inner[0].operands] not in (
        [*block.arguments],
        [*block.arguments][::-1],
    ):
        return None
    if [*last.operands] != [inner[0].results[0]] * 2 or [*op.results[1].uses]:
        return None
    return inner[0].name


def _splat_of(value: ir.Value) -> ir.Attribute | None:
    """The number that all elements of a constant are."""
    op = value.owner
    while isinstance(op, ir.Operation | ir.OpView):
        op = op.operation
        if op.name == "stablehlo.constant":
            elements = op.attributes["value"]
            if isinstance(elements, ir.DenseElementsAttr) and elements.is_splat:
                return elements.get_splat_value()
            return None
        if op.name != "stablehlo.broadcast_in_dim":
            return None
        op = op.operands[0].owner
    return None
