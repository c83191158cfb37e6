"""Executables for later use: in this process from a race, or from disk.

Files stand beside the measurements, in a folder of the user alone. Their name is a
digest of everything that a compile depends on: module, constraints, options, devices,
and the versions of JAX, XLA and the driver. A file that cannot be read is compiled
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding

from cfp.profiling.builder import Built, Job
from cfp.profiling.files import make_private_folder, open_private
from cfp.profiling.key import environment_parts
from cfp.program.constrain import Constraints
from cfp.program.graph import Program
from cfp.program.meaning import compiler_settings
from cfp.program.part import Signature, signature
from cfp.program.step import FlatStep

# Of all executables together; the least recently used go first. Guess.
_MOST_BYTES = 4 * 2**30
_SUFFIX = ".executable"


@dataclass(frozen=True, slots=True)
class Executables:
    """A folder of executables for the devices of one process.

    Attributes:
        folder: made when something is kept.
    """

    folder: Path

    def key(
        self, text: bytes, mesh: Mesh, options: Mapping[str, str], step: FlatStep
    ) -> str:
        """A digest of all that compiling a module depends on.

        Args:
            text: the module; see `Lowering.bare_text`.
            step: whose types say more than the module's.
        """
        devices = [*mesh.devices.flat]
        # Types say more than the module's: keys, and numbers of no type of their own.
        leaves = [*step.avals, *step.traced.jaxpr.out_avals]
        rest = (
            environment_parts(devices),
            [device.id for device in devices],
            mesh.axis_types,
            sorted(options.items()),
            [(str(leaf), leaf.weak_type) for leaf in leaves],
            step.donated,
            compiler_settings(),
        )
        return hashlib.sha256(text + repr(rest).encode()).hexdigest()

    def get(self, key: str, mesh: Mesh) -> jax.stages.Compiled | None:
        """Loads the executable of a key on the devices; None if there is no file."""
        path = self._path(key)
        if not _is_own(path):
            return None
        devices = [*mesh.devices.flat]
        try:
            program = pickle.loads(path.read_bytes())
            compiled = deserialize_and_load(
                *program, backend=devices[0].client, execution_devices=devices
            )
        except Exception:
            # Damaged, or of a build of XLA that no version tells: readers raise
            # anything. It is compiled again, and written anew.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # It may have been removed meanwhile.
            os.utime(path)
        return compiled

    def put(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Keeps an executable, where its platform can write it down."""
        if _is_own(self._path(key)):
            return
        try:
            data = pickle.dumps(serialize(compiled))
        except Exception:
            # Constants or effects that JAX does not write down, or kinds of keys whose
            # functions no other process finds: picklers raise anything.
            return
        try:
            make_private_folder(self.folder)
            part = self.folder / f"{key}.{os.getpid()}.part"
            with open_private(part, "wb") as file:
                file.write(data)
            part.replace(self._path(key))
            self._make_room()
        except OSError:
            return  # A full or read-only disk is no reason not to run the step.

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _make_room(self) -> None:
        """Removes the least recently used files while all together are too large."""
        found = [(p.stat(), p) for p in self.folder.glob(f"*{_SUFFIX}")]
        total = sum(stat.st_size for stat, _ in found)
        for stat, path in sorted(found, key=lambda pair: pair[0].st_mtime)[:-1]:
            if total <= _MOST_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= stat.st_size


def _is_own(path: Path) -> bool:
    """True if a file is there that nobody but this user can have written."""
    try:
        stat = path.stat()
    except OSError:
        return False
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022


# --------------------------------------------------------------- the race's executable


@dataclass(frozen=True)
class ReusableExecutable:
    """A compiled program that does all that a step does.

    Attributes:
        built: takes and returns the step's flat leaves.
        content: a digest of the step's program, the values of all constants included.
    """

    built: Built
    job: Job = field(repr=False)
    mesh: Mesh = field(repr=False)
    content: str
    types: Signature = field(repr=False)

    @classmethod
    def of(
        cls, program: Program, mesh: Mesh, job: Job, built: Built
    ) -> ReusableExecutable:
        """Makes the record of a whole program that was built."""
        types = signature(program, job.part)
        return cls(built, job, mesh, program.content, types)

    def does(
        self,
        step: FlatStep,
        program: Program,
        ins: Sequence[NamedSharding],
        outs: Sequence[NamedSharding],
        constraints: Constraints,
        options: Mapping[str, str],
    ) -> bool:
        """True if it is a step's program, compiled in just this way.

        Args:
            constraints: what the partitioner is constrained to.
        """
        job, types = self.job, self.types
        return (
            self.content == program.content
            and job.constraints == constraints
            and dict(job.options) == dict(options)
            and types == signature(program, job.part)
            and types.shardings(self.mesh, job.in_specs, job.out_specs)
            == (tuple(ins), tuple(outs))
            and set(job.donated) == {i for i, given in enumerate(step.donated) if given}
        )
