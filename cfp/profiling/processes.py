"""Keeps the processes of one program in step while they measure.

All must run the same programs equally often: a collective waits for every device,
and for ever if one does not come. So whatever decides what is run next is settled
between the processes, and never follows from what only one of them knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

TOPOLOGY_SETTING = "jax_mock_gpu_topology"


def mocked_topology() -> str:
    """The topology that one GPU only plays a part of; "" where all devices are real.

    See `cfp.devices.mock`.
    """
    return str(jax.config.values.get(TOPOLOGY_SETTING) or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What the processes of a program settle together.

    Attributes:
      alone: there is one process, which settles everything by itself. Otherwise
        each call waits until all processes have made it.
    """

    alone: bool

    @classmethod
    def of(cls, mesh: Mesh) -> Agreement:
        """The agreement of the processes that a mesh's devices belong to.

        A mesh of several processes must be one of all that `jax.distributed` knows.
        """
        if mocked_topology():
            return cls(alone=True)  # The other processes do not exist.
        mine = jax.process_index()
        return cls(alone=all(d.process_index == mine for d in mesh.devices.flat))

    def seconds(self, duration: float) -> float:
        """Process 0's duration."""
        if self.alone:
            return duration
        # In 32 bits, which every setting of JAX keeps.
        return float(multihost_utils.broadcast_one_to_all(np.float32(duration)))

    def everywhere(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag whether it is true in all processes."""
        if self.alone or not flags:
            return list(flags)
        # One row for each process.
        rows = multihost_utils.process_allgather(np.array(flags, np.int32))
        return np.min(np.asarray(rows), axis=0).astype(bool).tolist()

    def least(self, count: int) -> int:
        """The least count of any process, in whole MiB where there are several."""
        if self.alone:
            return count
        # In 32 bits, which every setting of JAX keeps.
        rows = multihost_utils.process_allgather(np.int32(count >> 20))
        return int(np.min(np.asarray(rows))) << 20
