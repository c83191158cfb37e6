"""Widens a program to float32: the same ops with wider types.

A plan's results are compared with another program's in float32. In bfloat16 orders of
summation differ too much, and optimizers that divide numbers by their size amplify the
difference. Widening may add conversions and remove roundings. Shardings, collectives
and the order of other ops stay.

:class:`Written` has the ops that a kernel replaces, so that both can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import tree_flatten, tree_unflatten

from cfp.program import shardy
from cfp.program.graph import Program, numpy_dtype, reached
from cfp.program.part import Part, Signature, aval, cut_out, signature
from cfp.program.replace import Replacement, aval_of
from cfp.program.step import FlatStep
from cfp.program.trace import Lowering, lower_step

# Narrow element types, by themselves or after a shape.
_NARROW = re.compile(r"(?:\b|\dx)(bf16|f16|f8E\w+|f6E\w+|f4E\w+)\b")
# Element types in tensor<8x4xf32> and complex<f32>.
_DOUBLE = re.compile(r"[<x]f64>")
_SINGLE = re.compile(r"[<x](?:f32|bf16|f16|f8E\w+|f6E\w+|f4E\w+)>")

# Exact ops, whose results depend on bits or on the text of a number.
_EXACT = ("bitcast_convert", "constant")
# Ops whose types are fixed: external code and shared functions have them.
_FIXED = ("custom_call", "composite", *_EXACT)
# Ops on the tuples of custom calls; elements have the calls' types.
_TUPLES = ("tuple", "get_tuple_element")
_MANTISSA_BITS = 23  # of a float32
_PRODUCTS = ("dot_general", "dot", "convolution", "ragged_dot")


@dataclass(frozen=True, slots=True)
class Widened:
    """A lowered step with float32 in place of narrower floats.

    Attributes:
        step: the step with wider arguments and results.
        lowering: its lowering.
        narrow: names of ops that keep narrow types; see `widen`.
        double: True if all floats are float64, and there are some.
        unchanged: True if the module's text stays as it was.
    """

    step: FlatStep
    lowering: Lowering
    narrow: tuple[str, ...]
    double: bool
    unchanged: bool


def widened(
    step: FlatStep,
    lowering: Lowering,
    in_shardings: Sequence[NamedSharding],
    out_shardings: Sequence[NamedSharding],
    *,
    precise: bool,
    perturbed: bool = False,
) -> Widened:
    """Returns a lowered step with float32 in place of narrower floats; see `widen`.

    Other ops in float32 or more stay.

    Args:
        lowering: the step's lowering, with constraints; changed in place.
        in_shardings, out_shardings: shardings of the lowering, one for each leaf.
        precise, perturbed: see `widen`; CPUs have one precision of products only.
    """
    text = lowering.text
    narrow = widen(lowering.module, precise=precise, perturbed=perturbed)
    # JAX has types of arguments and results beside the module. So a function with wide
    # types is lowered, and gets the module. Both have the same host callbacks, in the
    # same order.
    wide = _wide_step(step)
    outer = lower_step(wide, in_shardings, list(out_shardings))
    shardy.replace_body(outer.module, lowering.module)
    wide_text = lowering.text
    double = bool(_DOUBLE.search(wide_text)) and not _SINGLE.search(wide_text)
    return Widened(wide, outer, narrow, double, unchanged=wide_text == text)


def wide_dtype(dtype: Any) -> Any:
    """Returns float32 for narrower floats, and other dtypes unchanged."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def with_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """Converts an array to a dtype, if it has another."""
    return x if x.dtype == dtype else x.astype(dtype)


def _wide_step(step: FlatStep) -> FlatStep:
    """Returns the step with wider arguments and results, but its own types inside."""
    run = jaxpr_as_fun(step.traced.jaxpr)
    out_tree = tree_flatten(step.traced.out_info)[1]

    def wide(*args: Any, **kwargs: Any) -> Any:
        leaves = step.flatten(args, kwargs)
        narrow = [
            with_dtype(leaf, aval.dtype)
            for leaf, aval in zip(leaves, step.avals, strict=True)
        ]
        results = [with_dtype(r, wide_dtype(r.dtype)) for r in run(*narrow)]
        return tree_unflatten(out_tree, results)

    wide.__name__ = wide.__qualname__ = step.flat_fn.__name__
    return replace(step, fn=wide, avals=tuple(map(_wide_aval, step.avals)))


def _wide_aval(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    dtype = wide_dtype(one.dtype)
    return jax.ShapeDtypeStruct(one.shape, dtype, weak_type=one.weak_type)


# ------------------------------------------------------------------------- the module


def widen(
    module: ir.Module,
    *,
    precise: bool = True,
    perturbed: bool = False,
    only_data: bool = False,
) -> tuple[str, ...]:
    """Widens a normalised module to float32, in place; some ops keep narrow types.

    Args:
        precise: True gives products the highest precision.
        perturbed: True moves narrow operands of such ops, and results of external
            kernels, up or down by half of their last bit, a little more than rounding.
        only_data: True keeps types of values computed from constants and integers only.

    Returns:
        Names of ops that keep narrow types, such as external kernels, and of ops that
        `only_data` keeps. Roundings to 8 bits, constants and tuples stay unnamed.
    """
    with module.context, ir.Location.unknown():
        functions = _called(module)
        ops = [op for function in functions for op in shardy.walk(function)]
        kept = _of_integers(module) if only_data else ()
        fixed = {
            op: [v.type for v in op.operands]
            for op in ops
            if op in kept or _is_fixed(op)
        }
        for function in functions:
            for argument in function.regions[0].blocks[0].arguments:
                argument.set_type(_wide(argument.type))
        for op in ops:
            if op in fixed:
                continue
            entries = (a for r in op.regions for b in r.blocks for a in b.arguments)
            for value in (*op.results, *entries):
                value.set_type(_wide(value.type))
            kind = op.name.partition(".")[2]
            if kind in _PRODUCTS:
                _make_precise(op, precise)
            elif kind == "reduce_precision":
                bits = ir.IntegerAttr(op.attributes["mantissa_bits"]).value
                if bits < _MANTISSA_BITS:  # It only rounds.
                    shardy.forward(op, [op.operands[0]])
        for op, reads in fixed.items():
            _join(op, reads, perturbed)
        for function in functions:
            _retype(function)
        rounds = (
            op
            for op, reads in fixed.items()
            if op.name.partition(".")[2] not in _TUPLES
            if not _is_exact(op) or any(map(_is_narrow, reads))
        )
        return tuple(sorted({*map(_name, rounds)}))


def _of_integers(module: ir.Module) -> set[ir.Operation]:
    """Returns main's ops without regions that need only constants and integers."""
    block = shardy.main_block(module)
    known: set[ir.Value] = {
        a
        for a in block.arguments
        if isinstance(ir.RankedTensorType(a.type).element_type, ir.IntegerType)
    }
    found: set[ir.Operation] = set()
    for op in (one.operation for one in block.operations):
        if not len(op.regions) and known.issuperset(op.operands):
            known.update(op.results)
            found.add(op)
    return found


