"""Products of a step in FP8: both operands scaled by their largest magnitude.

A product takes part if one operand is a parameter, or if it is the gradient of such a
parameter. Operands of forward products are rounded to e4m3 (3 bits of mantissa),
cotangents to e5m2 (2 bits). A scale is a power of two, so that scaling itself rounds
nothing; sums are in float32.

An operand is quantized once, where it is made: forward and backward products read the
same copy, and the copy is what stays alive between them.

Statement that holds for each rewritten product ``C = A B``: the result is the product
of ``q(A)`` and ``q(B)``, with ``|q(a) - a| <= u |a| + e max|A|``; ``u`` is 2**-4 and
``e`` 2**-17 for e4m3, 2**-3 and 2**-31 for e5m2. A scale is no smaller than the normal
numbers of its dtype, so that ``e max|A|`` may be 2**-24 in float16. Rows and columns
stay finite if ``q`` of their numbers is below the largest of the dtype; one with a NaN
or an infinity makes no finite number, as before.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from cfp.errors import OptionError
from cfp.program import shardy
from cfp.program.graph import Rewritten, numpy_dtype, path_matches

TAKEN = "in FP8"
PRECISION = r"fp8(:\d{1,9})?(,-[^,]+)*"
_PRODUCT = "stablehlo.dot_general"
_WRITE = "stablehlo.dynamic_update_slice"
_NARROW = ("bf16", "f16")
# What moves numbers and changes none.
_MOVES = ("stablehlo.transpose", "stablehlo.reshape")
# What a parameter passes through on its way to a product.
_PASSES = (
    *_MOVES,
    "stablehlo.broadcast_in_dim",
    "stablehlo.convert",
    "stablehlo.slice",
    "stablehlo.dynamic_slice",
)
# Sizes of a product that cuBLASLt has FP8 kernels for.
_MULTIPLE = 16
# The exponent that the largest magnitude gets: below 448 of e4m3, 57344 of e5m2.
_EXPONENT = {"float8_e4m3fn": 7, "float8_e5m2": 14}
_FORWARD, _GRADIENT = "float8_e4m3fn", "float8_e5m2"
_EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True, slots=True)
class _Product:
    """A product and the roles of its operands.

    Attributes:
        roots: of each operand the value whose numbers it has.
        weight: index of the operand that comes from a parameter; -1 if none does.
        gradient: index of the operand that is a cotangent; -1 if none is.
        parameters: the arguments that one operand, or the result, is of.
    """

    op: ir.Operation
    roots: tuple[ir.Value, ...]
    weight: int
    gradient: int
    parameters: frozenset[int]

    @property
    def is_forward(self) -> bool:
        """True if it is of a parameter, no vector, and of the forward pass alone."""
        scope = shardy.location_name(self.op.location)
        return (
            self.weight >= 0 and "transpose(" not in scope and min(_sizes(self.op)) > 1
        )


# Products with fewer rows, columns or summed numbers are not faster in FP8.
_LEAST_SIZE = 1024


def read_precision(precision: str) -> tuple[int, list[str]]:
    """Reads a precision, such as ``fp8:64,-*/router``.

    Returns:
        The least size of products, by default the measured one, and the paths, or
        globs, of
        parameters whose products are left out.

    Raises:
        OptionError: the precision is unknown.
    """
    if not re.fullmatch(PRECISION, precision):
        raise OptionError(
            f"There is no precision {precision!r}. Give fp8, or fp8:512 for products "
            "of at least 512 rows, columns and summed numbers, or fp8,-*/router to "
            "leave out the products of a parameter, by its path."
        )
    first, *left = precision.split(",-")
    return int(first.partition(":")[2] or _LEAST_SIZE), left


def options_of(rewritten: Rewritten) -> dict[str, str]:
    """Compiler options for a program: Triton is left out if there are FP8 products.

    Tuning its kernels takes 44 s for eleven FP8 products, and 1 s without, and the
    library's are as fast (``docs/fp8.md``).
    """
    return (
        {"xla_gpu_enable_triton_gemm": "False"} if TAKEN in rewritten.products else {}
    )


def use_precision(
    module: ir.Module, precision: str, names: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Computes products of a normalised module in a precision, in place.

    Args:
        precision: see `read_precision`; "" changes nothing.
        names: the arguments' paths.

    Returns:
        The number of 16-bit products in FP8, under `TAKEN`, and of others by reason: by
            the
        path of their parameter, with ``*`` for numbers.

    Raises:
        OptionError: a path that is left out matches no argument.
    """
    if not precision:
        return {}
    least, patterns = read_precision(precision)
    left: set[int] = set()
    for one in patterns:
        found = {i for i, name in enumerate(names) if path_matches(name, one)}
        if not found:
            raise OptionError(
                f"The precision leaves out {one!r}, which matches no argument. Paths "
                f"look like: {', '.join(names[:8])}."
            )
        left |= found
    function = shardy.main_function(module)
    numbers = _parameters(shardy.main_block(module))
    products = _classified([*filter(_is_narrow, shardy.walk(function))], numbers)
    forward = [p for p in products if p.is_forward]
    last = forward[-1].parameters if forward else frozenset()
    quantized: dict[tuple[ir.Value, str], tuple[ir.Value, ir.Value]] = {}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    with module.context, ir.Location.unknown():
        for one in products:
            reason = _reason(one, last, left, least)
            name = names[min(one.parameters)] if one.parameters else ""
            counts[reason or TAKEN][re.sub(r"\d+", "*", name)] += 1
            if not reason:
                _rewrite(one, quantized)
    return {reason: dict(of) for reason, of in counts.items()}


