"""Another process to compile in, and to keep records in.

What is built, run and kept stays one pipeline (`cfp.profiling.scheduler`); a remote
compiler changes where two of its steps happen. `cfp.cluster.on_ray` has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from cfp.profiling.compiled import compile_right
from cfp.profiling.record import ProfileRecord, Status
from cfp.program.signature import Parcel, WrongPlace, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class Executable:
    """A compiled program that another process can load.

    Attributes:
        data, in_tree, out_tree: of `jax.experimental.serialize_executable`.
    """

    data: bytes
    in_tree: Any
    out_tree: Any
    text: str

    def load(self, mesh: Mesh) -> jax.stages.Compiled:
        """The program, ready to run on devices of this process.

        Raises:
            WrongPlace: it was compiled for others.
        """
        devices = list(mesh.devices.flat)
        try:
            return deserialize_and_load(
                self.data,
                self.in_tree,
                self.out_tree,
                backend=devices[0].client,
                execution_devices=devices,
            )
        except jax.errors.JaxRuntimeError as error:
            raise WrongPlace(f"it cannot be loaded: {error}") from error


class RefusedElsewhere(Exception):
    """The compiler's messages in another process.

    Attributes:
        kind: the error's type there.
        status: of its record.
    """

    def __init__(self, kind: str, message: str, status: Status):
        super().__init__(message)
        self.kind = kind
        self.status: Status = status


class RemoteCompiler(Protocol):
    """Interface to another process that compiles programs and keeps records."""

    @property
    def at_once(self) -> int:
        """The number of programs that may be under way."""
        ...

    def compiles_for(self, platform: str) -> bool:
        """Returns True if programs for a platform can be compiled there."""
        ...

    def compile(self, parcel: Parcel, options: Mapping[str, str]) -> Executable:
        """Compiles a program, as `compile_right` does. Called in threads.

        Raises:
            RefusedElsewhere: it cannot be compiled.
            WrongPlace: nothing can be, there.
        """
        ...

    def keep(self, records: Sequence[ProfileRecord], replace: bool) -> None:
        """Called with whatever is put into the store, once it is there."""
        ...


def remote_for(platform: str, remote: RemoteCompiler | None) -> RemoteCompiler | None:
    """A remote compiler, if it compiles for a platform."""
    return remote if remote is not None and remote.compiles_for(platform) else None


def compile_parcel(parcel: Parcel, options: Mapping[str, str]) -> Executable:
    """Compiles a parcel, in the remote process.

    Raises:
        Exception: whatever compilers raise.
    """
    compiled, text = compile_right(unpack(parcel, parcel.mesh()), options)
    data, in_tree, out_tree = serialize(compiled)
    return Executable(data=data, in_tree=in_tree, out_tree=out_tree, text=text)
