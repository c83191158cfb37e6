"""Lowers parts of programs by themselves, and evaluates constants.

A part's ops are cloned into the body of a placeholder function with the part's types,
lowered by JAX. So donation and arrays of several processes work as for any jitted
function. A whole step has JAX's own types: StableHLO has integers for random
keys, and no weak types. Each part is cut out once, and lowered with many shardings,
since cutting one layer out of 48 takes 0.37 s.

A mask made of iotas and constants is the same in every step. NumPy computes it as XLA
would: integers wrap, bfloat16 rounds. Its arrays may have one entry along dims in
which they do not vary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from threading import Lock
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding

from cfp.program import shardy
from cfp.program.constrain import Constraints, constrain, located, partition_spec
from cfp.program.graph import Op, Program, Spec, numpy_dtype, reached, searched_once
from cfp.program.memory import in_memory, on_auto_mesh, placed_avals
from cfp.program.replace import erase_unread


@dataclass(frozen=True, slots=True)
class Part:
    """A set of a program's ops that is compiled by itself.

    Attributes:
        ops: ids in program order, with constants; ops in their regions are left out.
        inputs: ids of arguments: values that the ops read and do not make; maybe more.
        outputs: ids of returned values; from `cut_part` the values used outside.
        instead: (id of an operand, id of the value to read in its place) pairs.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instead: tuple[tuple[int, int], ...] = ()

    def is_whole(self, program: Program) -> bool:
        """True if inputs and outputs are the program's, in order."""
        return (self.inputs, self.outputs) == (program.args, program.outputs)


@dataclass(frozen=True, slots=True)
class Numbered:
    """New ids for a part's ops and values, from 0.

    Attributes:
        digest: of ops, types and links, not ids; outputs, most constants do not count.
        values: {value id in the program: id in the part}.
        ops: {op id in the program: id in the part}.
    """

    digest: str
    values: Mapping[int, int]
    ops: Mapping[int, int]

    def translated(self, constraints: Constraints) -> Constraints:
        """Returns the constraints on the part's values and ops, with the part's ids."""
        return Constraints(
            {
                self.values[v]: spec
                for v, spec in constraints.values.items()
                if v in self.values
            },
            {
                (self.ops[op], index): spec
                for (op, index), spec in constraints.uses.items()
                if op in self.ops
            },
            tuple(
                replace(
                    one,
                    forward=tuple(self.ops[o] for o in one.forward if o in self.ops),
                    backward=tuple(self.ops[o] for o in one.backward if o in self.ops),
                )
                for one in constraints.rematerialized
            ),
            tuple(
                found
                for one in constraints.replaced
                if (found := one.translated(self.values, self.ops)) is not None
            ),
        )


@searched_once
def numbered(program: Program, part: Part) -> Numbered:
    """Numbers a part's values, inputs first, and its ops in program order."""
    values: dict[int, int] = {v: i for i, v in enumerate(part.inputs)}
    digest = hashlib.sha256()
    ops: dict[int, int] = {}
    instead = dict(part.instead)
    for op_id in sorted(program.with_bodies(part.ops)):
        op = program.ops[op_id]
        ops[op_id] = len(ops)
        for v in (*op.entries, *op.results):
            values.setdefault(v, len(values))
        reads = [values.setdefault(instead.get(v, v), len(values)) for v in op.reads]
        types = [str(program.values[v]) for v in (*op.operands, *op.results)]
        digest.update(repr((op.name, op.structure, reads, types)).encode())
    return Numbered(digest.hexdigest(), values, ops)


def cut_part(program: Program, wanted: Sequence[int]) -> Part:
    """Returns the part of top-level ops, with the constants that they need."""
    return _cut(program, tuple(wanted))


def whole(program: Program) -> Part:
    """Returns the part of all ops, with the step's arguments and results.

    These include unread arguments, returned arguments, and repeated results.
    """
    top = tuple(op.id for op in program.ops if op.parent < 0)
    return Part(top, program.args, program.outputs)


@searched_once
def _cut(program: Program, wanted: tuple[int, ...]) -> Part:
    ops = program.ops

    def constants(op: int) -> list[int]:
        inner = (v for i in ops[op].body for v in ops[i].operands)
        makers = {program.values[v].producer for v in (*ops[op].reads, *inner)}
        return [i for i in makers & program.leaf_ops if program.is_top_level(i)]

    chosen = sorted(program.with_bodies(reached(wanted, constants)))
    top = tuple(i for i in chosen if program.is_top_level(i))
    made = {r for i in chosen for r in ops[i].results}
    inside = made.union(*(ops[i].entries for i in chosen))
    inputs = dict.fromkeys(v for i in chosen for v in ops[i].reads if v not in inside)
    known = {*chosen}
    outputs = dict.fromkeys(
        r
        for i in top
        if i not in program.leaf_ops
        for r in ops[i].results
        if any(user not in known for user, _ in program.users[r])
    )
    outputs |= dict.fromkeys(v for v in program.outputs if v in made)
    return Part(top, tuple(inputs), tuple(outputs))