def _parameters(block: ir.Block) -> dict[ir.Value, int]:
    """The arguments that are parameters, with their numbers.

    A step returns their new values or their gradients, and none of its batch. If it
    returns neither, all arguments count.
    """
    *_, last = block.operations
    returned = {tuple(one.type.shape) for one in last.operation.operands}
    every: dict[ir.Value, int] = {v: i for i, v in enumerate(block.arguments)}
    shaped = {value for value in every if tuple(value.type.shape) in returned}
    return {v: n for v, n in every.items() if v in shaped and v.type.shape} or every


def _reason(one: _Product, last: Set[int], left: Set[int], least: int) -> str:
    """Returns the reason to leave a product in 16 bits; "" for FP8.

    Args:
        last: the parameter of the last forward product; its products stay in 16 bits.
        left: parameters that are left out.
    """
    if not one.parameters:
        return "no operand is a parameter"
    if one.parameters & last:
        return "last layer"
    if one.parameters & left:
        return "left out"
    if one.weight < 0 and one.gradient < 0:
        return "which operand is the gradient is not clear"
    sizes = _sizes(one.op)
    if min(sizes) < least:
        return f"smaller than {least}"
    if any(size % _MULTIPLE for size in sizes):
        return f"a size that {_MULTIPLE} does not divide"
    return ""


def _is_narrow(op: ir.Operation) -> bool:
    """True for a product of two 16-bit arrays."""
    return op.name == _PRODUCT and all(
        str(one.type.element_type) in _NARROW for one in op.operands
    )


