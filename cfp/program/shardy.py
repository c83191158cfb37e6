"""MLIR modules of a program: reading, building and normalising them by Shardy's passes.

Lowerings of one step that differ only in shardings have the same ops in the same order
after :func:`normalise`. Plans rely on it: they number ops.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.dialects import stablehlo as hlo

from cfp.program.graph import Spec
from cfp.program.rules import relayout

_INLINE = "builtin.module(inline,symbol-dce,sdy-import-func-calls,symbol-dce)"
WITHOUT_LOCATIONS = "builtin.module(strip-debuginfo)"
WITH_RULES = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
# The first passes of sdy-propagation-pipeline; the others serve the compiler.
PROPAGATION = (
    "builtin.module(sdy-lift-inlined-meshes,sdy-constant-or-scalar-splitter,"
    "sdy-manual-axes-cleanup,sdy-add-data-flow-edges,sdy-apply-sharding-constraints,"
    "sdy-sharding-group-import,sdy-user-priority-propagate,"
    "func.func(sdy-sink-data-flow-edges))"
)
RULE = "sdy.sharding_rule"
PIPELINES = (_INLINE, WITHOUT_LOCATIONS, WITH_RULES, PROPAGATION)

# Ops whose regions hold ops of the program. Regions of all other ops (reduce, scatter,
# sort, ...) hold scalar code.
REGION_OPS = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})

# Constants with more elements are tables, which may be gigabytes.
MOST_SMALL_ELEMENTS = 1024


def main_function(module: ir.Module) -> ir.Operation:
    """Returns the function named main; raises ValueError without one."""
    for op in functions(module.operation):
        if symbol_name(op) == "main":
            return op
    raise ValueError("the module has no function named main")


def main_block(module: ir.Module) -> ir.Block:
    """Returns the body of the function named main."""
    return main_function(module).regions[0].blocks[0]


def functions(module: ir.Operation) -> list[ir.Operation]:
    """Returns the functions in a module's `operation`, in its order."""
    every = (op.operation for op in module.regions[0].blocks[0].operations)
    return [op for op in every if op.name == "func.func"]


def symbol_name(op: ir.Operation) -> str:
    """Returns the name of a function, a mesh, or a module's `operation`."""
    return ir.StringAttr(op.attributes["sym_name"]).value


def call_target(op: ir.Operation) -> str:
    """Returns a custom call's target; "" for other ops."""
    if op.name != "stablehlo.custom_call":
        return ""
    return ir.StringAttr(op.attributes["call_target_name"]).value


def mesh_axes(mesh: ir.Operation) -> dict[str, int]:
    """Returns {axis: size} of an ``sdy.mesh``."""
    axes: Iterable[Any] = sdy.MeshAttr(mesh.attributes["mesh"]).axes
    return {one.name: one.size for one in (sdy.MeshAxisAttr(axis) for axis in axes)}


def specs_of(attribute: ir.Attribute) -> list[Spec]:
    """Converts Shardy's shardings of several values; drops parts of axes (sub-axes)."""

    def names(dim: ir.Attribute) -> tuple[str, ...]:
        axes = [sdy.AxisRefAttr(one) for one in sdy.DimensionShardingAttr(dim).axes]
        return tuple(axis.name for axis in axes if axis.sub_axis_info is None)

    every = sdy.TensorShardingPerValueAttr(attribute).shardings
    found = [sdy.TensorShardingAttr(one) for one in every]
    return [tuple(map(names, one.dimension_shardings)) for one in found]


def walk(function: ir.Operation) -> list[ir.Operation]:
    """Returns every op inside of an op, inner before outer, in execution order."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    function.walk(visit)
    return found[:-1]  # The function itself comes last.


def every_op(module: ir.Module) -> list[ir.Operation]:
    """Returns the ops of all functions of a module; see `walk`."""
    return [op for function in functions(module.operation) for op in walk(function)]


def calls_host(op: ir.Operation) -> bool:
    """True if an op is a custom call whose target names a callback."""
    return "callback" in call_target(op)


def moves_to_memory(op: ir.Operation) -> bool:
    """True if an op moves a value to host memory or to device memory."""
    return call_target(op) == "annotate_device_placement"


def memory_of_move(op: ir.Operation) -> str:
    """Returns where an op of `moves_to_memory` moves to, such as ``pinned_host``."""
    attributes = ir.DictAttr(op.attributes["mhlo.frontend_attributes"])
    return ir.StringAttr(attributes["_xla_buffer_placement"]).value


def constant(number: str, kind: ir.Type) -> ir.Value:
    """Inserts a constant of a tensor type; each element is `number` (MLIR text)."""
    return hlo.constant(ir.Attribute.parse(f"dense<{number}> : {kind}"))


def zeros(kind: ir.Type) -> ir.Value:
    """Inserts a tensor of zeros of a type, such as an f8 or complex one."""
    number = constant("0", of_element(kind, ir.IntegerType.get_signless(32)))
    return hlo.convert(kind, number)


def of_element(kind: ir.Type, element: ir.Type) -> ir.RankedTensorType:
    """Returns the tensor type with the same shape and another element type."""
    shape = ir.RankedTensorType(kind)
    return ir.RankedTensorType.get(shape.shape, element, shape.encoding)


def converted(value: ir.Value, element: ir.Type) -> ir.Value:
    """Inserts a conversion of a value to an element type."""
    return hlo.convert(of_element(value.type, element), value)


def spread(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Inserts a broadcast to `shape`, whose first dims are the value's own."""
    own = ir.RankedTensorType(value.type)
    kind = ir.RankedTensorType.get(shape, own.element_type)
    return hlo.broadcast_in_dim(kind, value, range(own.rank))