def lower_part(
    program: Program,
    part: Part,
    mesh: Mesh,
    constraints: Constraints,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    donated: Sequence[int] = (),
) -> jax.stages.Lowered:
    """Lowers a part of a program with constraints, ready to compile.

    Zeros replace the results of host callbacks. All values are in device memory, except
    in a whole program.

    Args:
        constraints: in the program's value and op ids.
        in_specs, out_specs: shardings of the part's inputs and outputs.
        donated: positions of inputs whose memory the part may overwrite.
    """
    types = signature(program, part)
    lowered = types.lower(*types.shardings(mesh, in_specs, out_specs), donated)
    module = shardy.stablehlo(lowered)
    with _CUTTING:  # Threads share the result.
        cut = _excerpt(program, part)
    with module.context, ir.Location.unknown():
        source = ir.Module.parse(cut.text)
        inside = numbered(program, part).translated(constraints)
        constrain(source, cut, mesh, inside)
        block = shardy.main_block(source)
        *ops, last = [one.operation for one in block.operations]
        shardy.fill(module, source, block.arguments, ops, last.operands)
        if inside.replaced:
            erase_unread(module)
        for op in shardy.every_op(module):
            if shardy.calls_host(op):  # Parts do not have the user's functions.
                with ir.InsertionPoint(op):
                    zeros = [shardy.zeros(result.type) for result in op.results]
                shardy.forward(op, zeros)
            elif shardy.moves_to_memory(op) and not part.is_whole(program):
                # Inputs and outputs of a part are in device memory.
                shardy.forward(op, [op.operands[0]])
        module.operation.attributes["sym_name"] = ir.StringAttr.get(program.name)
    return lowered


_CUTTING = Lock()


@searched_once
def _excerpt(program: Program, part: Part) -> Program:
    """Returns the part as a program with its own ids."""
    numbers = numbered(program, part)
    values, ops = numbers.values, numbers.ops
    read = {**values, **{v: values[other] for v, other in part.instead}}

    def renumbered(old: int) -> Op:
        op = program.ops[old]
        return replace(
            op,
            id=ops[old],
            operands=tuple(read[v] for v in op.operands),
            results=tuple(values[v] for v in op.results),
            yields=tuple(read[v] for v in op.yields),
            entries=tuple(values[v] for v in op.entries),
            body=tuple(ops[o] for o in op.body),
            parent=ops.get(op.parent, -1),
        )

    records = [
        replace(
            program.values[old],
            id=new,
            producer=ops.get(program.values[old].producer, -1),
            origin=read.get(program.values[old].origin, -1),
        )
        for old, new in values.items()
    ]
    count = len(part.inputs)
    module = shardy.stablehlo(cut_out(program, part))
    return Program(
        values=tuple(records),
        ops=tuple(map(renumbered, ops)),
        args=tuple(range(count)),
        outputs=tuple(values[v] for v in part.outputs),
        arg_names=("",) * count,
        output_names=("",) * len(part.outputs),
        alias=(None,) * count,
        text=shardy.bytecode(module.operation),
    )


def cut_out(
    program: Program, part: Part, shardings: Sequence[NamedSharding] = ()
) -> jax.stages.Lowered:
    """Lowers a part as a function of its inputs, without constraints.

    The inputs have `shardings`; () leaves them open.
    """
    lowered = signature(program, part).lower(shardings)
    module = shardy.stablehlo(lowered)
    with module.context, ir.Location.unknown():
        source = ir.Module.parse(program.text)
        ops, values = located(source, program)
        for old, new in part.instead:
            values[old].replace_all_uses_with(values[new])
            values[old] = values[new]
        given = [values[v] for v in part.inputs]
        made = [values[v] for v in part.outputs]
        shardy.fill(module, source, given, [ops[i] for i in part.ops], made)
    return lowered


