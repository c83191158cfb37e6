"""Which GPUs can reach each other's memory."""

from __future__ import annotations

from importlib import import_module
from itertools import permutations

from cfp.cluster.doctor.probes.answer import answer


def find() -> dict[str, int]:
    """The number of devices, and of ordered pairs of them that can."""
    runtime = import_module("cupy").cuda.runtime
    count = runtime.getDeviceCount()
    able = sum(
        bool(runtime.deviceCanAccessPeer(one, other))
        for one, other in permutations(range(count), 2)
    )
    return {"devices": count, "pairs_with_access": able}


if __name__ == "__main__":
    answer(find)
