"""An all-reduce over all devices, compiled by XLA: its result and its time."""

from __future__ import annotations

import time
from typing import Any

from cfp.cluster.doctor.probes.answer import answer

_REPEATS = 10
_MEGABYTES = {"cpu": 4}
_DEFAULT_MEGABYTES = 256


def find() -> dict[str, Any]:
    """Returns the number of devices, whether the sum is right, and the median time."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.local_devices()
    count = len(devices)
    mesh = Mesh(np.array(devices), ("x",))
    megabytes = _MEGABYTES.get(devices[0].platform, _DEFAULT_MEGABYTES)
    length = megabytes * 2**20 // 4
    rows = NamedSharding(mesh, PartitionSpec("x"))

    def fill() -> jax.Array:
        # A row for each device, each with another number.
        return jnp.broadcast_to(
            jnp.arange(1.0, count + 1, dtype=jnp.float32)[:, None], (count, length)
        )

    def total(row: jax.Array) -> jax.Array:
        return jax.lax.psum(row, "x")

    x = jax.jit(fill, out_shardings=rows)()
    spec = PartitionSpec("x")
    run = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec))
    # Each device's sum stands in its own row.
    out = run(x)
    wanted = count * (count + 1) / 2
    right = all(bool((shard.data == wanted).all()) for shard in out.addressable_shards)
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run(x).block_until_ready()
        times.append((time.perf_counter() - started) * 1e3)
    return {
        "devices": count,
        "right": right,
        "bytes": length * 4,
        "median_ms": sorted(times)[_REPEATS // 2],
    }


if __name__ == "__main__":
    answer(find)
