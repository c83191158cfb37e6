"""Makes the computation of one device of a partitioned program a program of its own.

XLA's partitioner turns a program for N devices into one that each of them runs on its
own shards, with collectives between them. Here collectives become local ops of the same
result shapes, so that one device runs the computation on real numbers:

==================  ==============================================================
all-gather          copies of the local part, which is what memory it fills
all-to-all          the local part in another shape
reduce-scatter      a slice of the local part
all-reduce          the local part as it is; a sum of one number times the devices,
                    since a loop may end by it
all others          the local part as it is
partition number    zero, which the compiler does not know
==================  ==============================================================

Optimization barriers stand where the collectives stood: nothing is fused or simplified
across them, as nothing is across a collective. So all kernels are those of the
partitioned program, but for copies that one of the two has and the other has not; see
:mod:`cfp.cost.step_time`. What is in the memory of the host stays there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import jax
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.mlir import ir
from jax.sharding import Mesh, Sharding

from cfp.program import shardy
from cfp.program.signature import Signature

_PASS = "spmd-partitioning"
_SHARDING = "mhlo.sharding"
_AS_IT_IS = frozenset(
    "stablehlo.all_reduce stablehlo.collective_broadcast stablehlo.collective_permute"
    " stablehlo.cross-replica-sum".split()
)
_AXIS = re.compile(r'axis_ref<name = "([^"]+)"')  # Of groups by the axes of a mesh.
_NUMBERS = frozenset(("stablehlo.partition_id", "stablehlo.replica_id"))


def dump_options(folder: Path) -> Mapping[str, object]:
    """Compiler options that have XLA write the partitioned program into a folder."""
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_pass_re": f"^{_PASS}$",
        "xla_dump_hlo_as_proto": True,
    }


def partitioned_program(folder: Path) -> bytes:
    """The partitioned program as StableHLO, of a compile with `dump_options`.

    Raises:
        ValueError: there is none: the program came from a cache, or has one partition.
    """
    found = sorted(folder.glob(f"*.after_{_PASS}.*.hlo.pb"))
    if not found:
        raise ValueError(f"expected a dump after {_PASS}, got none: was it compiled?")
    return _jax.mlir.hlo_to_stablehlo(_first_field(found[-1].read_bytes()))


def lower_local(
    partitioned: bytes,
    types: Signature,
    shardings: tuple[Sequence[Sharding], Sequence[Sharding]],
    mesh: Mesh,
    donated: Sequence[int] = (),
) -> jax.stages.Lowered:
    """Makes one device's computation ready to compile for it alone.

    Args:
        partitioned: of `partitioned_program`.
        types: of the whole program's inputs and outputs.
        shardings: of these.
        mesh: of the one device.
        donated: positions of inputs whose memory is overwritten.

    Raises:
        ValueError: an op's results cannot be made without the other devices.
    """
    local = Signature(
        tuple(map(_local, types.inputs, shardings[0])),
        tuple(map(_local, types.outputs, shardings[1])),
        types.memory,
    )
    specs = [((),) * len(one.shape) for one in (*local.inputs, *local.outputs)]
    count = len(local.inputs)
    lowered = local.lower(*local.shardings(mesh, specs[:count], specs[count:]), donated)
    module = shardy.stablehlo(lowered)
    with module.context, ir.Location.unknown():
        source = ir.Module.parse(partitioned)
        meshes = [o for o in source.body.operations if o.operation.name == "sdy.mesh"]
        axes = (shardy.mesh_axes(one.operation) for one in meshes)
        sizes = {name: size for one in axes for name, size in one.items()}
        for function in shardy.functions(source.operation):
            shardy.drop_signature(function)
            for op in shardy.walk(function):
                _make_local(op, sizes)
        _call(module, source)
    return lowered


def _local(one: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        sharding.shard_shape(one.shape), one.dtype, weak_type=one.weak_type
    )


def _first_field(message: bytes) -> bytes:
    """The first field of a protocol buffer's message, which holds a message."""
    if message[:1] != b"\x0a":
        raise ValueError("expected a module in the first field of an HloProto")
    size, place = 0, 1
    while True:
        byte = message[place]
        size |= (byte & 127) << 7 * (place - 1)
        place += 1
        if byte < 128:
            return message[place : place + size]


def _call(target: ir.Module, source: ir.Module) -> None:
    """Has the target's main function return what the source's does."""
    main = shardy.main_function(target)
    block = main.regions[0].blocks[0]
    *stale, terminator = [one.operation for one in block.operations]
    with ir.InsertionPoint(main):
        for function in shardy.functions(source.operation):
            # The source's names of functions that it calls; main's alone is taken.
            clone = function.clone()
            if function == shardy.main_function(source):
                clone.attributes["sym_name"] = ir.StringAttr.get("one_device")
            clone.attributes["sym_visibility"] = ir.StringAttr.get("private")
    with ir.InsertionPoint(terminator):
        call = ir.Operation.create(
            "func.call",
            results=[value.type for value in terminator.operands],
            operands=list(block.arguments),
            attributes={"callee": ir.FlatSymbolRefAttr.get("one_device")},
        )
    for place, result in enumerate(call.results):
        terminator.operands[place] = result
    for op in reversed(stale):
        op.erase()


