"""Programs that are ready to compile, as data that another process can compile.

A lowering holds devices and MLIR, which stay in their process. Its module is written
down; elsewhere a stand-in with the same signature is lowered for devices there, and
given the module in place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import Mesh

from cfp.program.graph import Spec
from cfp.program.partitioned import unbound
from cfp.program.signature import Signature, is_key, key_name


class WrongPlace(Exception):
    """A process cannot compile something, whatever it is: it is to be elsewhere."""


# Shape, name of the dtype or of a kind of keys, and whether it is a key, or weak.
Array = tuple[tuple[int, ...], str, bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A lowering over flat arguments, as plain data.

    Attributes:
        module: StableHLO, as bytecode of MLIR. Only the version of JAX that wrote it
            is sure to read it.
        inputs, outputs: their types.
        memory: of the host that they are in; see `Signature`.
        in_specs, out_specs: their shardings.
        donated: positions of inputs whose memory the program may overwrite.
        axes: names and sizes of the mesh's axes.
        devices: ids of the mesh's devices, in its order.
        jax_version: of the writer.
    """

    module: bytes
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    memory: tuple[tuple[str, ...], tuple[str, ...]]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    donated: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    jax_version: str

    def mesh(self) -> Mesh:
        """The mesh, of this process's devices with the same ids.

        Raises:
            WrongPlace: there is no such device.
        """
        known = {device.id: device for device in jax.devices()}
        if not known.keys() >= set(self.devices):
            raise WrongPlace(
                f"expected devices {self.devices}, got {sorted(known)}: see XLA_FLAGS"
            )
        devices = np.array([known[number] for number in self.devices])
        names = tuple(name for name, _ in self.axes)
        return Mesh(devices.reshape([size for _, size in self.axes]), names)


def pack(
    lowered: jax.stages.Lowered,
    types: Signature,
    mesh: Mesh,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    donated: Sequence[int],
) -> Parcel:
    """Writes a lowering down.

    Args:
        lowered: from :func:`cfp.program.graft.lower_part`.
        types: of what it takes and returns.
        mesh: its mesh.
        in_specs, out_specs, donated: what it was lowered with.
    """
    module = lowered.compiler_ir("stablehlo")
    assert module is not None, "JAX lowers to StableHLO"
    buffer = BytesIO()
    module.operation.write_bytecode(buffer)
    return Parcel(
        module=buffer.getvalue(),
        inputs=tuple(map(_array, types.inputs)),
        outputs=tuple(map(_array, types.outputs)),
        memory=types.memory,
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        donated=tuple(donated),
        axes=tuple(mesh.shape.items()),
        devices=tuple(device.id for device in mesh.devices.flat),
        jax_version=jax.__version__,
    )


def unpack(parcel: Parcel, mesh: Mesh) -> jax.stages.Lowered:
    """The lowering that was written down, for devices of this process.

    Raises:
        WrongPlace: another version of JAX wrote it, or it has custom_partitioning ops,
            whose callbacks are Python functions of the process that traced them.
    """
    if parcel.jax_version != jax.__version__:
        raise WrongPlace(
            f"expected a program of jax {jax.__version__}, got one of jax "
            f"{parcel.jax_version}"
        )

    inputs, outputs = (tuple(map(_aval, s)) for s in (parcel.inputs, parcel.outputs))
    types = Signature(inputs, outputs, parcel.memory)
    where = types.shardings(mesh, parcel.in_specs, parcel.out_specs)
    lowered = types.lower(*where, parcel.donated)
    module = lowered.compiler_ir("stablehlo")
    assert module is not None, "JAX lowers to StableHLO"
    with module.context, ir.Location.unknown():
        source = ir.Module.parse(parcel.module)
        if (name := unbound(source)) is not None:
            raise WrongPlace(
                f"expected a program without Python callbacks, got one with {name!r}"
            )
        for op in list(module.body.operations):
            op.operation.erase()
        with ir.InsertionPoint(module.body):
            for op in source.body.operations:
                op.operation.clone()
        ours, theirs = module.operation.attributes, source.operation.attributes
        for named in theirs:
            name = named if isinstance(named, str) else named.name
            ours[name] = theirs[name]
    return lowered


def _array(one: jax.ShapeDtypeStruct) -> Array:
    key = is_key(one.dtype)
    name = key_name(one.dtype) if key else np.dtype(one.dtype).name
    return tuple(one.shape), name, key, one.weak_type


def _aval(array: Array) -> jax.ShapeDtypeStruct:
    shape, name, key, weak = array
    dtype = jax.eval_shape(lambda: jax.random.key(0, impl=name)).dtype if key else name
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
