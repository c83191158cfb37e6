"""The only room that edits modules: constraints put in, and parts cut out.

A plan steers XLA's partitioner by ``sdy.sharding_constraint`` ops that are inserted
into the lowered step before it is compiled. A part of a program becomes a program of
its own by cloning its ops into the body of a stand-in function with the right
signature. Both work on a stock jaxlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.program import shardy
from cfp.program.graph import Program, Spec


@dataclass(frozen=True, slots=True)
class Constraints:
    """What to tell the partitioner about a program.

    Attributes:
        values: how each value is sharded where it is made, by value id.
        uses: how an op reads an operand where that differs, by (op id, operand
            index); indices behind the operands count into ``op.yields``.
    """

    values: Mapping[int, Spec]
    uses: Mapping[tuple[int, int], Spec]


def partition_spec(spec: Spec, rank: int | None = None) -> PartitionSpec:
    """A spec as JAX writes it; ``rank`` cuts off dims that JAX does not show."""
    dims = spec if rank is None else spec[:rank]
    parts = [
        None if not names else names[0] if len(names) == 1 else names for names in dims
    ]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def constrain(
    module: ir.Module, program: Program, mesh: Mesh, constraints: Constraints
) -> None:
    """Inserts sharding constraints into a normalised module, in place.

    Args:
        module: a module with the program's ops.
        program: the program as it was read.
        mesh: the mesh that the specs' axes belong to.
        constraints: what to insert.
    """
    function = shardy.main_function(module)
    ops = shardy.program_ops(function)
    if len(ops) != len(program.ops):
        raise AssertionError("the module does not have the program's ops")
    with module.context, ir.Location.unknown():
        _Inserter(module, function, ops, program, mesh).insert(constraints)


class _Inserter:
    def __init__(
        self,
        module: ir.Module,
        function: ir.Operation,
        ops: list[ir.Operation],
        program: Program,
        mesh: Mesh,
    ) -> None:
        self._program = program
        self._ops = ops
        self._mesh_name = _mesh_symbol(module, mesh)
        self._attributes: dict[Spec, ir.Attribute] = {}
        self._values = self._map_values(function)
        self._resharded: dict[tuple[int, Spec], ir.Value] = {}

    def _map_values(self, function: ir.Operation) -> dict[int, ir.Value]:
        program = self._program
        found = dict(
            zip(program.args, function.regions[0].blocks[0].arguments, strict=True)
        )
        for op, record in zip(self._ops, program.ops, strict=True):
            found.update(zip(record.results, op.results, strict=True))
            if record.entries:
                entries = [a for r in op.regions for a in r.blocks[0].arguments]
                found.update(zip(record.entries, entries, strict=True))
        return found

    def insert(self, constraints: Constraints) -> None:
        # Reading the uses first keeps them on the values as they were.
        slots = {use: self._slot(*use) for use in constraints.uses}
        for value_id, spec in constraints.values.items():
            value = self._values[value_id]
            made = self._constraint(value, spec)
            value.replace_all_uses_except(made.result, made.operation)
            self._values[value_id] = made.result
        for use, spec in constraints.uses.items():
            owner, index, value_id = slots[use]
            key = (value_id, spec)
            if key not in self._resharded:
                made = self._constraint(self._values[value_id], spec)
                self._resharded[key] = made.result
            owner.operands[index] = self._resharded[key]

    def _slot(self, op_id: int, index: int) -> tuple[ir.Operation, int, int]:
        """The op, operand number and value of a use; yields belong to terminators."""
        record = self._program.ops[op_id]
        count = len(record.operands)
        if index < count:
            return self._ops[op_id], index, record.operands[index]
        place = index - count
        regions = list(self._ops[op_id].regions)
        if record.kind == "while":
            regions = regions[1:]
        region = regions[place // len(record.results)]
        *_, last = region.blocks[0].operations
        return last.operation, place % len(record.results), record.yields[place]

    def _constraint(self, value: ir.Value, spec: Spec) -> sdy.ShardingConstraintOp:
        if isinstance(value, ir.BlockArgument):
            point = ir.InsertionPoint.at_block_begin(value.owner)
        else:
            point = ir.InsertionPoint.after(value.owner)
        with point:
            return sdy.ShardingConstraintOp(value, self._attribute(spec))

    def _attribute(self, spec: Spec) -> ir.Attribute:
        if spec not in self._attributes:
            dims = ", ".join(
                "{" + ", ".join(f'"{name}"' for name in names) + "}" for names in spec
            )
            text = f"#sdy.sharding<@{self._mesh_name}, [{dims}]>"
            self._attributes[spec] = ir.Attribute.parse(text)
        return self._attributes[spec]


def _mesh_symbol(module: ir.Module, mesh: Mesh) -> str:
    """The name of the module's mesh with these axes; adds it where there is none."""
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.shape.items())
    wanted = f"<[{axes}]>"
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh" and wanted in str(op.attributes["mesh"]):
            return ir.StringAttr(op.attributes["sym_name"]).value
    with ir.InsertionPoint.at_block_begin(module.body):
        ir.Operation.parse(f"sdy.mesh @cfp_mesh = {wanted}")
    return "cfp_mesh"


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a program's ops, seen as a program of its own.

    Attributes:
        ops: ids of top-level ops, in program order, constants included.
        inputs: ids of the values it reads from outside.
        outputs: ids of the values that others read from it.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def cut_part(program: Program, wanted: Sequence[int]) -> Part:
    """Completes a set of top-level ops with the constants that it needs."""
    chosen = set(wanted)
    stack = list(chosen)
    while stack:
        op = program.ops[stack.pop()]
        reads = [*op.operands, *op.yields]
        for inner in op.body:
            reads.extend(program.ops[inner].operands)
        for v in reads:
            producer = program.values[v].producer
            if producer >= 0 and producer not in chosen:
                if producer in program.leaf_ops and program.ops[producer].parent < 0:
                    chosen.add(producer)
                    stack.append(producer)
        chosen.update(op.body)
    inside = {r for i in chosen for r in (*program.ops[i].results, *program.ops[i].entries)}
    inputs: dict[int, None] = {}
    outputs: dict[int, None] = {}
    for op_id in sorted(chosen):
        op = program.ops[op_id]
        for v in (*op.operands, *op.yields):
            if v not in inside:
                inputs[v] = None
        if op.parent >= 0 or op_id in program.leaf_ops:
            continue
        for r in op.results:
            if any(user not in chosen for user, _ in program.users[r]):
                outputs[r] = None
    made = {r for i in chosen for r in program.ops[i].results}
    for v in program.outputs:
        if v in made:
            outputs[v] = None
    top = tuple(i for i in sorted(chosen) if program.ops[i].parent < 0)
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
    """Makes a part of a program ready to compile by itself.

    Args:
        program: the program.
        part: which ops.
        mesh: the mesh.
        constraints: shardings, by the program's value and op ids.
        in_specs, out_specs: shardings of the part's inputs and outputs.
        donated: positions of inputs whose memory the part may overwrite.
    """
    avals = [aval(program, v) for v in part.inputs]
    results = [aval(program, v) for v in part.outputs]

    def stand_in(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(r.shape, r.dtype) for r in results)

    jitted = jax.jit(
        stand_in,
        in_shardings=tuple(NamedSharding(mesh, partition_spec(s)) for s in in_specs),
        out_shardings=tuple(NamedSharding(mesh, partition_spec(s)) for s in out_specs),
        donate_argnums=tuple(donated),
        keep_unused=True,
    )
    lowered = jitted.lower(*avals)
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        whole = ir.Module.parse(program.text)
        constrain(whole, program, mesh, constraints)
        _transplant(module, whole, program, part)
    return lowered


