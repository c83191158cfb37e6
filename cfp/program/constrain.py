"""Puts a plan into a lowered step: ``sdy.sharding_constraint`` ops that steer XLA.

Constraint ops are what Shardy's propagation heeds; sharding attributes on inner ops do
not survive until it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from cfp.program import shardy
from cfp.program.graph import Program, Spec, searched_once
from cfp.program.memory import auto_mesh
from cfp.program.partitioned import bind
from cfp.program.rematerialize import Rematerialization, rematerialize, repeatable
from cfp.program.replace import Replacement, Replacer


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints for the partitioner, and changes of the program.

    Attributes:
        values: sharding of each value at its maker, by value id.
        uses: other shardings of operands, by (op id, operand index); indices behind the
            operands count into ``op.yields``.
        rematerialized: ops that the backward pass rematerializes.
        replaced: ops that other functions replace.
    """

    values: Mapping[int, Spec]
    uses: Mapping[tuple[int, int], Spec]
    rematerialized: tuple[Rematerialization, ...] = ()
    replaced: tuple[Replacement, ...] = ()


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

    Then rematerializes and replaces ops; unread ops stay.
    """
    mesh = auto_mesh(mesh)
    bind(module, mesh)
    with module.context, ir.Location.unknown():
        inserter = Inserter(module, program, mesh)
        inserter.insert(constraints)
        ops, name = inserter.ops, inserter.mesh_name
        clones = rematerialize(ops, constraints.rematerialized)
        replacer = Replacer(module, ops, clones, program, mesh, name)
        for one in constraints.replaced:
            replacer.replace(one)


def located(
    module: ir.Module, program: Program
) -> tuple[list[ir.Operation], dict[int, ir.Value]]:
    """The ops of a module in a program's order, and its values by the program's ids."""
    main = shardy.main_function(module)
    ops, [block] = shardy.program_ops(main), main.regions[0].blocks
    if len(ops) != len(program.ops):
        raise AssertionError("the module does not have the program's ops")
    found: dict[int, ir.Value] = dict(zip(program.args, block.arguments, strict=True))
    for op, record in zip(ops, program.ops, strict=True):
        found.update(zip(record.results, op.results, strict=True))
        if record.entries:
            entries = [a for r in op.regions for a in r.blocks[0].arguments]
            found.update(zip(record.entries, entries, strict=True))
    return ops, found


class Inserter:
    """Inserts constraints into a module that has a program's ops."""

    def __init__(
        self, module: ir.Module, program: Program, mesh: Mesh | AbstractMesh
    ) -> None:
        self._program = program
        self.ops, self._values = located(module, program)
        self.mesh_name = _mesh_symbol(module, program, mesh)
        self._attributes: dict[Spec, ir.Attribute] = {}
        self._resharded: dict[tuple[int, Spec], ir.Value] = {}

    def insert(self, constraints: Constraints) -> None:
        """Constrains values where they are made, and uses that differ from that.

        In their order in the program: the same constraints are the same module.
        """
        # Reading the uses first keeps them on the values as they were.
        slots = {use: self._slot(*use) for use in constraints.uses}
        for value_id, spec in sorted(constraints.values.items()):
            value = self._values[value_id]
            maker = shardy.owner_of(value)
            where = maker.location if maker else ir.Location.unknown()
            made = self._constraint(value, spec, where)
            value.replace_all_uses_except(made.result, made.operation)
            self._values[value_id] = made.result
        for use, spec in sorted(constraints.uses.items()):
            owner, index, value_id = slots[use]
            key = (value_id, spec)
            if key not in self._resharded:
                # What is resharded for one reader has the reader's place.
                value = self._values[value_id]
                made = self._constraint(value, spec, owner.location)
                self._resharded[key] = made.result
            owner.operands[index] = self._resharded[key]

    def _slot(self, op_id: int, index: int) -> tuple[ir.Operation, int, int]:
        """The op, operand number and value of a use; yields belong to terminators."""
        record = self._program.ops[op_id]
        count = len(record.operands)
        if index < count:
            return self.ops[op_id], index, record.operands[index]
        place = index - count
        regions = list(self.ops[op_id].regions)
        if record.kind == "while":
            regions = regions[1:]
        region = regions[place // len(record.results)]
        *_, last = region.blocks[0].operations
        return last.operation, place % len(record.results), record.yields[place]

    def _constraint(
        self, value: ir.Value, spec: Spec, location: ir.Location
    ) -> sdy.ShardingConstraintOp:
        begin, after = ir.InsertionPoint.at_block_begin, ir.InsertionPoint.after
        owner = value.owner
        with begin(owner) if isinstance(owner, ir.Block) else after(owner):
            return sdy.ShardingConstraintOp(value, self.attribute(spec), loc=location)

    def attribute(self, spec: Spec) -> ir.Attribute:
        """A spec as Shardy writes it."""
        if spec not in self._attributes:
            dims = ", ".join(
                "{" + ", ".join(f'"{name}"' for name in names) + "}" for names in spec
            )
            text = f"#sdy.sharding<@{self.mesh_name}, [{dims}]>"
            self._attributes[spec] = ir.Attribute.parse(text)
        return self._attributes[spec]


def _mesh_symbol(module: ir.Module, program: Program, mesh: Mesh | AbstractMesh) -> str:
    """Returns the name of the module's mesh with these axes, and adds a missing mesh.

    Shardy leaves out axes of one device, and then has no two meshes with the same axes.
    A mesh without sharding gets these axes.
    """
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.shape.items())
    meshes = [o.operation for o in module.body if o.operation.name == "sdy.mesh"]
    for op in meshes:
        there = shardy.mesh_axes(op)
        kept = {n: size for n, size in there.items() if n in mesh.shape or size != 1}
        if [*kept.items()] == [*mesh.shape.items()]:
            return shardy.symbol_name(op)
    if len(meshes) == 1 and not any(op.manual for op in program.ops):
        meshes[0].attributes["mesh"] = ir.Attribute.parse(f"#sdy.mesh<[{axes}]>")
        return shardy.symbol_name(meshes[0])
    added = ir.Operation.parse(f"sdy.mesh @cfp_mesh = <[{axes}]>")
    ir.InsertionPoint.at_block_begin(module.body).insert(added)
    return "cfp_mesh"