Avals = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Types of inputs and outputs, in order.

    Attributes:
        memory: kinds of host memory of the inputs and of the outputs; "" or an empty
            tuple for device memory.
    """

    inputs: Avals
    outputs: Avals
    memory: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def shardings(
        self, mesh: Mesh, in_specs: Sequence[Spec], out_specs: Sequence[Spec]
    ) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """Returns the shardings of inputs and of outputs, with their memory."""
        ins, outs = self.memory
        return (
            in_memory(shardings(mesh, in_specs, self.inputs), ins),
            in_memory(shardings(mesh, out_specs, self.outputs), outs),
        )

    def lower(
        self,
        in_shardings: Sequence[NamedSharding] = (),
        out_shardings: Sequence[NamedSharding] | None = None,
        donate_argnums: Sequence[int] = (),
    ) -> jax.stages.Lowered:
        """Lowers a placeholder of these types; the caller replaces its body."""

        def placeholder(*inputs: jax.Array) -> tuple[jax.Array, ...]:
            # Results of a type share a zero: tracing hundreds is slow.
            zeros = {one: _zero(one) for one in dict.fromkeys(self.outputs)}
            return tuple(zeros[one] for one in self.outputs)

        placed = tuple(map(on_auto_mesh, in_shardings))
        jitted = jax.jit(
            placeholder,
            keep_unused=True,
            in_shardings=placed or None,
            out_shardings=out_shardings and tuple(out_shardings),
            donate_argnums=tuple(donate_argnums),
        )
        return jitted.lower(
            *(placed_avals(self.inputs, placed) if placed else self.inputs)
        )


def aval(program: Program, value: int) -> jax.ShapeDtypeStruct:
    """Returns a value's shape and dtype as JAX's type."""
    record = program.values[value]
    return jax.ShapeDtypeStruct(record.shape, numpy_dtype(record.dtype))


def signature(program: Program, part: Part) -> Signature:
    """Returns types of a part; keys, weak types and memory only for a whole step."""
    if part.is_whole(program) and program.arg_avals:
        memory = (program.arg_memory, program.output_memory)
        return Signature(program.arg_avals, program.output_avals, memory)
    return Signature(
        tuple(aval(program, v) for v in part.inputs),
        tuple(aval(program, v) for v in part.outputs),
    )


def shardings(
    mesh: Mesh, specs: Sequence[Spec], avals: Sequence[Any]
) -> tuple[NamedSharding, ...]:
    """Converts specs to shardings; drops a random key's last dim, of its data."""
    return tuple(
        NamedSharding(mesh, partition_spec(spec, len(one.shape)))
        for spec, one in zip(specs, avals, strict=True)
    )


def _zero(one: jax.ShapeDtypeStruct) -> jax.Array:
    zero = lax.full(one.shape, 0, one.dtype)
    if not one.weak_type:
        return zero
    return primitives.convert_element_type_p.bind(
        zero, new_dtype=one.dtype, weak_type=True, sharding=None
    )


def is_key(dtype: Any) -> bool:
    """True for dtypes of random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_name(dtype: Any) -> str:
    """Returns `jax.random.key_impl` of keys of a dtype: a name, or JAX's object."""
    found = []

    def look() -> jax.Array:
        key = lax.full((), 0, dtype)
        found.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(look)
    return found[0]


# --------------------------------------------------------------------------- constants

_MOST_ELEMENTS = 2**28
_MOST_KEPT = 2**16
_NOTHING: Mapping[int, np.ndarray] = MappingProxyType({})
_SAME_IN_EVERY_DTYPE: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negate": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "select": np.where,
    "sign": np.sign,
    "subtract": np.subtract,
    "xor": np.bitwise_xor,
}
COMPARE: Mapping[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "GE": np.greater_equal,
    "GT": np.greater,
    "LE": np.less_equal,
    "LT": np.less,
}


class NotConstant(Exception):
    """Raised if a value is not computed: not constant, not supported, or too large."""