def _called(module: ir.Module) -> list[ir.Operation]:
    """Returns the main function and all functions that it calls, directly or not."""
    named = {shardy.symbol_name(f): f for f in shardy.functions(module.operation)}

    def further(name: str) -> list[str]:
        calls = (op for op in shardy.walk(named[name]) if op.name == "func.call")
        return [ir.FlatSymbolRefAttr(op.attributes["callee"]).value for op in calls]

    main = shardy.symbol_name(shardy.main_function(module))
    return [named[name] for name in reached([main], further)]


def _has_narrow(kind: ir.Type) -> bool:
    """True for tensors of narrow floats, and tuples with one, as calls return."""
    if isinstance(kind, ir.TupleType):
        return any(_has_narrow(kind.get_type(i)) for i in range(kind.num_types))
    return _is_narrow(kind)


def _is_narrow(kind: ir.Type) -> bool:
    return isinstance(kind, ir.RankedTensorType) and bool(
        _NARROW.fullmatch(str(kind.element_type))
    )


def _wide(kind: ir.Type) -> ir.Type:
    if not _is_narrow(kind):
        return kind
    return shardy.of_element(kind, ir.F32Type.get())


def _is_fixed(op: ir.Operation) -> bool:
    """True if an op has narrow types and has to keep them."""
    if not any(_has_narrow(v.type) for v in (*op.operands, *op.results)):
        return False
    kind = op.name.partition(".")[2]
    if kind in _TUPLES or _quantizes(op):
        return True
    if kind in _PRODUCTS or shardy.moves_to_memory(op):
        return False
    # Numbers in attributes have types, too.
    return kind in _FIXED or any(
        _NARROW.search(str(op.attributes[name])) for name in op.attributes
    )