def clone_with(op: ir.Operation, mapping: dict[ir.Value, ir.Value]) -> ir.Operation:
    """Inserts a clone that reads mapped values; adds {old result: new} to `mapping`."""
    clone = op.clone()
    for one in (clone, *walk(clone)):
        for index, operand in enumerate(one.operands):
            if operand in mapping:
                one.operands[index] = mapping[operand]
    mapping.update(zip(op.results, clone.results, strict=True))
    return clone


def copy_symbols(target: ir.Module, source: ir.Module) -> None:
    """Copies meshes and functions of `source` whose names `target` lacks."""
    known = {symbol_name(op.operation) for op in target.body.operations}
    with ir.InsertionPoint.at_block_begin(target.body):
        for opview in source.body.operations:
            if symbol_name(opview.operation) not in known:
                opview.operation.clone()


def fill(
    target: ir.Module,
    source: ir.Module,
    given: Iterable[ir.Value],
    ops: Iterable[ir.Operation],
    made: Iterable[ir.Value],
) -> None:
    """Replaces the body of the target's main function by clones of the source's `ops`.

    Args:
        given: values of the source that the target's arguments replace, in order.
        made: values of the source that the target returns.
    """
    block = main_block(target)
    mapping: dict[ir.Value, ir.Value] = dict(zip(given, block.arguments, strict=True))
    copy_symbols(target, source)
    *stale, last = [one.operation for one in block.operations]
    with ir.InsertionPoint(last):
        for op in ops:
            clone_with(op, mapping)
    for place, value in enumerate(made):
        last.operands[place] = mapping[value]
    for op in reversed(stale):
        op.erase()


def graft(
    text: str, reads: Iterable[ir.Value], into: ir.Module | None = None
) -> list[ir.Value]:
    """Inserts the body of another module's main function, and returns its results.

    Args:
        text: the other module.
        reads: values in place of its arguments.
        into: module that gets the text's other functions and meshes; None without any.
    """
    source = ir.Module.parse(text)
    if into is not None:
        copy_symbols(into, source)
    main = main_block(source)
    mapping: dict[ir.Value, ir.Value] = dict(zip(main.arguments, reads, strict=True))
    *body, last = [one.operation for one in main.operations]
    location: Any = ir.Location.current
    for op in body:
        clone_with(op, mapping).location = location
    return [mapping[value] for value in last.operands]


def program_ops(function: ir.Operation) -> list[ir.Operation]:
    """Returns a function's ops that a `Program` numbers, in the order of their ids."""
    found: list[ir.Operation] = []

    def descend(block: ir.Block) -> None:
        *inner, _ = block.operations
        for opview in inner:
            op = opview.operation
            if op.name in REGION_OPS:
                for region in op.regions:
                    descend(region.blocks[0])
            found.append(op)

    descend(function.regions[0].blocks[0])
    return found


def location_name(location: ir.Location) -> str:
    """Returns JAX's name stack of a location, or ""."""
    return getattr(location, "name_str", None) or ""


def run_passes(module: ir.Module, pipeline: str) -> None:
    """Runs a pipeline in place, without verifying the module after each pass."""
    passes = passmanager.PassManager.parse(pipeline)
    passes.enable_verifier(False)  # It takes most of the time in deep programs.
    passes.run(module.operation)


def copied(module: ir.Module, pipeline: str) -> ir.Module:
    """Returns a copy of a module, changed by a pipeline."""
    with module.context, ir.Location.unknown():
        copy: Any = module.operation.clone(ip=False)
        run_passes(copy, pipeline)
    return copy


