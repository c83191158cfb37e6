"""Propagates a few shardings over a whole program, as the compiler does by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import AbstractMesh

from cfp.program import shardy
from cfp.program.constrain import Constraints, Inserter
from cfp.program.graph import Program, Spec

_NUMBER = "cfp.number"
_SHARDING = "sdy.sharding"


def propagate(
    program: Program,
    mesh: Sequence[tuple[str, int]],
    arguments: Sequence[Spec],
    outputs: Sequence[Spec | None],
    values: Mapping[int, Spec],
) -> dict[int, Spec]:
    """Shards a program's values as Shardy's propagation does.

    Nothing is compiled. What partitions a program afterwards is the compiler's: where
    an op's operands and result disagree, it chooses what to reshard.

    Args:
        program: the program.
        mesh: names and sizes of the mesh's axes.
        arguments: how each argument is sharded.
        outputs: how each result is; None leaves it to propagation.
        values: how some values inside are constrained to be, by id.

    Returns:
        The sharding of every value that propagation shards, or was constrained, by id.
    """
    where = AbstractMesh(tuple(s for _, s in mesh), tuple(name for name, _ in mesh))
    empty = jax.jit(lambda: ()).lower().compiler_ir("stablehlo")
    assert empty is not None, "JAX lowers to StableHLO"
    with empty.context, ir.Location.unknown():
        module = ir.Module.parse(program.text)
        function = shardy.main_function(module)
        ops = shardy.program_ops(function)
        number = ir.IntegerType.get_signless(64)
        for index, op in enumerate(ops):
            op.attributes[_NUMBER] = ir.IntegerAttr.get(number, index)
        inserter = Inserter(module, function, ops, program, where)
        inserter.insert(Constraints(values, {}))

        def marked(specs: Sequence[Spec | None]) -> ir.ArrayAttr:
            every = ({_SHARDING: inserter.attribute(s)} if s else {} for s in specs)
            return ir.ArrayAttr.get([ir.DictAttr.get(one) for one in every])

        function.attributes["arg_attrs"] = marked(arguments)
        function.attributes["res_attrs"] = marked(outputs)
        pipeline = passmanager.PassManager.parse(shardy.PROPAGATION)
        pipeline.run(module.operation)
        found = dict(zip(program.args, arguments, strict=True))
        for op in shardy.walk(shardy.main_function(module)):
            if _NUMBER in op.attributes and _SHARDING in op.attributes:
                index = ir.IntegerAttr(op.attributes[_NUMBER]).value
                each = sdy.TensorShardingPerValueAttr(op.attributes[_SHARDING])
                shardings = map(_spec, each.shardings)
                # A call of the host without results has a sharding all the same.
                results = program.ops[index].results
                found.update(zip(results, shardings, strict=False))
        return {**found, **values}


def _spec(attribute: ir.Attribute) -> Spec:
    """A sharding as a spec; what shards by a part of an axis only is left out."""
    dims = sdy.TensorShardingAttr(attribute).dimension_shardings
    axes = (
        [sdy.AxisRefAttr(a) for a in sdy.DimensionShardingAttr(d).axes] for d in dims
    )
    return tuple(tuple(a.name for a in dim if a.sub_axis_info is None) for dim in axes)