class Constants:
    """Evaluates values of one program from its constants, and from given values."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._module = shardy.parsed(program.text)
        self._ops = shardy.program_ops(shardy.main_function(self._module))
        self._known: dict[int, np.ndarray] = {}

    def value(
        self,
        v: int,
        stands: Callable[[int], int],
        given: Mapping[int, np.ndarray] = _NOTHING,
    ) -> np.ndarray:
        """Returns a value's array; dims along which it does not vary may have size 1.

        Args:
            stands: maps a value id to that of an equal value, or to itself.
            given: {value id: array} of further known values.

        Raises:
            NotConstant: the value cannot be computed.
        """
        known = dict(given) if given else self._known
        stack = [wanted := stands(v)]
        while stack:
            one = stack[-1]
            if one in known:
                stack.pop()
                continue
            op = self._program.maker(one)
            if op is None or len(op.results) > 1:
                raise NotConstant("an argument")
            reads = [stands(x) for x in op.operands]
            missing = [x for x in reads if x not in known]
            stack += missing
            if not missing:
                known[one] = self._made(op, [known[x] for x in reads])
        found = known[wanted]
        for one in [x for x, array in known.items() if array.size > _MOST_KEPT]:
            del known[one]
        return found

    def _made(self, op: Op, reads: list[np.ndarray]) -> np.ndarray:
        [result] = op.results
        value = self._program.values[result]
        dtype, shape = numpy_dtype(value.dtype), value.shape
        with np.errstate(all="ignore"):
            found = self._applied(op, reads, dtype, shape)
        if found.ndim != len(shape) or found.size > _MOST_ELEMENTS:
            raise NotConstant(f"{op.kind} of {value}")
        return found.astype(dtype, copy=False)

    def _applied(
        self, op: Op, reads: list[np.ndarray], dtype: np.dtype, shape: tuple[int, ...]
    ) -> np.ndarray:
        kind = op.kind
        if kind in _SAME_IN_EVERY_DTYPE:
            return np.asarray(_SAME_IN_EVERY_DTYPE[kind](*reads))
        if kind == "compare":
            return np.asarray(COMPARE[op.direction](*reads))
        if kind == "divide":
            divide = _divided if dtype.kind in "iu" else np.divide
            return np.asarray(divide(*reads))
        if kind == "remainder" and reads[1].all():
            return np.fmod(*reads)
        if kind in ("sqrt", "rsqrt") and reads[0].size == 1:  # Such as a scale.
            return reads[0].astype(float) ** (0.5 if kind == "sqrt" else -0.5)
        if kind == "convert":
            return _converted(reads[0], dtype)
        if kind == "constant":
            return self._constant(op, shape)
        if kind == "iota":
            [dim] = op.integers("iota_dimension")
            along = [n if d == dim else 1 for d, n in enumerate(shape)]
            return _converted(np.arange(shape[dim]).reshape(along), dtype)
        if kind == "transpose":
            return reads[0].transpose(op.integers("permutation"))
        if kind == "broadcast_in_dim":
            sizes = [1] * len(shape)
            places = op.integers("broadcast_dimensions")
            for dim, n in zip(places, reads[0].shape, strict=True):
                sizes[dim] = n
            return reads[0].reshape(sizes)
        if kind == "reshape":
            return _reshaped(reads[0], self._program.shape(op.operands[0]), shape)
        if kind == "slice":
            whole = np.broadcast_to(reads[0], self._program.shape(op.operands[0]))
            ends = ("start_indices", "limit_indices", "strides")
            cuts = zip(*(op.integers(name) for name in ends), strict=True)
            return whole[tuple(slice(*cut) for cut in cuts)]
        raise NotConstant(op.name)

    def _constant(self, op: Op, shape: tuple[int, ...]) -> np.ndarray:
        try:
            value = shardy.numbers_of(self._ops[op.id])
            if value is None:
                raise NotConstant("a constant that is large or complex")
            if value.is_splat:
                splat: Any = value.get_splat_value()
                return np.full([1] * len(shape), splat.value)
            return np.array(value).reshape(shape)
        except TypeError as error:  # of small floats
            raise NotConstant("a constant of a dtype that numpy lacks") from error


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divides integers, rounding towards zero as XLA; raises NotConstant for x / 0."""
    if not y.all():
        raise NotConstant("a division by zero")
    quotient = np.floor_divide(x, y)
    return quotient + ((quotient < 0) & (quotient * y != x)).astype(x.dtype)


def _converted(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts as XLA does; raises NotConstant for floats beyond an integer's range."""
    if dtype.kind == "b":
        return x != 0
    if dtype.kind in "iu" and x.dtype.kind not in "iub":
        wide, ends = x.astype(np.float64), np.iinfo(dtype)
        if not ((wide >= ends.min) & (wide <= ends.max)).all():
            raise NotConstant("a conversion beyond an integer's range")
        return np.trunc(wide).astype(dtype)
    return x.astype(dtype)


def _reshaped(
    x: np.ndarray, before: tuple[int, ...], after: tuple[int, ...]
) -> np.ndarray:
    if [n for n in before if n > 1] != [n for n in after if n > 1]:
        if prod(before) > _MOST_ELEMENTS:
            raise NotConstant("a reshape of a large value")
        return np.broadcast_to(x, before).reshape(after)
    sizes = iter([n for n, size in zip(x.shape, before, strict=True) if size > 1])
    return x.reshape([next(sizes) if n > 1 else 1 for n in after])