def _classified(
    ops: Sequence[ir.Operation], numbers: Mapping[ir.Value, int]
) -> list[_Product]:
    """Classifies products by their roles.

    A product of two activations is the gradient of a parameter if a product with that
    parameter reads the same cotangent, or else the same activation.
    """
    products: list[_Product] = []
    # The parameter and its dims, by the value that is multiplied by it, and whether in
    # the backward pass.
    known: defaultdict[Any, set[tuple[int, tuple[int, ...]]]] = defaultdict(set)
    for op in ops:
        roots = tuple(map(_root, op.operands))
        gradients = [*map(_is_cotangent, roots)]
        gradient = gradients.index(True) if gradients.count(True) == 1 else -1
        weight = next((i for i in (1, 0) if roots[i] in numbers), -1)
        parameters = frozenset({numbers[roots[weight]]} if weight >= 0 else ())
        products.append(_Product(op, roots, weight, gradient, parameters))
        for one in parameters:
            key = roots[1 - weight], _is_backward(op)
            known[key].add((one, _dims(op.operands[weight])))
    for place, one in enumerate(products):
        made, (left, right) = _dims(one.op.results[0]), one.roots
        keys = ((left, True), (right, False)), ((right, True), (left, False))
        for key in chain(*keys[:: -1 if one.gradient else 1]):
            of = frozenset(n for n, dims in known[key] if dims == made)
            if one.weight < 0 and of:
                products[place] = replace(one, parameters=of)
                break
    return products


def _root(value: ir.Value) -> ir.Value:
    """The value whose numbers, or some of them, a value has: an argument if one is."""
    while (source := _source(value)) is not None:
        value = source
    return value


def _source(value: ir.Value) -> ir.Value | None:
    """The value one op earlier, through ops that pass numbers on and into loops."""
    if isinstance(value.owner, ir.Block):
        argument = ir.BlockArgument(value)
        loop = argument.owner.owner
        if loop.name != "stablehlo.while" or _carried(argument) is not None:
            return None
        return loop.operands[argument.arg_number]
    op = value.owner.operation
    if op.name == "stablehlo.optimization_barrier":
        return op.operands[list[ir.Value](op.results).index(value)]
    if op.name == "stablehlo.while":
        # A loop that writes a slice in each iteration stacks what it writes.
        body = op.regions[1].blocks[0]
        *_, last = body.operations
        place = list[ir.Value](op.results).index(value)
        written = shardy.owner_of(last.operation.operands[place])
        if written is None or written.name != _WRITE:
            return None
        is_stack = written.operands[0] == body.arguments[place]
        return written.operands[1] if is_stack else None
    return op.operands[0] if op.name in _PASSES else None


def _carried(argument: ir.BlockArgument) -> ir.Value | None:
    """The value that the next iteration of a loop gets; None if it gets the same."""
    body = argument.owner.owner.regions[1].blocks[0]
    *_, last = body.operations
    carried = last.operation.operands[argument.arg_number]
    return None if carried == body.arguments[argument.arg_number] else carried


def _is_backward(op: ir.Operation) -> bool:
    """True if differentiation made an op, and not to compute the forward pass again."""
    scope = shardy.location_name(op.location)
    return "transpose(" in scope and "rematted_computation" not in scope


def _is_cotangent(root: ir.Value) -> bool:
    """True if an op of the backward pass makes a value that comes from nothing else."""
    if isinstance(root.owner, ir.Block):
        argument = ir.BlockArgument(root)
        if argument.owner.owner.name == "stablehlo.while":
            root = _carried(argument) or root
    maker = shardy.owner_of(root)
    return maker is not None and _is_backward(maker)


def _dims(value: ir.Value) -> tuple[int, ...]:
    """Sizes of a value's dims in order of size, without those of 1."""
    return tuple(sorted(n for n in value.type.shape if n > 1))


def _sizes(op: ir.Operation) -> tuple[int, int, int]:
    """Rows, columns and summed numbers of a product."""
    dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    left, right = (one.type.shape for one in op.operands)
    summed = prod(left[i] for i in dims.lhs_contracting_dimensions)
    batch = prod(left[i] for i in dims.lhs_batching_dimensions)
    shared = max(summed * batch, 1)  # A product of empty arrays has no numbers.
    return prod(left) // shared, prod(right) // shared, summed


