"""Free and total memory of each GPU, as CUDA has them."""

from __future__ import annotations

from importlib import import_module

from cfp.cluster.doctor.probes.answer import answer


def find() -> dict[str, list[tuple[int, int]]]:
    """Bytes free and in all, by device, in CUDA's order."""
    cuda = import_module("cupy").cuda
    found = []
    for index in range(cuda.runtime.getDeviceCount()):
        with cuda.Device(index):
            found.append(cuda.runtime.memGetInfo())
    return {"free_total": found}


if __name__ == "__main__":
    answer(find)
