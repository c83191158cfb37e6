"""An all-reduce over all GPUs by NCCL itself, through CuPy, without JAX."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from cfp.cluster.doctor.probes.answer import answer

_BYTES = 256 << 20
_REPEATS = 10


def find() -> dict[str, Any]:
    """The number of GPUs, whether the sum is right, and the median time."""
    cupy = import_module("cupy")
    nccl = import_module("cupy.cuda.nccl")
    count = cupy.cuda.runtime.getDeviceCount()
    communicators = nccl.NcclCommunicator.initAll(list(range(count)))
    sent, received, streams = [], [], []
    for index in range(count):
        with cupy.cuda.Device(index):
            sent.append(cupy.full(_BYTES // 4, index + 1, cupy.float32))
            received.append(cupy.zeros_like(sent[-1]))
            streams.append(cupy.cuda.Stream(non_blocking=True))
            cupy.cuda.runtime.deviceSynchronize()

    def reduce() -> None:
        nccl.groupStart()
        for index in range(count):
            with cupy.cuda.Device(index):
                communicators[index].allReduce(
                    sent[index].data.ptr,
                    received[index].data.ptr,
                    _BYTES // 4,
                    nccl.NCCL_FLOAT32,
                    nccl.NCCL_SUM,
                    streams[index].ptr,
                )
        nccl.groupEnd()
        for index in range(count):
            with cupy.cuda.Device(index):
                streams[index].synchronize()

    reduce()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        reduce()
        times.append((time.perf_counter() - started) * 1e3)
    right = True
    for index in range(count):
        with cupy.cuda.Device(index):
            right &= bool((received[index] == count * (count + 1) / 2).all())
    return {
        "devices": count,
        "right": right,
        "bytes": _BYTES,
        "median_ms": sorted(times)[_REPEATS // 2],
        "version": nccl.get_version(),
    }


if __name__ == "__main__":
    answer(find)