def _rewrite(
    one: _Product, quantized: dict[tuple[ir.Value, str], tuple[ir.Value, ir.Value]]
) -> None:
    """Has a product read its operands as FP8 numbers times a scale.

    XLA makes one FP8 product of both, with the scales as its own, where the device has
    one; elsewhere the same numbers are multiplied in 16 bits.
    """
    for index, value in enumerate(one.op.operands):
        kind = _GRADIENT if index == one.gradient else _FORWARD
        number, scale = _quantized(value, kind, quantized)
        of_operand = ir.RankedTensorType(value.type)
        with ir.InsertionPoint(one.op), one.op.location:
            narrow = ir.RankedTensorType.get([], of_operand.element_type)
            dims = ir.DenseI64ArrayAttr.get([])
            scale = stablehlo.convert(narrow, scale)
            spread = stablehlo.broadcast_in_dim(of_operand, scale, dims)
            number = stablehlo.convert(of_operand, number)
            one.op.operands[index] = stablehlo.multiply(number, spread)


def _quantized(
    value: ir.Value,
    kind: str,
    known: dict[tuple[ir.Value, str], tuple[ir.Value, ir.Value]],
) -> tuple[ir.Value, ir.Value]:
    """A value in FP8 and its scale, moved as the value is from where it is made."""
    moves = []
    while (maker := shardy.owner_of(value)) is not None and maker.name in _MOVES:
        moves.append(maker)
        value = maker.operands[0]
    if (value, kind) not in known:
        known[value, kind] = _put_quantization(value, kind)
    found, scale = known[value, kind]
    for move in reversed(moves):
        attributes = {name: move.attributes[name] for name in move.attributes}
        shape, element = move.results[0].type.shape, found.type.element_type
        moved = ir.RankedTensorType.get(shape, element)
        with ir.InsertionPoint(move), move.location:
            found = shardy.make(move.name, moved, found, **attributes)
    return found, scale


def _put_quantization(value: ir.Value, kind: str) -> tuple[ir.Value, ir.Value]:
    """Puts the ops that quantize a value behind the op that makes it."""
    dtype = numpy_dtype(str(ir.RankedTensorType(value.type).element_type))
    source = ir.Module.parse(_lowered(tuple(value.type.shape), str(dtype), kind))
    main = shardy.main_block(source)
    if isinstance(value.owner, ir.Block):
        location = ir.Location.unknown()
        point = ir.InsertionPoint.at_block_begin(value.owner)
    else:
        location = value.owner.operation.location
        point = ir.InsertionPoint.after(value.owner.operation)
    mapping = {main.arguments[0]: value}
    *body, last = [one.operation for one in main.operations]
    with point:
        for op in body:
            shardy.clone_with(op, mapping).location = location
    return mapping[last.operands[0]], mapping[last.operands[1]]


@lru_cache(maxsize=256)
def _lowered(shape: tuple[int, ...], dtype: str, kind: str) -> str:
    """The module of `quantize` for one type, as text."""
    aval = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return jax.jit(lambda x: quantize(x, kind)).lower(aval).as_text()


def quantize(x: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Rounds an array to FP8; behind a barrier XLA transposes bytes, not 16 bits.

    Args:
        kind: ``float8_e4m3fn`` or ``float8_e5m2``.

    Returns:
        The rounded ``x / scale``, and the scale: a power of two in float32 that the
        dtype of ``x`` has too, whatever the numbers are.
    """
    magnitudes = lax.abs(x)
    zeros = lax.full_like(magnitudes, 0)
    finite = lax.select(lax.is_finite(x), magnitudes, zeros)
    largest = lax.reduce_max(finite, tuple(range(x.ndim))).astype(jnp.float32)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    power = lax.bitcast_convert_type(bits & _EXPONENT_BITS, jnp.float32)
    least = jnp.finfo(x.dtype).smallest_normal
    scale = jnp.maximum(power * 2.0 ** -_EXPONENT[kind], float(least))
    rounded = (x.astype(jnp.float32) * lax.broadcast(1 / scale, x.shape)).astype(kind)
    return lax.optimization_barrier(rounded), scale