def _make_local(op: ir.Operation, sizes: Mapping[str, int]) -> None:
    """Replaces an op that needs other devices by one that does not."""
    with ir.InsertionPoint(op):
        found = _stands_for(op, sizes)
    if _SHARDING in op.attributes:
        del op.attributes[_SHARDING]
    if found is not None:
        shardy.forward(op, found)


def _stands_for(op: ir.Operation, sizes: Mapping[str, int]) -> list[ir.Value] | None:
    """Makes local values in place of an op's results; None if it needs no others."""
    if op.name in _NUMBERS:
        return _barred([shardy.constant("0", op.results[0].type)])
    if op.name == "mhlo.copy":
        return [op.operands[0]]  # StableHLO has none.
    if op.name in _AS_IT_IS:
        parts = _barred(list(op.operands))
        return [_scaled(one, _summed_over(op, sizes)) for one in parts]
    if op.name in ("stablehlo.all_gather", "stablehlo.all_to_all"):
        parts = _barred(list(op.operands))
        types = [ir.RankedTensorType(one.type) for one in op.results]
        return _barred([*map(_copied, parts, types)])
    if op.name == "stablehlo.reduce_scatter":
        [part] = _barred(list(op.operands))
        return [_first(part, ir.RankedTensorType(op.results[0].type))]
    if shardy.call_target(op) == "ragged_all_to_all":
        return _barred([op.operands[1]])
    if op.name in ("stablehlo.send", "stablehlo.recv"):
        raise ValueError(f"{op.name} has no result that one device could make")
    return None


def _summed_over(op: ir.Operation, sizes: Mapping[str, int]) -> int:
    """The devices over which an all-reduce adds, by sizes of axes; 1 for other ops."""
    if op.name != "stablehlo.all_reduce":
        return 1
    first, *_ = op.regions[0].blocks[0].operations
    if first.operation.name != "stablehlo.add":
        return 1
    groups = op.attributes["replica_groups"]
    if isinstance(groups, ir.DenseIntElementsAttr):
        return ir.RankedTensorType(groups.type).shape[-1]
    return prod(sizes.get(name, 1) for name in _AXIS.findall(str(groups)))


def _scaled(part: ir.Value, times: int) -> ir.Value:
    """One number times another; arrays are left as they are, for their time."""
    kind = ir.RankedTensorType(part.type)
    is_float = isinstance(kind.element_type, ir.FloatType)
    if times == 1 or prod(kind.shape) > 1:
        return part
    if not (is_float or isinstance(kind.element_type, ir.IntegerType)):
        return part
    factor = shardy.constant(f"{times}{'.0' if is_float else ''}", kind)
    return shardy.make("stablehlo.multiply", kind, part, factor)


def _barred(values: Sequence[ir.Value]) -> list[ir.Value]:
    return list(shardy.make_barrier(values).results)


def _copied(part: ir.Value, kind: ir.RankedTensorType) -> ir.Value:
    """Fills a shape with copies of a part; of an equally large one it is a reshape."""
    shape = list(ir.RankedTensorType(part.type).shape)
    wanted = list(kind.shape)
    if shape == wanted:
        return part
    if prod(shape) != prod(wanted):
        [dim] = [d for d, size in enumerate(shape) if size != wanted[d]]
        times = wanted[dim] // shape[dim]
        larger = [*shape[:dim], times, *shape[dim:]]
        dims = [d + (d >= dim) for d in range(len(shape))]
        between = ir.RankedTensorType.get(larger, kind.element_type)
        where = ir.DenseI64ArrayAttr.get(dims)
        name = "stablehlo.broadcast_in_dim"
        part = shardy.make(name, between, part, broadcast_dimensions=where)
    return shardy.make("stablehlo.reshape", kind, part)


def _first(part: ir.Value, kind: ir.RankedTensorType) -> ir.Value:
    """The first piece of a value that has a shape."""
    sizes = list(kind.shape)
    if not sizes:
        return part
    return shardy.make(
        "stablehlo.slice",
        kind,
        part,
        start_indices=ir.DenseI64ArrayAttr.get([0] * len(sizes)),
        limit_indices=ir.DenseI64ArrayAttr.get(sizes),
        strides=ir.DenseI64ArrayAttr.get([1] * len(sizes)),
    )
