"""Products of a step in FP8: both operands scaled by their largest magnitude.

A 16-bit product may take part if it is of a parameter and the batch, or the gradient of
such a parameter. Cotangents are rounded to e5m2 (2 bits of mantissa), other operands to
e4m3 (3 bits). A scale is a power of two, so that scaling itself rounds nothing. Sums
are in float32, or in fewer bits by cuBLASLt.

An operand is quantized once, at its maker. Forward and backward products read the same
copy. Only the copy is kept between them, if they alone read the operand.

Each rewritten product ``C = A B`` is the product of ``q(A)`` and ``q(B)``, with
``|q(a) - a| <= u |a| + e max|A|``; ``u`` is 2**-4 and ``e`` 2**-17 for e4m3, 2**-3 and
2**-31 for e5m2. ``docs/fp8.md`` has the limits, and another bound for float16.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import chain, zip_longest
from math import prod
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import AbstractMesh

from cfp.errors import OptionError
from cfp.program import shardy
from cfp.program.graph import Precision, path_matches
from cfp.program.replace import aval_of, erase_unread, is_zero

TAKEN = "in FP8"
_NARROW = frozenset({"bf16", "f16"})
# Ops that move numbers and change none, if there are as many before and after.
_MOVES = ("stablehlo.transpose", "stablehlo.reshape", "stablehlo.broadcast_in_dim")
# Ops between a parameter and its product.
_PASSES = (
    *_MOVES,
    "stablehlo.optimization_barrier",
    "stablehlo.convert",
    "stablehlo.slice",
    "stablehlo.dynamic_slice",
)
# (reason, least FLOPs for each quantized number): on an H200 3000 FLOPs save as much
# time as quantizing a number takes (docs/fp8.md).
_SLOWER = "quantizing takes longer than it saves", 3000.0
_WITHOUT = "the devices have no FP8 products", 1e30
# Exponent of the scaled largest magnitude: below 448 of e4m3, 57344 of e5m2.
_EXPONENT = {"float8_e4m3fn": 7, "float8_e5m2": 14}
_COTANGENT = 1  # The bit of cotangents; then come those of products, of arguments.
# Ops whose places, of operands, of arguments and results inside, are their results'.
_BY_PLACE = (
    "stablehlo.while",
    "stablehlo.case",
    "stablehlo.optimization_barrier",
    "sdy.manual_computation",
)
_FORWARD, _GRADIENT = "float8_e4m3fn", "float8_e5m2"
_Copy = tuple[ir.Value, ir.Value]  # The numbers in FP8 and their scale.
_Copies = dict[tuple[ir.Value, str], _Copy]  # By value and dtype.


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """A product and the roles of its operands.

    Attributes:
        roots: for each operand the value that it is a view, slice or cast of.
        weight: index of the operand that is a parameter, the other of the batch; or -1.
        gradient: index of the operand that is a cotangent; -1 if none or both are.
        parameters: argument index of operand `weight`, or indices of the parameters
            whose gradient the result is.
        needs: for each operand a bit mask of its dependencies: bit 0 is cotangents,
            then a bit for each product, then one for each argument.
    """

    op: ir.Operation
    roots: tuple[ir.Value, ...]
    weight: int
    gradient: int
    parameters: frozenset[int]
    needs: tuple[int, ...]


def rewrite(
    module: ir.Module, precision: str, names: Sequence[str], mesh: Any
) -> dict[str, dict[str, int]]:
    """Moves products to FP8 in place; returns {`TAKEN` or reason: {path: number}}.

    Each 16-bit product counts once, by its parameter's path (* for numbers) or "".

    Raises:
        OptionError: a path that is left out matches no argument.
    """
    size, *patterns = precision.removeprefix("fp8").split(",-")
    least = int(size[1:] or 0)
    left: set[int] = set()
    for one in patterns:
        found = {i for i, name in enumerate(names) if path_matches(name, one)}
        if not found:
            raise OptionError(
                f"The precision leaves out {one!r}, which matches no argument. Paths "
                f"look like: {', '.join(names[:8])}."
            )
        left |= found
    products = _classified(module)
    last = _last(products, shardy.main_block(module))
    kinds = {p: {str(v.type.element_type) for v in p.op.operands} for p in products}
    narrow = [one for one in products if kinds[one] <= _NARROW]
    reasons = {one: _reason(one, last, left, least) for one in narrow}
    if not least:
        taken = [one for one, why in reasons.items() if not why]
        why, flops = _SLOWER if _has_fp8_products(mesh) else _WITHOUT
        reasons |= dict.fromkeys(_slower(taken, flops), why)
    quantized: _Copies = {}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    with module.context, ir.Location.unknown():
        taken = [one for one, why in reasons.items() if not why]
        for read, write in _stacks(taken).items():
            _stack_copies(read, write, quantized)
        for one, reason in reasons.items():
            name = names[min(one.parameters)] if one.parameters else ""
            counts[reason or TAKEN][re.sub(r"\d+", "*", name)] += 1
            if not reason:
                _rewrite(one, quantized)
        erase_unread(module)  # Slices and moves of 16-bit numbers.
    return {reason: dict(of) for reason, of in counts.items()}


# Figures of an H200, and of both options: docs/fp8.md.
FP8 = Precision(
    name="fp8",
    pattern=r"fp8(:[1-9]\d{0,8})?(,-[^,]+)*",
    syntax="fp8; fp8:512 for products of at least 512 rows, columns and summed "
    "numbers; or fp8,-*/router to leave out the products of a parameter, by its path",
    rewrite=rewrite,
    taken=TAKEN,
    element="f8",
    options={
        "xla_gpu_enable_triton_gemm": "False",  # Tuning its kernels takes long.
        "xla_gpu_dot_merger_threshold_mb": "0",  # Merged products are in 16 bits.
    },
    speedup=1.7,
    saved_ms=0.71e-12,
    quantized_ms=1.65e-9,
    devices="H200s",
)


def _last(products: Sequence[_Product], block: ir.Block) -> Set[int]:
    """Returns indices of the parameters of the last layer.

    No other forward product of a parameter depends on theirs. One of their backward
    products, if any, depends on no other backward product.
    """
    bits = {one: 2 << i for i, one in enumerate(products) if min(_sizes(one.op)) > 1}
    forward = {p: reduce(or_, p.needs) for p in bits if p.weight >= 0 > p.gradient}
    backward = [p for p in bits if p.parameters and p not in forward]
    reads = defaultdict(int, {p.op.results[0]: bits[p] for p in backward})
    _follow(block, reads, lambda op: op.operands if _is_backward(op) else ())
    ends, starts, later = (set[int]() for _ in range(3))
    for p, bit in bits.items():
        if p not in forward:
            is_later = any(reads[v] & ~bit for v in p.op.operands)
            (later if is_later else starts).update(p.parameters)
        elif not any(of & bit for one, of in forward.items() if one != p):
            ends |= p.parameters
    return ends - (later - starts)


def _reason(one: _Product, last: Set[int], left: Set[int], least: int) -> str:
    """Returns the reason to leave a product in 16 bits, or ""."""
    if not one.parameters:
        return "not of a parameter and the batch"
    asked = {name: str(one.op.attributes[name]) for name in one.op.attributes}
    if "algorithm" in asked or "HIGH" in asked.get("precision_config", ""):
        return "the step asks for a higher precision"
    if one.parameters & last:
        return "last layer"
    if one.parameters & left:
        return "left out"
    if one.weight < 0 and one.gradient < 0:
        return "which operand is the gradient is not clear"
    sizes = _sizes(one.op)
    if min(sizes) < least:
        return f"smaller than {least}"
    if any(size % 16 for size in sizes):  # cuBLASLt has no kernels for others.
        return "a size that 16 does not divide"
    return ""


def _has_fp8_products(mesh: Any) -> bool:
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        return device.platform == "cuda" and "A100" not in device.device_kind
    device = mesh.devices.flat[0]
    capability = re.fullmatch(r"\d+\.\d", getattr(device, "compute_capability", ""))
    return capability is not None and float(capability[0]) >= 8.9


def _slower(products: Sequence[_Product], least_flops: float) -> list[_Product]:
    """Returns products of parameters whose products save less than quantizing takes.

    A number takes `least_flops` once; products that read it count equal shares.
    """
    reads = {one: [_unmoved(v)[0] for v in one.op.operands] for one in products}
    uses = Counter(chain.from_iterable(reads.values()))
    gains = defaultdict[int, float](float)
    for one, values in reads.items():
        flops = 2 * prod(one.op.results[0].type.shape) * _sizes(one.op)[2]
        quantized = sum(prod(v.type.shape) / uses[v] for v in values)
        for of in one.parameters:
            gains[of] += (flops - least_flops * quantized) / len(one.parameters)
    return [p for p in products if sum(gains[of] for of in p.parameters) <= 0]


def _classified(module: ir.Module) -> list[_Product]:
    """Returns all products of a module with their roles.

    A parameter is an argument of which the step returns a gradient or a new value. A
    new value has its shape, and depends on it, and on a gradient or no product. Of
    several arguments, a gradient is of those of its dtype. Others are the batch.
    """
    every, block = shardy.walk(shardy.main_function(module)), shardy.main_block(module)
    ops = [op for op in every if op.name == "stablehlo.dot_general"]
    arguments: list[ir.Value] = [*block.arguments]
    first = len(ops) + 1
    seeds = {op.results[0]: 2 << i for i, op in enumerate(ops)}
    seeds |= {v: 1 << first + i for i, v in enumerate(arguments)}
    needs, parts = (defaultdict[ir.Value, int](int, seeds) for _ in range(2))
    for value in chain.from_iterable(op.results for op in every if _is_backward(op)):
        needs[value] |= _COTANGENT
    _follow(block, needs, lambda op: op.operands)
    _follow(block, parts, _parts)
    products = list[_Product]()
    for op in ops:
        roots = tuple(map(_root, op.operands))
        of = tuple(needs[v] for v in op.operands)
        makers = [shardy.owner_of(_carried(v) or v) for v in roots]  # In a loop, later.
        cotangents = [maker is not None and _is_backward(maker) for maker in makers]
        gradient = cotangents.index(True) if cotangents.count(True) == 1 else -1
        products.append(_Product(op, roots, -1, gradient, frozenset(), of))
    numbers = {v: i for i, v in enumerate(arguments)}
    known, state = _known(_multiplied(products, numbers, -1)), dict[ir.Value, int]()
    read = (op.operands for op in every if not _is_within(op, "transpose("))
    left = reduce(or_, (parts[v] for v in chain.from_iterable(read)), 0)
    bits = {p: seeds[p.op.results[0]] & left for p in products if _is_backward(p.op)}
    gradients = {p: bit for p, bit in bits.items() if bit}
    fits = defaultdict[int, set[ir.Value]](set)  # By the bits of a gradient's products.
    for one in shardy.returned(block.region):
        if needs[one] & _COTANGENT or not needs[one] & (1 << first) - 2:
            alike = {v: i for v, i in numbers.items() if v.type.shape == one.type.shape}
            state |= {v: i for v, i in alike.items() if parts[one] & seeds[v]}
            of = {p: _made(p, known) for p in gradients if bits[p] & parts[one]}
            some = alike.keys() & {arguments[i] for i in chain(*of.values())}
            typed = {v for v in some if v.type == one.type}
            fits[sum(bits[p] for p in of if of[p])] |= typed or some
    for some in fits.values():  # Each gradient is of one argument.
        if len([one for one in fits.values() if one and one <= some]) >= len(some):
            state |= {v: numbers[v] for v in some}
    batch = sum(seeds[v] for v in numbers.keys() - state.keys())
    factors = _multiplied(products, state, batch)
    known = _known(factors)
    others = {p.op: p for p in products}
    others |= {p.op: replace(p, parameters=_made(p, known)) for p in gradients}
    return [*(others | {one.op: one for one in reversed(factors)}).values()]


def _multiplied(
    products: Sequence[_Product], numbers: Mapping[ir.Value, int], batch: int
) -> list[_Product]:
    """Returns products of a parameter and the batch, one for each parameter operand.

    Products of gradients outside of the backward pass are the optimizer's, and left
    out. `numbers` is {parameter: index}, `batch` a mask as in `_Product.needs`.
    """
    return [
        replace(one, weight=i, parameters=frozenset({numbers[one.roots[i]]}))
        for one in products
        for i in (1, 0)
        if one.roots[i] in numbers and one.needs[1 - i] & batch
        if not one.needs[1 - i] & _COTANGENT or _is_within(one.op, "transpose(")
    ]


def _known(factors: Sequence[_Product]) -> defaultdict[Any, list[_Product]]:
    """Groups factors in a jvp by (other operand's root, is backward, weight's dims)."""
    known = defaultdict[Any, list[_Product]](list)
    for one in factors:
        if _is_within(one.op, "jvp("):
            dims = _dims(one.op.operands[one.weight])
            known[one.roots[1 - one.weight], _is_backward(one.op), dims].append(one)
    return known


def _made(one: _Product, known: Mapping[Any, Sequence[_Product]]) -> frozenset[int]:
    """Returns indices of parameters whose gradient a product makes; empty without.

    Their other products read the same cotangent, or else the same activation.
    """
    dims, (left, right) = _dims(one.op.results[0]), one.roots
    keys = ((left, True), (right, False)), ((right, True), (left, False))
    tried = chain(*keys[:: -1 if one.gradient else 1])
    found = ([p for p in known[*key, dims] if p.op != one.op] for key in tried)
    return frozenset().union(*(p.parameters for p in next(filter(None, found), ())))


def _follow(block: ir.Block, bits: defaultdict[ir.Value, int], reads: Any) -> None:
    """Adds bits of `reads(op)` to the bits of the op's results, also through loops."""
    for op in (one.operation for one in block.operations):
        of = [bits[v] for v in op.operands]
        if op.name not in _BY_PLACE:
            of = [reduce(or_, (bits[v] for v in reads(op)), 0)] * len(op.results)
        inner = [one.blocks[0] for one in op.regions if op.name in _BY_PLACE]
        before = list[int]()
        while inner and before != of:
            before = of
            for one in inner:
                for argument, mask in zip(one.arguments, of, strict=False):
                    bits[argument] |= mask
                _follow(one, bits, reads)
            rows = [[bits[v] for v in shardy.returned(one.region)] for one in inner]
            of = [reduce(or_, one) for one in zip_longest(of, *rows, fillvalue=0)]
        for result, mask in zip(op.results, of, strict=False):
            bits[result] |= mask


