"""Parts of programs, types of what crosses their edges, and parcels of programs.

A function that has just these types is lowered in the place of a part of a program,
whose ops then become its body. Types of a whole step say more than its StableHLO: keys
of random numbers are integers there, and numbers that take the type of whatever they
meet have one.

A parcel is a program that another process can compile. A lowering holds devices and
MLIR, which stay in their process. Its module is written down; elsewhere a stand-in with
the same signature is lowered for devices there, and given the module in place of its
own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives
from jax.sharding import Mesh, NamedSharding

from cfp.program.constrain import partition_spec
from cfp.program.graph import Program, Spec, numpy_dtype, searched_once
from cfp.program.memory import in_memory, on_auto_mesh, placed_avals


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a program's ops, seen as a program of its own.

    Attributes:
        ops: ids of top-level ops, in program order, constants included.
        outputs: ids of the values that others read from it.
        instead: (id, id) pairs: what its ops read in the place of values that none
            of them makes.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instead: tuple[tuple[int, int], ...] = ()

    def is_whole(self, program: Program) -> bool:
        """True of a part that takes and gives all that a program does, in its order."""
        return (self.inputs, self.outputs) == (program.args, program.outputs)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A part's ops and values, numbered from its own start.

    Attributes:
        digest: the same for parts of any programs that have the same structure, as
            `cfp.program.read` has it.
    """

    digest: str
    values: Mapping[int, int]
    ops: Mapping[int, int]


@searched_once
def numbered(program: Program, part: Part) -> Numbered:
    """Numbers what a part is made of."""
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
    """Completes a set of top-level ops with the constants that it needs."""
    return _cut(program, tuple(wanted))


def whole(program: Program) -> Part:
    """All of a program, as a part.

    Its inputs and outputs are those of the step, in their order: arguments that nothing
    reads, results that are arguments, and results that stand there twice.
    """
    top = tuple(op.id for op in program.ops if op.parent < 0)
    return Part(top, program.args, program.outputs)


@searched_once
def _cut(program: Program, wanted: tuple[int, ...]) -> Part:
    chosen = set(wanted)
    stack = list(chosen)
    while stack:
        op = program.ops[stack.pop()]
        reads = [*op.reads]
        for inner in op.body:
            reads.extend(program.ops[inner].operands)
        for v in reads:
            producer = program.values[v].producer
            is_new_leaf = program.is_leaf(v) and producer not in chosen
            if is_new_leaf and program.is_top_level(producer):
                chosen.add(producer)
                stack.append(producer)
        chosen.update(op.body)
    inside = {
        r for i in chosen for r in (*program.ops[i].results, *program.ops[i].entries)
    }
    inputs: dict[int, None] = {}
    outputs: dict[int, None] = {}
    for op_id in sorted(chosen):
        op = program.ops[op_id]
        for v in op.reads:
            if v not in inside:
                inputs[v] = None
        if not program.is_top_level(op_id) or op_id in program.leaf_ops:
            continue
        for r in op.results:
            if any(user not in chosen for user, _ in program.users[r]):
                outputs[r] = None
    made = {r for i in chosen for r in program.ops[i].results}
    for v in program.outputs:
        if v in made:
            outputs[v] = None
    top = tuple(i for i in sorted(chosen) if program.is_top_level(i))
    return Part(top, tuple(inputs), tuple(outputs))


Avals = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Types of a program's inputs and outputs, in their order.

    Attributes:
        memory: of the inputs and of the outputs, the memory of the host that each is
            in, or ""; empty if none is.
    """

    inputs: Avals
    outputs: Avals
    memory: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def shardings(
        self, mesh: Mesh, in_specs: Sequence[Spec], out_specs: Sequence[Spec]
    ) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """Specs as shardings of the inputs, and of the outputs."""
        ins, outs = self.memory
        return (
            in_memory(shardings(mesh, in_specs, self.inputs), ins),
            in_memory(shardings(mesh, out_specs, self.outputs), outs),
        )

    def lower(
        self,
        in_shardings: Sequence[NamedSharding] | None = None,
        out_shardings: Sequence[NamedSharding] | None = None,
        donate_argnums: Sequence[int] = (),
    ) -> jax.stages.Lowered:
        """Lowers a function of these types, whose body is to be replaced."""

        def placeholder(*inputs: jax.Array) -> tuple[jax.Array, ...]:
            # One zero for each type: tracing hundreds takes longer than the rest.
            zeros = {one: _zero(one) for one in dict.fromkeys(self.outputs)}
            return tuple(zeros[one] for one in self.outputs)

        if in_shardings is None or out_shardings is None:
            return jax.jit(placeholder, keep_unused=True).lower(*self.inputs)
        in_shardings = [*map(on_auto_mesh, in_shardings)]
        jitted = jax.jit(
            placeholder,
            keep_unused=True,
            in_shardings=tuple(in_shardings),
            out_shardings=tuple(out_shardings),
            donate_argnums=tuple(donate_argnums),
        )
        return jitted.lower(*placed_avals(self.inputs, in_shardings))


def aval(program: Program, value: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a value as JAX writes them."""
    record = program.values[value]
    return jax.ShapeDtypeStruct(record.shape, numpy_dtype(record.dtype))


def signature(program: Program, part: Part) -> Signature:
    """Types of a part's inputs and outputs; of a whole program those of its step."""
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
    """Specs as shardings of values of these types.

    Inside of a program keys of random numbers have dims that JAX does not show.
    """
    return tuple(
        NamedSharding(mesh, partition_spec(spec, len(one.shape)))
        for spec, one in zip(specs, avals, strict=True)
    )


def is_key(dtype: Any) -> bool:
    """True of the types of random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_name(dtype: Any) -> str:
    """The name, or what else JAX knows it by, of the kind of a key's type."""
    found = []

    def look() -> jax.Array:
        key = lax.full((), 0, dtype)
        found.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(look)
    return found[0]


def _zero(one: jax.ShapeDtypeStruct) -> jax.Array:
    zero = lax.full(one.shape, 0, one.dtype)
    if not one.weak_type:
        return zero
    return primitives.convert_element_type_p.bind(
        zero, new_dtype=one.dtype, weak_type=True, sharding=None
    )
