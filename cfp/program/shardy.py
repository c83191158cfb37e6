"""Pass pipelines over a module, all in place: normalise, add rules, take them off.

Two lowerings of one step that differ only in their shardings have the same ops in
the same order after :func:`normalise`; plans rely on it to name ops by number.
"""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.mlir import ir, passmanager

_INLINE = "builtin.module(inline,symbol-dce,sdy-import-func-calls,symbol-dce)"
_RULES = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
RULE = "sdy.sharding_rule"

# Regions of these ops are programs of their own; regions of all other ops (reduce,
# scatter, sort, ...) hold scalar code that belongs to the op.
REGION_OPS = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})


def main_function(module: ir.Module) -> ir.Operation:
    """The module's public function."""
    for op in module.body.operations:
        if (
            op.operation.name == "func.func"
            and ir.StringAttr(op.attributes["sym_name"]).value == "main"
        ):
            return op.operation
    raise ValueError("the module has no function named main")


def argument_count(module: ir.Module) -> int:
    """The number of arguments of the main function."""
    return len(main_function(module).regions[0].blocks[0].arguments)


def _descend(block: ir.Block) -> Iterator[ir.Operation]:
    for opview in list(block.operations):
        op = opview.operation
        for region in op.regions:
            for inner in region.blocks:
                yield from _descend(inner)
        yield op


def walk(function: ir.Operation) -> Iterator[ir.Operation]:
    """Every op below a function, inner before outer, in execution order."""
    for block in function.regions[0].blocks:
        yield from _descend(block)


def program_ops(function: ir.Operation) -> list[ir.Operation]:
    """The ops that a :class:`~cfp.program.graph.Program` counts, in its order."""
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
    """The name stack that JAX put into a location, or ''."""
    return getattr(location, "name_str", None) or ""


def normalise(module: ir.Module) -> int:
    """Inlines every call and removes the user's own sharding constraints.

    Returns:
        The number of sharding constraints that were removed.
    """
    with module.context, ir.Location.unknown():
        passmanager.PassManager.parse(_INLINE).run(module.operation)
        function = main_function(module)
        for op in list(walk(function)):
            if op.name == "sdy.data_flow_edge":
                _forward(op, [op.operands[0]])
        erased = 0
        for op in list(walk(function)):
            if op.name == "sdy.named_computation":
                _inline(op)
            elif op.name == "sdy.sharding_constraint":
                erased += 1
                _forward(op, [op.operands[0]])
            elif op.name not in REGION_OPS:
                _sink_constants(op)
    return erased


def _sink_constants(op: ir.Operation) -> None:
    """Gives the scalar code of a sort or the like its own copy of what it captures.

    So an op depends on its operands alone, and can be cloned elsewhere.
    """
    for region in op.regions:
        for block in region.blocks:
            copies: dict[ir.Value, ir.Value] = {}
            for inner in [o.operation for o in block.operations]:
                for index, operand in enumerate(inner.operands):
                    owner = operand.owner
                    if isinstance(owner, ir.Block) or owner.operation.parent == op:
                        continue
                    if operand not in copies:
                        with ir.InsertionPoint.at_block_begin(block):
                            copies[operand] = owner.operation.clone().results[0]
                    inner.operands[index] = copies[operand]


def _forward(op: ir.Operation, values: list[ir.Value]) -> None:
    for result, value in zip(list(op.results), values, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def _inline(call: ir.Operation) -> None:
    """Moves a named computation's ops before it and drops the shell."""
    scope = location_name(call.location)
    block = call.regions[0].blocks[0]
    for argument, operand in zip(
        list(block.arguments), list(call.operands), strict=True
    ):
        argument.replace_all_uses_with(operand)
    *inner, last = [o.operation for o in block.operations]
    for op in inner:
        _prefix_scope(op, scope)
        op.move_before(call)
    returned = list(last.operands)
    last.erase()
    _forward(call, returned)


def _prefix_scope(op: ir.Operation, scope: str) -> None:
    name = location_name(op.location)
    if scope and not name.startswith(scope.split("/", 1)[0]):
        joined = f"{scope}/{name}" if name else scope
        op.location = ir.Location.name(joined, op.location)
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _prefix_scope(inner.operation, scope)


def add_rules(module: ir.Module) -> None:
    """Writes Shardy's sharding rule on every op that has one."""
    with module.context, ir.Location.unknown():
        passmanager.PassManager.parse(_RULES).run(module.operation)