def _quantizes(op: ir.Operation) -> bool:
    """True if an op rounds float32 to 8 bits: widening keeps these numbers."""
    if op.name != "stablehlo.convert":
        return False
    return "f32>" in str(op.operands[0].type) and "f8" in str(op.results[0].type)


def _is_exact(op: ir.Operation) -> bool:
    return op.name.partition(".")[2] in _EXACT or _quantizes(op)


def _name(op: ir.Operation) -> str:
    called = (name for name in ("call_target_name", "name") if name in op.attributes)
    texts = [ir.StringAttr(op.attributes[name]).value for name in called]
    return " ".join([op.name, *texts])


def _join(op: ir.Operation, reads: Sequence[ir.Type], perturbed: bool) -> None:
    """Converts operands back to narrow types of `reads`, narrow results to float32."""
    for index, kind in enumerate(reads):
        if _is_narrow(kind):
            with ir.InsertionPoint(op):
                read = op.operands[index]
                read = _perturbed(read, kind, 0) if perturbed else read
                op.operands[index] = stablehlo.convert(kind, read)
    for result in op.results:
        if _is_narrow(result.type):
            with ir.InsertionPoint.after(op):
                wide = shardy.converted(result, ir.F32Type.get())
                bit = _MANTISSA_BITS - _finfo(result.type).nmant
                is_perturbed = perturbed and not _is_exact(op)
                made = _perturbed(wide, result.type, bit) if is_perturbed else wide
            maker: Any = wide.owner
            result.replace_all_uses_except(made, maker.operation)


def _finfo(kind: ir.Type) -> Any:
    return jnp.finfo(numpy_dtype(str(ir.RankedTensorType(kind).element_type)))


def _perturbed(value: ir.Value, kind: ir.Type, bit: int) -> ir.Value:
    """Moves float32 numbers by half of a narrow type's last bit, up or down.

    Zero, numbers that would exceed the type, and types without a mantissa (scales)
    stay. The number's own bit of index `bit` decides between up and down.
    """
    info = _finfo(kind)
    half = 2.0 ** -(info.nmant + 1)

    def move(x: jax.Array) -> jax.Array:
        bits = lax.shift_right_logical(
            lax.bitcast_convert_type(x, jnp.uint32), jnp.full_like(x, bit, jnp.uint32)
        )
        share = (bits & 1).astype(jnp.float32) * (2 * half) - half
        # Subnormal numbers are rounded as much as the smallest normal one.
        unit = lax.max(lax.abs(x), jnp.full_like(x, info.smallest_normal))
        stays_finite = lax.abs(x) < float(info.max) / (1 + half)
        return lax.select(stays_finite, x + share * unit * lax.sign(x), x)

    if not info.nmant:
        return value
    return shardy.graft(jax.jit(move).lower(aval_of(value.type)).as_text(), [value])[0]


def _make_precise(op: ir.Operation, precise: bool) -> None:
    highest = f"#{op.name.partition('.')[0]}<precision HIGHEST>"
    if precise:
        config = ir.Attribute.parse(f"[{highest}, {highest}]")
        op.attributes["precision_config"] = config
    if "algorithm" in op.attributes:
        del op.attributes["algorithm"]  # It names types, usually narrower ones.


def _retype(function: ir.Operation) -> None:
    taken = [a.type for a in function.regions[0].blocks[0].arguments]
    made = [v.type for v in shardy.returned(function.regions[0])]
    kind = ir.FunctionType.get(taken, made)
    function.attributes["function_type"] = ir.TypeAttr.get(kind)