def _parts(op: ir.Operation) -> list[ir.Value]:
    """Returns an op's operands that are no larger than its results; [] for products."""
    if op.name == "stablehlo.dot_general":
        return []
    size = sum(prod(v.type.shape) for v in op.results)
    return [v for v in op.operands if prod(v.type.shape) <= size]


def _root(value: ir.Value) -> ir.Value:
    """Follows views, slices, casts, zero masks and loops to the original value."""
    while (source := _source(value)) is not None:
        value = source
    return value


def _source(value: ir.Value) -> ir.Value | None:
    """Returns the value one op earlier for `_root`; None at the original value."""
    if isinstance(value.owner, ir.Block):
        place, next_one = ir.BlockArgument(value).arg_number, _carried(value)
        is_same = next_one is not None and next_one == value
        return value.owner.owner.operands[place] if is_same else None
    op, place = value.owner.operation, ir.OpResult(value).result_number
    if op.name == "stablehlo.while":
        # A loop that stacks slices: go on with one slice.
        body = op.regions[1]
        written = shardy.owner_of(shardy.returned(body)[place])
        if written and written.name == "stablehlo.dynamic_update_slice":
            stack, one = written.operands[0], written.operands[1]
            return one if stack == body.blocks[0].arguments[place] else None
        return None
    if op.name == "stablehlo.select" and is_zero(op.operands[2]):
        return op.operands[1]  # Masked rows, as of ragged products.
    return op.operands[place] if op.name in _PASSES else None


