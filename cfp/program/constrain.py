"""Puts a plan into a lowered step: constraints, rematerialization and kernels.

Shardings are ``sdy.sharding_constraint`` ops: sharding attributes on inner ops are lost
before Shardy's propagation runs.

To rematerialize, forward ops are cloned before the backward ops that read them, as
``jax.checkpoint`` does while tracing. The clones' operands go through an
``optimization_barrier``, together with the gradients that enter. Then XLA neither
merges the clones with the originals nor runs them early, and frees the originals'
results after the forward pass. Gradients are read behind the barrier, since XLA drops
its unread operands. Sharded arguments are gathered again. Constants stay outside of the
barrier, since the compiler would write a broadcast constant to memory for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from cfp.program import shardy
from cfp.program.graph import PARTITIONED, Program, Spec, reached, searched_once
from cfp.program.memory import auto_mesh
from cfp.program.partitioned import bind
from cfp.program.replace import Replacement, Replacer
from cfp.program.shardy import clone_with, owner_of

# Changes with the programs that this module makes; older measurements are then ignored.
VERSION = "4"
_CONSTRAINT = "sdy.sharding_constraint"
_NOT_REPEATABLE = ("custom_call", "rng")


@dataclass(frozen=True, slots=True)
class Rematerialization:
    """Ids of forward ops to clone, and of backward ops that may read them."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints for the partitioner, and changes of the program.

    Attributes:
        values: {value id: sharding at its maker}.
        uses: {(op id, index in `Op.reads`): sharding of the value for that reader}.
        rematerialized: ops that the backward pass computes again.
        replaced: ops that kernels replace.
    """

    values: Mapping[int, Spec]
    uses: Mapping[tuple[int, int], Spec]
    rematerialized: tuple[Rematerialization, ...] = ()
    replaced: tuple[Replacement, ...] = ()


def partition_spec(spec: Spec, rank: int | None = None) -> PartitionSpec:
    """Converts a spec to JAX's, without trailing None and dims beyond `rank`."""
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
    """Inserts constraints into a normalised module, rematerializes and replaces ops.

    The module is changed in place. Ops that nothing reads any more stay.
    """
    mesh = auto_mesh(mesh)
    bind(module, mesh)
    with module.context, ir.Location.unknown():
        inserter = Inserter(module, program, mesh)
        inserter.insert(constraints)
        ops, name = inserter.ops, inserter.mesh_name
        clones = rematerialize(program, ops, constraints.rematerialized)
        replacer = Replacer(module, ops, clones, program, mesh, name)
        for one in constraints.replaced:
            replacer.replace(one)