# ------------------------------------------------------------------- replaced ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The program's own ops between the operands and the results of a replacement.

    Attributes:
        inputs: ids of values from which the ops start: the replacement's reads that
            are not `derived`, then `foreign`.
        foreign: inputs that the replacement does not read, such as another loop's
            residuals.
        derived: ids of reads that can be computed from other reads or constants.
        makes: ids of the results of the replacement.
    """

    program: Program
    replacement: Replacement
    inputs: tuple[int, ...]
    foreign: tuple[int, ...]
    derived: tuple[int, ...]
    makes: tuple[int, ...]

    def aval(self, value: int) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a value."""
        return aval(self.program, value)

    @property
    def text(self) -> str:
        """StableHLO text of `lower()` for one device, without locations."""
        return str(shardy.stablehlo(self.lower()).operation.get_asm())

    @property
    def _part(self) -> Part:
        outputs = self.derived + self.makes
        ops = sorted(_between(self.program, self.inputs, outputs)[0])
        reads = {v for op in ops for v in self.program.ops[op].operands}
        reads = reads.union(outputs).difference(self.inputs)
        entering = {v: _entering(self.program, v) for v in reads}
        instead = tuple((v, new) for v, new in entering.items() if v != new)
        return Part(tuple(ops), self.inputs, outputs, instead)

    def lower(self, *shardings: NamedSharding) -> jax.stages.Lowered:
        """Lowers the ops as a function from `inputs` to ``derived + makes``.

        There is a sharding for each input, or none for one device.
        """
        return cut_out(self.program, self._part, shardings)

    def widened(self, *shardings: NamedSharding) -> jax.stages.Lowered:
        """Like `lower`, with float32 in place of narrow floats, also in the signature.

        Values from integers and constants only, such as masks, keep their types. So do
        operands and results of external kernels. Products have the highest precision.
        """
        module = shardy.stablehlo(self.lower(*shardings))
        widen(module, only_data=True)
        types = signature(self.program, self._part)
        given, made = (tuple(map(_wide_aval, x)) for x in (types.inputs, types.outputs))
        lowered = Signature(given, made).lower(shardings)
        shardy.replace_body(shardy.stablehlo(lowered), module)
        return lowered

    def replaced(self, mesh: Mesh, *reads: jax.Array) -> list[jax.Array]:
        """Computes `makes` by the functions; `reads` are ``inputs + derived``."""
        known = dict(zip(self.inputs + self.derived, reads, strict=True))
        made: list[jax.Array] = []
        kept: Sequence[jax.Array] = ()
        functions = self.replacement.functions.stages(mesh)
        for stage, function in zip(self.replacement.stages, functions, strict=True):
            own = [known[self.program.ops[op].operands[i]] for op, i in stage.reads]
            results = function(*own, *kept)
            made += results[: len(stage.makes)]
            kept = results[len(stage.makes) :]
        return made


def written(program: Program, replacement: Replacement) -> Written:
    """Finds the ops that a replacement replaces."""
    stages = replacement.stages
    uses = {program.ops[op].operands[i] for one in stages for op, i in one.reads}
    makes = tuple(v for one in stages for v in one.makes)
    inputs: list[int] = []
    derived: list[int] = []
    for v in sorted(uses, key=lambda v: program.values[v].producer):
        free = _between(program, inputs, [v])[1]
        (inputs if free else derived).append(v)
    foreign = sorted(_between(program, inputs, [*derived, *makes])[1])
    return Written(
        program=program,
        replacement=replacement,
        inputs=(*inputs, *foreign),
        foreign=tuple(foreign),
        derived=tuple(derived),
        makes=makes,
    )


def _between(
    program: Program, inputs: Collection[int], outputs: Collection[int]
) -> tuple[set[int], set[int]]:
    """Ids of ops without regions between values, and of other values that they need."""
    ops: set[int] = set()
    free: set[int] = set()
    known = set(inputs)
    stack = [v for v in outputs if v not in known]
    while stack:
        v = _entering(program, stack.pop())
        if v in known:
            continue
        op = program.maker(v)
        if op is None or op.has_regions:
            free.add(v)
        elif op.id not in ops:
            ops.add(op.id)
            stack += [w for w in op.operands if w not in known]
    return ops, free


def _entering(program: Program, value: int) -> int:
    """Returns the first value of a loop argument that never changes; else `value`."""
    while (origin := program.values[value].origin) >= 0:
        loop = next(op for op in program.ops if value in op.entries)
        place = loop.entries.index(value) % len(loop.operands)
        if loop.kind != "while" or loop.yields[place] not in loop.entered(place):
            return value
        value = origin
    return value