def stablehlo(lowered: jax.stages.Lowered) -> ir.Module:
    """Returns the module of a lowering; changes in place are compiled, too."""
    module = lowered.compiler_ir("stablehlo")
    assert module is not None, "JAX lowers to StableHLO"
    return module


def parsed(text: bytes) -> ir.Module:
    """Parses a module's text or bytecode in a new context."""
    # JAX's contexts know all dialects.
    with stablehlo(jax.jit(lambda: 0).lower()).context, ir.Location.unknown():
        return ir.Module.parse(text)


def bytecode(op: ir.Operation) -> bytes:
    """Returns an op's bytecode; a module is given by its `operation`."""
    buffer = io.BytesIO()
    op.write_bytecode(buffer)
    return buffer.getvalue()


def replace_body(target: ir.Module, source: ir.Module) -> None:
    """Replaces functions and meshes of `target` by copies of those of `source`."""
    body = bytecode(source.operation)  # The contexts differ.
    for op in list(target.body.operations):
        op.operation.erase()
    with target.context, ir.Location.unknown(), ir.InsertionPoint(target.body):
        copy = ir.Module.parse(body)
        for op in copy.body.operations:
            op.operation.clone()


def normalise(module: ir.Module) -> int:
    """Inlines calls in place, and removes the user's sharding constraints in main.

    Also removes conversions to a value's own type, which weak types cause. Loops that
    run once become their bodies. Composites stay. Convolutions that XLA would split
    wrongly get another layout. Each use of a small constant gets a copy. Returns the
    number of removed sharding constraints.
    """
    with module.context, ir.Location.unknown():
        run_passes(module, _INLINE)
        function = main_function(module)
        # Composites' functions may have calls, too.
        for op in every_op(module):
            if op.name == "sdy.data_flow_edge":
                forward(op, [op.operands[0]])
            elif op.name == "sdy.named_computation":
                _inline(op)
        erased = 0
        for op in walk(function):
            if op.name == "sdy.sharding_constraint":
                erased += 1
                forward(op, [op.operands[0]])
            elif op.name == "stablehlo.convert":
                if op.operands[0].type == op.results[0].type:
                    forward(op, [op.operands[0]])
            elif op.name not in REGION_OPS:
                _sink_constants(op)
                relayout(op)
            elif op.name == "stablehlo.while" and trip_count(op) == 1:
                # Such as a scan over a single microbatch.
                _put_in_place(op, op.regions[1])
        for each in functions(module.operation):
            _separate_constants(each)
        _tidy_moves(function)
    return erased


def _tidy_moves(function: ir.Operation) -> None:
    """Removes moves to the same memory; an argument's comes late, a result's early."""
    [block] = function.regions[0].blocks
    moves = []
    for op in filter(moves_to_memory, [one.operation for one in block.operations]):
        maker = owner_of(op.operands[0])
        is_moved = maker is not None and moves_to_memory(maker)
        where = memory_of_move(maker) if maker and is_moved else "device"
        if maker is not None and memory_of_move(op) == where:
            forward(op, [op.operands[0]])
        else:
            moves.append(op)
    ops = [one.operation for one in block.operations] if moves else []
    places = {op: number for number, op in enumerate(ops)}
    for op in moves:
        [value], [result] = op.operands, op.results
        readers = [places[_within(use.owner, function)] for use in result.uses]
        if (maker := owner_of(value)) is None:
            if readers:
                op.move_before(ops[min(readers)])
        elif all(ops[i] is ops[-1] for i in readers):
            op.move_after(maker)


def _within(op: Any, parent: Any) -> ir.Operation:
    """Returns the op directly inside of `parent` that is or contains `op`."""
    op = op.operation
    while op.parent != parent:
        op = op.parent.operation
    return op


def _separate_constants(function: ir.Operation) -> None:
    """Gives every use of a small constant its own copy, in the constant's block.

    Inlining merges constants of equal values. Otherwise a learning rate that happens to
    equal an epsilon would make another program than one that does not.
    """
    merged: dict[ir.Operation, None] = {}
    for op in walk(function):
        for index, operand in enumerate(op.operands):
            constant = owner_of(operand)
            if constant is None or not _is_small_constant(constant):
                continue
            merged[constant] = None
            with ir.InsertionPoint(_within(op, constant.parent)):
                op.operands[index] = constant.clone().results[0]
    for constant in merged:
        constant.erase()


def _is_small_constant(op: ir.Operation) -> bool:
    if op.name != "stablehlo.constant":
        return False
    if prod(op.results[0].type.shape) <= MOST_SMALL_ELEMENTS:
        return True
    value = numbers_of(op)
    return value is not None and value.is_splat