# --------------------------------------------------------- constraints that do not fit

# A fingerprint says that a program is the one that was planned, and not that the
# numbers beside it are. Constraints never change what a program computes, as long as
# they name values of it; what is rematerialized has to give the same again.


def misfit(program: Program, mesh: Mesh, constraints: Constraints) -> str | None:
    """The first constraint that does not fit a program, in words; None if all do."""
    for value, spec in constraints.values.items():
        if not 0 <= value < len(program.values):
            return f"value {value}, of {len(program.values)}"
        if (found := _spec_misfit(program, value, mesh, spec)) is not None:
            return f"value {value}: {found}"
    for (op, index), spec in constraints.uses.items():
        if not 0 <= op < len(program.ops):
            return f"op {op}, of {len(program.ops)}"
        reads = (*program.ops[op].operands, *program.ops[op].yields)
        if not 0 <= index < len(reads):
            return f"operand {index} of op {op}, which has {len(reads)}"
        if (found := _spec_misfit(program, reads[index], mesh, spec)) is not None:
            return f"operand {index} of op {op}: {found}"
    for one in constraints.rematerialized:
        if (found := _rematerialization_misfit(program, one)) is not None:
            return found
    return None


def uneven(shape: Collection[int], mesh: Mesh, spec: Spec) -> bool:
    """True if a spec cuts some dim into unequal pieces, or has the wrong rank."""
    sizes = mesh.shape
    return len(spec) != len(shape) or any(
        size % prod(sizes[name] for name in names)
        for size, names in zip(shape, spec, strict=True)
    )


def _spec_misfit(program: Program, value: int, mesh: Mesh, spec: Spec) -> str | None:
    rank = len(program.shape(value))
    if len(spec) != rank:
        return f"a sharding of {len(spec)} dims, where there are {rank}"
    axes = [name for names in spec for name in names]
    if not {*axes} <= {*mesh.shape} or len({*axes}) < len(axes):
        return f"axes {axes}, of a mesh {dict(mesh.shape)}"
    return None