def aval(program: Program, value: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a value as JAX writes them."""
    record = program.values[value]
    return jax.ShapeDtypeStruct(record.shape, numpy_dtype(record.dtype))


_DTYPES = {
    "i1": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
}


def numpy_dtype(element: str) -> np.dtype:
    """The dtype of an MLIR element type."""
    if element in _DTYPES:
        return jnp.dtype(_DTYPES[element])
    if element.startswith("ui"):
        return jnp.dtype(f"uint{element[2:]}")
    if element.startswith("i"):
        return jnp.dtype(f"int{element[1:]}")
    raise ValueError(f"no numpy dtype for {element!r}")


def _transplant(
    target: ir.Module, source: ir.Module, program: Program, part: Part
) -> None:
    """Replaces the body of the target's main function by the part's ops.

    The source has its constraints already: each of them follows the op whose result
    it constrains, and goes along with it.
    """
    function = shardy.main_function(target)
    block = function.regions[0].blocks[0]
    origin = shardy.main_function(source).regions[0].blocks[0]
    mapping: dict[ir.Value, ir.Value] = {}
    by_id = _values_by_id(origin, program)
    for value_id, argument in zip(part.inputs, block.arguments, strict=True):
        mapping[by_id[value_id]] = argument
    _copy_symbols(target, source)
    wanted = set(part.ops)
    *stale, terminator = [o.operation for o in block.operations]
    kept = _part_ops(origin, program, wanted, set(part.inputs))
    with ir.InsertionPoint(terminator):
        for op in kept:
            clone = op.clone()
            _rewire(clone, mapping)
            mapping.update(zip(op.results, clone.results, strict=True))
    for place, value_id in enumerate(part.outputs):
        terminator.operands[place] = mapping[_constrained(by_id[value_id])]
    for op in reversed(stale):
        op.erase()


def _values_by_id(block: ir.Block, program: Program) -> dict[int, ir.Value]:
    found = dict(zip(program.args, block.arguments, strict=True))
    top = (op for op in program.ops if op.parent < 0)
    for opview in block.operations:
        op = opview.operation
        if op.name in ("sdy.sharding_constraint", "func.return"):
            continue
        found.update(zip(next(top).results, op.results, strict=True))
    return found


def _constrained(value: ir.Value) -> ir.Value:
    """A value behind its own constraint: the form that every other op reads."""
    users = list(value.uses)
    if len(users) == 1:
        user = users[0].owner.operation
        if user.name == "sdy.sharding_constraint":
            return user.results[0]
    return value


def _part_ops(
    block: ir.Block, program: Program, wanted: set[int], inputs: set[int]
) -> list[ir.Operation]:
    """The wanted top-level ops and the constraints on what they make or read."""
    kept: list[ir.Operation] = []
    known: set[ir.Value] = set()
    for value_id, argument in zip(program.args, block.arguments, strict=True):
        if value_id in inputs:
            known.add(argument)
    top = (op for op in program.ops if op.parent < 0)
    for opview in block.operations:
        op = opview.operation
        if op.name == "func.return":
            continue
        if op.name == "sdy.sharding_constraint":
            if op.operands[0] in known:
                kept.append(op)
                known.add(op.results[0])
            continue
        record = next(top)
        if record.id in wanted:
            kept.append(op)
            known.update(op.results)
        else:
            known.update(
                r for v, r in zip(record.results, op.results, strict=True) if v in inputs
            )
    return kept


def _rewire(op: ir.Operation, mapping: dict[ir.Value, ir.Value]) -> None:
    for index, operand in enumerate(op.operands):
        if operand in mapping:
            op.operands[index] = mapping[operand]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _rewire(inner.operation, mapping)


def _copy_symbols(target: ir.Module, source: ir.Module) -> None:
    """Copies meshes and functions that the part's ops may refer to by name."""
    known = {_symbol(op.operation) for op in target.body.operations}
    with ir.InsertionPoint.at_block_begin(target.body):
        for opview in source.body.operations:
            if _symbol(opview.operation) not in known:
                opview.operation.clone()


def _symbol(op: ir.Operation) -> str:
    return ir.StringAttr(op.attributes["sym_name"]).value