def numbers_of(constant: ir.Operation) -> ir.DenseElementsAttr | None:
    """Returns a constant's numbers; None for complex numbers and MLIR resources."""
    try:
        value: Any = constant.attributes["value"]
    except TypeError:
        return None
    return value if isinstance(value, ir.DenseElementsAttr) else None


def _sink_constants(op: ir.Operation) -> None:
    """Copies constants that an op's regions use from outside into the regions."""
    for region in op.regions:
        for block in region.blocks:
            copies: dict[ir.Value, ir.Value] = {}
            for inner in [o.operation for o in block.operations]:
                for index, operand in enumerate(inner.operands):
                    owner = owner_of(operand)
                    if owner is None or owner.parent == op:
                        continue
                    if operand not in copies:
                        with ir.InsertionPoint.at_block_begin(block):
                            copies[operand] = owner.clone().results[0]
                    inner.operands[index] = copies[operand]


def forward(op: ir.Operation, values: Sequence[ir.Value]) -> None:
    """Removes an op; users of its results read `values` instead."""
    for result, value in zip(list(op.results), values, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def _inline(call: ir.Operation) -> None:
    scope = location_name(call.location)
    for op in walk(call):
        name = location_name(op.location)
        if scope and not name.startswith(scope.split("/", 1)[0]):
            joined = f"{scope}/{name}" if name else scope
            op.location = ir.Location.name(joined, op.location)
    _put_in_place(call, call.regions[0])


def _put_in_place(op: ir.Operation, body: ir.Region) -> None:
    """Replaces an op by the ops of a region that takes the op's operands."""
    block = body.blocks[0]
    for argument, operand in zip(list(block.arguments), list(op.operands), strict=True):
        argument.replace_all_uses_with(operand)
    *inner, last = [one.operation for one in block.operations]
    for one in inner:
        one.move_before(op)
    returned = list(last.operands)
    last.erase()
    forward(op, returned)


def missing_pipelines() -> dict[str, str]:
    """Returns {pipeline: error} of those in `PIPELINES` that this jaxlib lacks."""
    missing = {}
    with ir.Context():
        for pipeline in PIPELINES:
            try:
                passmanager.PassManager.parse(pipeline)
            except ValueError as error:
                missing[pipeline] = str(error)
    return missing


def trip_count(loop: ir.Operation) -> int | None:
    """Returns how often a loop's body runs; None if it cannot be read.

    Reads loops in JAX's form of ``scan`` and ``fori_loop``. The body adds a step of at
    least 1 to a counter, the condition tests if the counter is below a limit, and
    start, limit and step are constants. The last sum must not overflow.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    test, after = owner_of(returned(loop.regions[0])[0]), returned(loop.regions[1])
    if test is None or test.name != "stablehlo.compare":
        return None
    if "LT" not in str(test.attributes["comparison_direction"]):
        return None
    place, of_limit = (_place(value, condition) for value in test.operands)
    added = None if place is None else owner_of(after[place])
    if place is None or added is None or added.name != "stablehlo.add":
        return None
    steps = [value for value in added.operands if _place(value, body) != place]
    is_fixed = of_limit is None or _place(after[of_limit], body) == of_limit
    if len(steps) != 1 or not is_fixed:
        return None
    limit = test.operands[1] if of_limit is None else loop.operands[of_limit]
    start, end, step = map(_integer, (loop.operands[place], limit, *steps))
    if start is None or end is None or step is None or step < 1:
        return None
    trips = max(0, -(-(end - start) // step))
    kind = ir.IntegerType(after[place].type.element_type)
    most = 2 ** (kind.width - (not kind.is_unsigned)) - 1
    return trips if start + trips * step <= most else None


def returned(region: ir.Region) -> list[ir.Value]:
    """Returns the values that a region returns."""
    *_, last = region.blocks[0].operations
    return list(last.operation.operands)


def owner_of(value: ir.Value) -> ir.Operation | None:
    """Returns the op that makes a value; None for an argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def _place(value: ir.Value, block: ir.Block) -> int | None:
    """Returns the index of an argument of `block`; None for other values."""
    return ir.BlockArgument(value).arg_number if value.owner == block else None


def _integer(value: ir.Value) -> int | None:
    """Returns the number of an integer constant of one element; None for others."""
    owner = owner_of(value)
    if owner is None or owner.name != "stablehlo.constant":
        return None
    numbers: Any = numbers_of(owner)
    is_one = isinstance(numbers, ir.DenseIntElementsAttr) and len(numbers) == 1
    return ir.IntegerAttr(numbers.get_splat_value()).value if is_one else None
