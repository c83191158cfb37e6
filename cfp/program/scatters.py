"""Scatters that programs compute in another way than JAX writes them.

Two kinds are the gradients of most models' first and last layers, and slow on GPUs:

- *Rows of a table.* The gradient of a lookup in a bfloat16 table adds up rows of
  updates, many into the same row of the result. A GPU has no atomic sum of 16 bits and
  tries each one until no other came between, one after another in a row that many
  tokens have: 12,288 tokens of 2 types took 43 ms on an H200, and 0.2 ms in float32
  (``docs/results/scatters.md``). So they are added up in float32. The
  result is rounded once, where every single sum was before.
- *One word of each token.* The gradient of a cross-entropy's logit is zero but for one
  word. As a scatter it is a buffer of its own, written, read, and sharded like any
  lookup; where a comparison selects the word it is fused into what reads it. The
  numbers are the same.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from cfp.program import shardy

_SCATTER = "stablehlo.scatter"
_NARROW = ("bf16", "f16")
# Updates of a place. A mixture of experts puts back as many as a token has experts.
_MANY = 8


def rewrite_scatters(module: ir.Module) -> int:
    """Rewrites scatters of a normalised module that are slow on GPUs, in place.

    Returns:
        How many of them add up in float32 what they added up in 16 bits.
    """
    function = shardy.main_function(module)
    tables = {tuple(one.type.shape) for one in shardy.main_block(module).arguments}
    scatters = [op for op in shardy.walk(function) if op.name == _SCATTER]
    with module.context, ir.Location.unknown():
        left = [op for op in scatters if not select_words(op)]
        return sum(add_up_in_float32(op, tables) for op in left)


def add_up_in_float32(op: ir.Operation, tables: Collection[tuple[int, ...]]) -> bool:
    """Rewrites a scatter, in place, if it sums many 16-bit rows into the same row.

    Many rows meet if there are many more of them than rows of the result. Many may meet
    in the gradient of a table, as tokens repeat. Other sums stay: tokens that are put
    back in order rarely meet, and devices would send twice as much.

    Args:
        tables: shapes of the program's arguments.

    Returns:
        True if it was rewritten.
    """
    if str(op.results[0].type.element_type) not in _NARROW:
        return False
    if not _adds_to_zeros(op) or _says_unique(op):
        return False
    if tuple(op.results[0].type.shape) not in tables and not _many_meet(op):
        return False
    zeros, places, updates = op.operands
    wide = ir.F32Type.get()
    kind = op.results[0].type
    attributes = {name: op.attributes[name] for name in op.attributes}
    with ir.InsertionPoint(op), op.location:
        scatter = ir.Operation.create(
            _SCATTER,
            results=[shardy.of_element(kind, wide)],
            operands=[
                shardy.converted(zeros, wide),
                places,
                shardy.converted(updates, wide),
            ],
            attributes=attributes,
            regions=1,
        )
        number = ir.RankedTensorType.get([], wide)
        body = scatter.regions[0].blocks.append(number, number)
        with ir.InsertionPoint(body):
            stablehlo.return_([stablehlo.add(*body.arguments)])
        narrowed = shardy.converted(scatter.results[0], kind.element_type)
    shardy.forward(op, [narrowed])
    return True


def select_words(op: ir.Operation) -> bool:
    """Rewrites a scatter, in place, if it puts one word of each token among zeros.

    Returns:
        Whether it was rewritten.
    """
    if not _picks_words(op):
        return False
    zeros, places, updates = op.operands
    kind = ir.RankedTensorType(op.results[0].type)
    *tokens, _ = kind.shape
    with ir.InsertionPoint(op), op.location:
        of_word, word = (
            _spread(value, tokens, kind.shape) for value in (places, updates)
        )
        words = stablehlo.iota(of_word.type, len(tokens))
        equal = stablehlo.ComparisonDirectionAttr.get("EQ")
        is_its = stablehlo.compare(of_word, words, equal)
        selected = stablehlo.select(is_its, word, zeros)
    shardy.forward(op, [selected])
    return True


def _many_meet(op: ir.Operation) -> bool:
    """True if there are many more updates than places."""
    updates = op.operands[2].type.shape
    window = prod(updates[dim] for dim in _dims(op).update_window_dims)
    places = prod(op.results[0].type.shape) / max(1, window)
    return prod(updates) / max(1, window) > _MANY * places


def _picks_words(op: ir.Operation) -> bool:
    """True if all dims but the last are of tokens, and each token has one word."""
    if len(op.results[0].type.shape) < 2 or not _adds_to_zeros(op):
        return False
    _, places, updates = op.operands
    *tokens, words = op.results[0].type.shape
    dims, batching = _dims(op), [*range(len(tokens))]
    return (
        not dims.update_window_dims
        and [*dims.scattered_dims_to_operand_dims] == [len(tokens)]
        and [*dims.input_batching_dims] == batching
        and [*dims.scatter_indices_batching_dims] == batching
        and prod(updates.type.shape) == prod(places.type.shape) == prod(tokens)
        and words <= _most_counted(places)
    )


def _adds_to_zeros(op: ir.Operation) -> bool:
    """True if a scatter of one array adds its updates to zeros that are floats."""
    element = ir.RankedTensorType(op.results[0].type).element_type
    if len(op.operands) != 3 or not isinstance(element, ir.FloatType):
        return False
    if not _is_zero(op.operands[0]):
        return False
    added = [one.operation.name for one in op.regions[0].blocks[0].operations]
    return added == ["stablehlo.add", "stablehlo.return"]


def _says_unique(op: ir.Operation) -> bool:
    """True if no two updates are of one place; programs from elsewhere may not say."""
    name = "unique_indices"
    return name in op.attributes and ir.BoolAttr(op.attributes[name]).value


def _dims(op: ir.Operation) -> stablehlo.ScatterDimensionNumbers:
    return stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])


def _is_zero(value: ir.Value) -> bool:
    """True if all of a value's numbers, floats, are 0."""
    maker = shardy.owner_of(value)
    while maker is not None and maker.name == "stablehlo.broadcast_in_dim":
        maker = shardy.owner_of(maker.operands[0])
    if maker is None or maker.name != "stablehlo.constant":
        return False
    numbers = ir.DenseElementsAttr(maker.attributes["value"])
    return numbers.is_splat and ir.FloatAttr(numbers.get_splat_value()).value == 0


def _most_counted(places: ir.Value) -> int:
    """Counts the words that the type of places has numbers for, 0 included."""
    kind = ir.IntegerType(ir.RankedTensorType(places.type).element_type)
    return 2 ** (kind.width if kind.is_unsigned else kind.width - 1)


def _spread(value: ir.Value, tokens: list[int], shape: list[int]) -> ir.Value:
    """A number of each token, along the words of all of them."""
    element = ir.RankedTensorType(value.type).element_type
    one = stablehlo.reshape(ir.RankedTensorType.get(tokens, element), value)
    dims = ir.DenseI64ArrayAttr.get(range(len(tokens)))
    return stablehlo.broadcast_in_dim(
        ir.RankedTensorType.get(shape, element), one, dims
    )