def _carried(value: ir.Value) -> ir.Value | None:
    """Returns a loop argument's next value, itself if it stays; None for others."""
    argument = None if shardy.owner_of(value) else ir.BlockArgument(value)
    if argument is None or argument.owner.owner.name != "stablehlo.while":
        return None
    body, place = argument.owner.owner.regions[1], argument.arg_number
    carried = shardy.returned(body)[place]
    return value if carried == body.blocks[0].arguments[place] else carried


def _is_backward(op: ir.Operation) -> bool:
    """True for ops of the backward pass, except rematerialized forward ops."""
    return _is_within(op, "transpose(") and not _is_within(op, "rematted_computation")


def _is_within(op: ir.Operation, scope: str) -> bool:
    return scope in shardy.location_name(op.location)


def _dims(value: ir.Value) -> tuple[int, ...]:
    return tuple(sorted(n for n in value.type.shape if n > 1))


def _sizes(op: ir.Operation) -> tuple[int, int, int]:
    """Returns (rows, columns, summed numbers) of a product, per entry of batch dims."""
    dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    left, right = (one.type.shape for one in op.operands)
    summed = prod(left[i] for i in dims.lhs_contracting_dimensions)
    batch = prod(left[i] for i in dims.lhs_batching_dimensions)
    shared = max(summed * batch, 1)  # A product of empty arrays has no numbers.
    return prod(left) // shared, prod(right) // shared, summed