def located(
    module: ir.Module, program: Program
) -> tuple[list[ir.Operation], dict[int, ir.Value]]:
    """Returns a module's ops by the program's op ids, and its values by value ids."""
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
    """Inserts constraints into the module that `program` was read from."""

    def __init__(
        self, module: ir.Module, program: Program, mesh: Mesh | AbstractMesh
    ) -> None:
        self._program = program
        self.ops, self._values = located(module, program)
        self.mesh_name = _mesh_symbol(module, program, mesh)
        self._attributes: dict[Spec, ir.Attribute] = {}
        self._resharded: dict[tuple[int, Spec], ir.Value] = {}

    def insert(self, constraints: Constraints) -> None:
        """Constrains values at their makers, then again for the readers in `uses`.

        The order is that of ids, so that equal constraints make equal modules.
        """
        # Uses are resolved first, while ops still read the unconstrained values.
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
                # A resharding has its first reader's location.
                made = self._constraint(self._values[value_id], spec, owner.location)
                self._resharded[key] = made.result
            owner.operands[index] = self._resharded[key]

    def _slot(self, op_id: int, index: int) -> tuple[ir.Operation, int, int]:
        """Returns (op, operand index, value id) of a use; the op may be a return."""
        record = self._program.ops[op_id]
        count = len(record.operands)
        if index < count:
            return self.ops[op_id], index, record.operands[index]
        place = index - count
        regions = list(self.ops[op_id].regions)
        if record.kind == "while":
            regions = regions[1:]
        *_, last = regions[place // len(record.results)].blocks[0].operations
        return last.operation, place % len(record.results), record.yields[place]

    def _constraint(
        self, value: ir.Value, spec: Spec, location: ir.Location
    ) -> sdy.ShardingConstraintOp:
        begin, after = ir.InsertionPoint.at_block_begin, ir.InsertionPoint.after
        owner = value.owner
        with begin(owner) if isinstance(owner, ir.Block) else after(owner):
            return sdy.ShardingConstraintOp(value, self.attribute(spec), loc=location)

    def attribute(self, spec: Spec) -> ir.Attribute:
        """Converts a spec to a Shardy attribute."""
        if spec not in self._attributes:
            dims = ", ".join(
                "{" + ", ".join(f'"{name}"' for name in names) + "}" for names in spec
            )
            text = f"#sdy.sharding<@{self.mesh_name}, [{dims}]>"
            self._attributes[spec] = ir.Attribute.parse(text)
        return self._attributes[spec]


def _mesh_symbol(module: ir.Module, program: Program, mesh: Mesh | AbstractMesh) -> str:
    """Returns the name of the module's mesh with these axes; adds it if missing.

    That mesh may have further axes of one device. If none fits, a module's only mesh
    is changed to these axes, unless a region is sharded by hand.
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


# -------------------------------------------------------------------- rematerialization


def rematerializable(
    program: Program, ops: Iterable[int], turn: int, within: Set[int] | None = None
) -> Rematerialization | None:
    """Returns repeatable forward ops, and backward ops; None if the latter read none.

    It includes cheap forward ops from elsewhere, if they make values that these read.

    Args:
        ops: ids of top-level ops of both passes, such as those of a segment.
        turn: ops with this id and higher ids are the backward pass.
        within: ids of ops that may be rematerialized from elsewhere; None for all.
    """
    mine = set(ops)
    backward = tuple(op for op in sorted(mine) if op >= turn)
    forward = {op for op in mine if op < turn and repeatable(program, op)}
    reads = {v for op in backward for v in program.ops[op].operands}
    made = {v for op in forward for v in program.ops[op].results}
    if not made & reads:
        return None
    entering = {
        v
        for v in _read(program, reads, forward)
        if 0 <= (op := program.values[v].producer) < turn
        and op not in mine
        and op not in program.leaf_ops
    }
    forward.update(*makeable(program, entering, within).values())
    return Rematerialization(tuple(sorted(forward)), backward)


def _read(program: Program, values: Iterable[int], ops: Set[int]) -> set[int]:
    """Returns values, and all values upstream that reach them through `ops`."""

    def before(v: int) -> Sequence[int]:
        producer = program.values[v].producer
        return program.ops[producer].operands if producer in ops else ()

    return {*reached(values, before)}


def repeatable(program: Program, op_id: int) -> bool:
    """True if an op may be computed twice: no loop, branch, custom call, or `rng` op.

    True for calls of custom_partitioning ops, since they have no effects.
    """
    op = program.ops[op_id]
    is_known = PARTITIONED.search(op.attributes) is not None
    return not op.has_regions and (is_known or op.kind not in _NOT_REPEATABLE)


def rematerialize(
    program: Program, ops: Sequence[ir.Operation], wanted: Sequence[Rematerialization]
) -> dict[int, ir.Operation]:
    """Clones needed forward ops before the backward ops, which then read the clones.

    Args:
        ops: the program's ops in the module, with constraints inserted.

    Returns:
        {id of a cloned op: its last clone}.
    """
    clones: dict[int, ir.Operation] = {}
    fixed = {ops[leaf] for leaf in program.leaf_ops}
    places: dict[int, dict[ir.Operation, int]] = {}
    for one in wanted:
        parent = program.ops[one.backward[0]].parent
        if parent not in places:
            around = ops[one.backward[0]].parent
            assert around is not None, "ops stand in the function, or in a loop"
            # Of a loop the body, not its condition; ops elsewhere are not cloned.
            body = (o.operation for o in around.operation.regions[-1].blocks[0])
            places[parent] = {op: number for number, op in enumerate(body)}
        clones |= _Rematerializer(ops, one, places[parent], fixed).run()
    return clones


class _Rematerializer:
    def __init__(
        self,
        ops: Sequence[ir.Operation],
        wanted: Rematerialization,
        place: dict[ir.Operation, int],
        fixed: set[ir.Operation],
    ) -> None:
        self.place = place
        self.fixed = fixed
        self.number = {ops[i]: i for i in wanted.forward if ops[i] in place}
        self.readers = [ops[i] for i in wanted.backward if ops[i] in place]

    def run(self) -> dict[int, ir.Operation]:
        reads = [v for reader in self.readers for v in reader.operands]
        clones = self._needed(filter(self._is_cloned, reads))
        if not clones:
            return {}
        found: dict[int, ir.Operation] = {}
        made: set[ir.Value] = {result for op in clones for result in op.results}
        outside = {
            operand: None
            for op in clones
            for operand in op.operands
            if operand not in made and owner_of(operand) not in self.fixed
        }
        signals = self._signals(made)
        entering = list(outside | signals)
        with ir.InsertionPoint(self.readers[0]):
            kinds = [value.type for value in entering]
            name = "stablehlo.optimization_barrier"
            behind = ir.Operation.create(name, kinds, entering).results if kinds else ()
            mapping: dict[ir.Value, ir.Value] = dict(zip(entering, behind, strict=True))
            for op in clones:
                clone = clone_with(op, mapping)
                if op in self.number:
                    found[self.number[op]] = clone
        for reader in self.readers:
            for index, operand in enumerate(reader.operands):
                if operand in signals or operand in made:
                    reader.operands[index] = mapping[operand]
        return found

    def _is_cloned(self, value: ir.Value) -> bool:
        """True for results to rematerialize, and constraints of these or arguments."""
        owner = maker = owner_of(value)
        while maker is not None and maker.name == _CONSTRAINT:
            maker = owner_of(maker.operands[0])
        return owner is not None if maker is None else maker in self.number

    def _needed(self, values: Iterable[ir.Value]) -> list[ir.Operation]:
        """Returns the ops to clone for some values, in the module's order."""

        def further(value: ir.Value) -> Iterable[ir.Value]:
            owner = owner_of(value)
            return filter(self._is_cloned, owner.operands if owner else ())

        owners = {owner_of(value) for value in reached(values, further)}
        return sorted(filter(None, owners), key=lambda op: self.place[op])

    def _signals(self, made: set[ir.Value]) -> dict[ir.Value, None]:
        """Returns, as keys, gradients: readers' operands made after the forward ops."""
        turn = max(self.place[op] for op in self.number)
        end = self.place[self.readers[0]]
        return {
            operand: None
            for reader in self.readers
            for operand in reader.operands
            if (owner := owner_of(operand)) is not None
            and operand not in made
            and owner not in self.fixed
            and turn < self.place.get(owner, -1) < end
        }


# -------------------------------------------------------- values that need not be kept

# Ops that XLA fuses into their readers, cheap to compute twice.
CHEAP = frozenset(
    "abs add and atan2 bitcast_convert broadcast_in_dim cbrt ceil clamp compare "
    "convert cosine divide erf erf_inv exponential exponential_minus_one floor "
    "is_finite log log_plus_one logistic maximum minimum multiply negate not or popcnt "
    "power reduce_precision remainder reshape round_nearest_afz round_nearest_even "
    "rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine "
    "slice sqrt square subtract tan tanh transpose xor".split()
)
_CHEAP_OR_SUM = CHEAP | {"reduce"}
# A norm takes some twenty ops.
_MOST_OPS = 64


def makeable(
    program: Program, values: Iterable[int], within: Set[int] | None = None
) -> dict[int, set[int]]:
    """Finds values that a few cheap ops can compute again from other values.

    For example, a norm is computed from the residual stream that it reads.

    Args:
        values: ids of top-level values that are needed.
        within: ids of ops that may be computed again; None for all.

    Returns:
        {value that ops compute from the remaining values, arguments and constants: ids
        of these ops}; no ids for an argument or a constant.
    """
    rest = set(values)
    found = {}
    for v in sorted(rest, key=lambda v: program.values[v].producer, reverse=True):
        ops = _ops_from(program, v, rest - {v}, within)
        if ops is not None:
            found[v] = ops
            rest.discard(v)
    return found


def _ops_from(
    program: Program, v: int, known: Set[int], within: Set[int] | None
) -> set[int] | None:
    """Returns cheap ops that make `v` of `known`, arguments and constants, or None."""
    found: set[int] = set()
    stack = [v]
    while stack:
        w = stack.pop()
        op = program.maker(w)
        if w in known or op is None or op.id in found or program.is_leaf(w):
            continue
        is_cheap = op.kind in _CHEAP_OR_SUM and not op.has_regions
        if not is_cheap or not (within is None or op.id in within):
            return None
        found.add(op.id)
        if len(found) > _MOST_OPS:
            return None
        stack.extend(op.operands)
    return found


# --------------------------------------------------------- constraints that do not fit

# An equal fingerprint means that the program was planned, not that the plan's numbers
# are undamaged. Constraints on existing values never change results. Rematerialized ops
# must be repeatable.


def misfit(program: Program, mesh: Mesh, constraints: Constraints) -> str | None:
    """Describes a misfit of ids, ranks, axes or rematerialized ops; None without."""
    ops = program.ops
    read = {(op.id, i): v for op in ops for i, v in enumerate(op.reads)}
    specs = [(f"value {v}", v, spec) for v, spec in constraints.values.items()]
    for (op, index), spec in constraints.uses.items():
        specs.append((f"operand {index} of op {op}", read.get((op, index), -1), spec))
    for what, value, spec in specs:
        if not 0 <= value < len(program.values):
            return f"{what}, but the program has {len(program.values)} values"
        rank, axes = len(program.shape(value)), [a for names in spec for a in names]
        if len(spec) != rank:
            return f"{what}: a sharding of {len(spec)} dims for {rank} dims"
        if not {*axes} <= {*mesh.shape} or len({*axes}) < len(axes):
            return f"{what}: axes {axes} on a mesh {dict(mesh.shape)}"
    for one in constraints.rematerialized:
        forward, backward = one.forward, one.backward
        if not (forward and backward and {*forward, *backward} <= {*range(len(ops))}):
            return f"ops to rematerialize that are not among {len(ops)} ops"
        if max(forward) >= min(backward):
            return "ops to rematerialize that come after their readers"
        for op in forward:
            if not repeatable(program, op):
                return f"op {op} ({ops[op].name}), which cannot be rematerialized"
    return None


def uneven(shape: Collection[int], mesh: Mesh, spec: Spec) -> bool:
    """True if a spec cuts a dim into unequal pieces, or has another rank."""
    sizes = mesh.shape
    return len(spec) != len(shape) or any(
        size % prod(sizes[name] for name in names)
        for size, names in zip(shape, spec, strict=True)
    )


# ------------------------------------------------------ shardings that propagation adds

_NUMBER = "cfp.number"
_SHARDING = "sdy.sharding"
_ONE = ("all",)  # One axis in place of all.


def propagate(
    program: Program,
    mesh: Sequence[tuple[str, int]],
    arguments: Sequence[Spec],
    outputs: Sequence[Spec | None],
    values: Mapping[int, Spec],
) -> dict[int, Spec]:
    """Returns {value id: sharding} by Shardy's propagation, without compiling.

    Arguments of loops are absent; values without a sharding may be.

    Args:
        mesh: (axis, size) pairs.
        arguments: sharding of each argument.
        outputs: sharding of each result; None leaves it to propagation.
        values: {id of an intermediate value: its constraint}.
    """
    axes = tuple(name for name, _ in mesh)
    given = *arguments, *outputs, *values.values()
    is_joint = {dim for spec in given for dim in spec or ()} <= {(), axes}
    if is_joint and not any(op.shardings for op in program.ops):
        # Axes that always shard together act as one axis, unless propagation splits it.
        # The result is then shared by all meshes of as many devices.
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
    """Returns shardings by value id, and True if propagation splits an axis."""
    of_results = len(program.args) + len(program.outputs)
    known = dict(zip(program.args, given, strict=False))
    values = dict(zip(constrained, given[of_results:], strict=True))
    where = AbstractMesh(tuple(s for _, s in mesh), tuple(name for name, _ in mesh))
    module = shardy.parsed(program.text)
    with module.context, ir.Location.unknown():
        inserter = Inserter(module, program, where)
        kind = ir.IntegerType.get_signless(64)
        for index, op in enumerate(inserter.ops):
            op.attributes[_NUMBER] = ir.IntegerAttr.get(kind, index)
        inserter.insert(Constraints(values, {}))
        marks = ({_SHARDING: inserter.attribute(s)} if s else {} for s in given)
        marked = [ir.DictAttr.get(one) for one in marks]
        of_main = shardy.main_function(module).attributes
        of_main["arg_attrs"] = ir.ArrayAttr.get(marked[: len(program.args)])
        of_main["res_attrs"] = ir.ArrayAttr.get(marked[len(program.args) : of_results])
        shardy.run_passes(module, shardy.PROPAGATION)
        specs_of = cache(shardy.specs_of)
        texts = cache(str)
        is_split = False
        for op in shardy.walk(shardy.main_function(module)):
            if _NUMBER in op.attributes and _SHARDING in op.attributes:
                index = ir.IntegerAttr(op.attributes[_NUMBER]).value
                sharding = op.attributes[_SHARDING]
                is_split = is_split or ":(" in texts(sharding)
                # A host callback without results has a sharding, too.
                results = program.ops[index].results
                known.update(zip(results, specs_of(sharding), strict=False))
        return {**known, **values}, is_split