def _rematerialization_misfit(program: Program, one: Rematerialization) -> str | None:
    top = {op.id for op in program.ops if op.parent < 0}
    forward, backward = one.forward, one.backward
    if not {*forward, *backward} <= top or not forward or not backward:
        return f"ops to rematerialize, of {len(program.ops)}: not all are there"
    if max(forward) >= min(backward):
        return "ops to rematerialize that come after what reads them"
    for op in forward:
        if not repeatable(program, op):
            return f"op {op} ({program.ops[op].name}) to rematerialize"
    return None


# ------------------------------------------------------ shardings that propagation adds

_NUMBER = "cfp.number"
_SHARDING = "sdy.sharding"
_ONE = ("all",)  # The one axis in place of all.


def propagate(
    program: Program,
    mesh: Sequence[tuple[str, int]],
    arguments: Sequence[Spec],
    outputs: Sequence[Spec | None],
    values: Mapping[int, Spec],
) -> dict[int, Spec]:
    """Shards a program's values by Shardy's propagation, without compiling.

    The compiler partitions afterwards: if an op's operands and result disagree, it
    chooses the resharding.

    Args:
        arguments: sharding of each argument.
        outputs: sharding of each result; None leaves it to propagation.
        values: constraints on values inside, by id.

    Returns:
        Shardings of all values that propagation or a constraint shards, by id.
    """
    axes = tuple(name for name, _ in mesh)
    given = *arguments, *outputs, *values.values()
    is_joint = {dim for spec in given for dim in spec or ()} <= {(), axes}
    if is_joint and not any(op.shardings for op in program.ops):
        # Axes that shard together are one axis, on any mesh of as many devices, if
        # propagation does not split it.
        one = (_ONE[0], prod(size for _, size in mesh))
        joint = tuple(s and tuple(_ONE if dim else () for dim in s) for s in given)
        found, is_split = _propagated(program, (one,), joint, tuple(values))
        if not is_split or len(axes) == 1:
            return {v: tuple(axes if d else () for d in s) for v, s in found.items()}
    return dict(_propagated(program, tuple(mesh), given, tuple(values))[0])


@searched_once
def _propagated(
    program: Program,
    mesh: tuple[tuple[str, int], ...],
    given: tuple[Any, ...],
    constrained: tuple[int, ...],
) -> tuple[Mapping[int, Spec], bool]:
    """Runs `propagate`, with what is given in a row; true if it splits an axis."""
    of_results = len(program.args) + len(program.outputs)
    known = dict(zip(program.args, given, strict=False))
    values = dict(zip(constrained, given[of_results:], strict=True))
    where = AbstractMesh(tuple(s for _, s in mesh), tuple(name for name, _ in mesh))
    module = shardy.parsed(program.text)
    with module.context, ir.Location.unknown():
        inserter = Inserter(module, program, where)
        number = ir.IntegerType.get_signless(64)
        for index, op in enumerate(inserter.ops):
            op.attributes[_NUMBER] = ir.IntegerAttr.get(number, index)
        inserter.insert(Constraints(values, {}))
        marks = ({_SHARDING: inserter.attribute(s)} if s else {} for s in given)
        marked = [ir.DictAttr.get(one) for one in marks]
        of_main = shardy.main_function(module).attributes
        of_main["arg_attrs"] = ir.ArrayAttr.get(marked[: len(program.args)])
        of_main["res_attrs"] = ir.ArrayAttr.get(marked[len(program.args) : of_results])
        shardy.run_passes(module, shardy.PROPAGATION)
        specs_of = cache(shardy.specs_of)  # Few differ.
        texts = cache(str)
        is_split = False
        for op in shardy.walk(shardy.main_function(module)):
            if _NUMBER in op.attributes and _SHARDING in op.attributes:
                index = ir.IntegerAttr(op.attributes[_NUMBER]).value
                sharding = op.attributes[_SHARDING]
                is_split = is_split or ":(" in texts(sharding)
                # A call of the host without results has a sharding all the same.
                results = program.ops[index].results
                known.update(zip(results, specs_of(sharding), strict=False))
        return {**known, **values}, is_split