def _rewrite(one: _Product, quantized: _Copies) -> None:
    """Replaces a product's operands by FP8 numbers times a scale.

    XLA fuses both into one FP8 product if the device has one. Other devices multiply
    the same numbers in 16 bits.
    """
    for index, value in enumerate(one.op.operands):
        kind = _GRADIENT if index == one.gradient else _FORWARD
        number, scale = _quantized(value, kind, quantized)
        with ir.InsertionPoint(one.op), one.op.location:
            scale = shardy.converted(scale, value.type.element_type)
            number = shardy.converted(number, value.type.element_type)
            spread = shardy.spread(scale, value.type.shape)
            one.op.operands[index] = stablehlo.multiply(number, spread)


def _quantized(value: ir.Value, kind: str, known: _Copies) -> _Copy:
    """Returns a value, quantized before ops of `_is_move` and then moved; its scale."""
    value, moves = _unmoved(value)
    if (value, kind) not in known:
        begin, after = ir.InsertionPoint.at_block_begin, ir.InsertionPoint.after
        owner, maker = value.owner, shardy.owner_of(value)
        location = maker.location if maker else ir.Location.unknown()
        with begin(owner) if isinstance(owner, ir.Block) else after(owner), location:
            number, scale = shardy.graft(_lowered(aval_of(value.type), kind), [value])
        known[value, kind] = number, scale
    found, scale = known[value, kind]
    for move in reversed(moves):
        with ir.InsertionPoint(move):
            moved = shardy.clone_with(move, {move.operands[0]: found}).results[0]
        moved.set_type(shardy.of_element(moved.type, found.type.element_type))
        found = moved
    return found, scale


def _unmoved(value: ir.Value) -> tuple[ir.Value, list[ir.Operation]]:
    """Returns the value before ops of `_is_move`, and these ops, last first."""
    moves = list[ir.Operation]()
    while (maker := shardy.owner_of(value)) is not None and _is_move(maker):
        moves.append(maker)
        value = maker.operands[0]
    return value, moves


def _is_move(op: ir.Operation) -> bool:
    """True for transposes, reshapes, and broadcasts that repeat no number."""
    values = [*op.operands, *op.results] if op.name in _MOVES else []
    return len({prod(value.type.shape) for value in values}) == 1


@lru_cache(maxsize=256)
def _lowered(aval: jax.ShapeDtypeStruct, kind: str) -> str:
    return jax.jit(lambda x: quantize(x, kind)).lower(aval).as_text()


def quantize(x: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Scales and rounds an array to ``float8_e4m3fn`` or ``float8_e5m2``.

    A barrier follows; without it, XLA transposes 16-bit numbers.

    Returns:
        The rounded ``x / scale``, and the scale by the largest finite magnitude: a
        power of two in float32 that the dtype of ``x`` represents, too.
    """
    finite = lax.select(lax.is_finite(x), lax.abs(x), lax.full_like(x, 0))
    largest = lax.reduce_max(finite, tuple(range(x.ndim))).astype(jnp.float32)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    power = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)  # Exponent.
    least = jnp.finfo(x.dtype).smallest_normal
    # XLA multiplies the reciprocal by a step's constants: it is far from infinite.
    scale = jnp.maximum(power * 2.0 ** -_EXPONENT[kind], max(float(least), 2.0**-64))
    scale = lax.select(power > 0, scale, jnp.ones_like(scale))
    rounded = (x.astype(jnp.float32) * lax.broadcast(1 / scale, x.shape)).astype(kind)
    return lax.optimization_barrier(rounded), scale


# ----------------------------------------------- stacks from one loop for a later one


def _stacks(taken: Sequence[_Product]) -> dict[ir.Operation, ir.Operation]:
    """Finds 16-bit stacks of loops whose slices are operands in e4m3, and nothing else.

    Returns:
        For each op that reads slices, the op of an earlier loop that writes them.
    """
    pairs = [(one.op, i) for one in taken for i in (0, 1) if i != one.gradient]
    found, uses = dict[ir.Operation, ir.Operation](), {*pairs}
    for op, i in pairs:
        read = shardy.owner_of(_unmoved(op.operands[i])[0])
        if read and (write := _write_of(read)) and _readers(read.results[0]) <= uses:
            found[read] = write
    return found


def _write_of(read: ir.Operation) -> ir.Operation | None:
    """Returns an earlier loop's op that writes a stack for `read` alone, or None."""
    if read.name != "stablehlo.dynamic_slice":
        return None
    stack: Any = read.operands[0]
    made: Any = _source(stack) if isinstance(stack.owner, ir.Block) else None
    first = made and shardy.owner_of(made)
    if not first or first.name != "stablehlo.while" or _source(made) is None:
        return None
    later, place = stack.owner.owner, ir.BlockArgument(stack).arg_number
    start = ir.OpResult(made).result_number
    write: Any = shardy.owner_of(shardy.returned(first.regions[1])[start])
    values = [made, write.results[0], later.results[place]]
    for loop, i in ((first, start), (later, place)):  # Condition and body of each.
        values += [region.blocks[0].arguments[i] for region in loop.regions]
    is_alone = [len([*v.uses]) for v in values] == [1, 1, 0, 0, 1, 0, 2]
    slices = [one.type.shape for one in (write.operands[1], read.results[0])]
    is_whole = slices == [[1, *stack.type.shape[1:]]] * 2
    return write if is_alone and is_whole and is_zero(first.operands[start]) else None


def _readers(value: ir.Value) -> set[tuple[ir.Operation, int]]:
    """Returns a value's readers, also behind moves, as (op, operand number) pairs."""
    found = set[tuple[ir.Operation, int]]()
    for use in value.uses:
        op = use.owner.operation
        found |= _readers(op.results[0]) if _is_move(op) else {(op, use.operand_number)}
    return found


def _stack_copies(read: ir.Operation, write: ir.Operation, known: _Copies) -> None:
    """Stacks FP8 copies and their scales in place of 16-bit slices."""
    number, scale = _quantized(write.operands[1], _FORWARD, known)
    stack, first = write.operands[0], write.operands[0].owner.owner
    with ir.InsertionPoint(first), first.location:
        narrow = shardy.of_element(scale.type, number.type.element_type)
        zeros = shardy.spread(shardy.constant("0.0", narrow), stack.type.shape)
        scales = shardy.spread(shardy.constant("0.0", scale.type), stack.type.shape[:1])
    first.operands[ir.BlockArgument(stack).arg_number] = zeros
    for op in (write, read):
        scales = _carry(op.operands[0].owner.owner, scales, known)
    write.operands[1] = number
    write.results[0].set_type(write.operands[0].type)
    body, later = (op.operands[0].owner for op in (write, read))
    with ir.InsertionPoint(write), write.location:
        row, start = shardy.spread(scale, [1]), [write.operands[2]]
        filled = stablehlo.dynamic_update_slice(body.arguments[-1], row, start)
    [*_, last] = body.operations
    last.operands[len(last.operands) - 1] = filled
    with ir.InsertionPoint(read), read.location:
        stack, *start = read.operands
        number = stablehlo.dynamic_slice(stack, start, read.results[0].type.shape)
        row = stablehlo.dynamic_slice(later.arguments[-1], start[:1], [1])
        known[read.results[0], _FORWARD] = number, stablehlo.reshape(scale.type, row)


def _carry(loop: Any, value: ir.Value, known: _Copies) -> ir.Value:
    """Remakes a loop so that it carries a value, too; returns the value's result."""
    carried = [*loop.operands, value]
    kinds = [one.type for one in carried]
    kept = {name: loop.attributes[name] for name in loop.attributes}
    with ir.InsertionPoint(loop), loop.location as location:
        made = ir.Operation.create(loop.name, kinds, carried, kept, regions=2)
    for old, region in zip(loop.regions, made.regions, strict=True):
        block = old.blocks[0]
        block.append_to(region)
        block.add_argument(value.type, location)
        for argument, kind in zip(block.arguments, kinds, strict=True):
            argument.set_type(kind)
    [*_, last] = block.operations
    with ir.InsertionPoint(last), last.location:
        stablehlo.return_([*last.operands, block.arguments[-1]])
    last.erase()
    *results, added = made.results
    for old, new in zip(loop.results, results, strict=True):
        if (old, _FORWARD) in known:
            known[new, _FORWARD] = known.pop((old, _FORWARD))
    shardy.forward(loop.operation, results)
    return added
