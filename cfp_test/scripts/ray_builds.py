"""A hundred builds on one, two and four workers of a Ray cluster, by processor time.

    python -m cfp_test.scripts.ray_builds --output builds.json --count 100

Every build is another program: a layer of another width. The processor time of the
processes of all builders is added up: on a machine with fewer cores than workers, wall
time says nothing about a cluster. What a cluster of idle nodes takes at least is the
largest of any worker; starting and importing JAX is in it, once for each worker.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cfp_test.scripts.rows import Rows
from cfp_test.support.quick_flags import QUICK_FLAGS

DEVICES = 2
WORKERS = (1, 2, 4)


def noting(log: str) -> Any:
    """Acts as a builder; returns what its process has used of processors by then."""

    def compile_noted(parcel: Any, options: Any) -> Any:
        from cfp.cluster.actors import compile_there

        made = compile_there(parcel, options)
        digest = hashlib.sha256(parcel.module).hexdigest()
        line = f"{os.getpid()} {time.process_time():.4f} {digest}\n"
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)
        return made

    return compile_noted


def parcels(count: int) -> list[Any]:
    """So many programs, each different from all others."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh

    from cfp.program.signature import Signature, pack

    mesh: Mesh = jax.make_mesh((DEVICES,), ("x",))

    def layer(x: Any, up: Any, down: Any) -> tuple[Any]:
        def loss(x: Any, up: Any, down: Any) -> Any:
            hidden = jax.nn.gelu(x @ up) @ down
            return (jax.nn.softmax(x + hidden) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(x, up, down)

    spec_x, spec_w = (("x",), ()), ((), ())
    specs = (spec_x, spec_w, spec_w)
    from jax.sharding import NamedSharding, PartitionSpec

    shardings = tuple(
        NamedSharding(mesh, PartitionSpec(*("x" if axes else None for axes in spec)))
        for spec in specs
    )
    found = []
    for number in range(count):
        width = 16 + 2 * number
        shapes = ((16, 32), (32, width), (width, 32))
        avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        lowered = jax.jit(
            layer, in_shardings=shardings, out_shardings=shardings, keep_unused=True
        ).lower(*avals)
        types = Signature(tuple(avals), tuple(avals))
        found.append(pack(lowered, types, mesh, specs, specs, ()))
    return found


def measured(workers: int, count: int, log: Path) -> dict[str, Any]:
    """One row."""
    import jax
    import ray

    jax.devices()
    from cfp.cluster import actors
    from cfp.cluster.actors import RayPlace

    ray.init(num_cpus=workers, include_dashboard=False, logging_level="warning")
    try:
        todo = parcels(count)
        place = RayPlace(keeper=None)
        usual = actors.compile_there
        actors.compile_there = noting(str(log))
        started = time.monotonic()
        try:
            with ThreadPoolExecutor(place.at_once) as pool:
                made = list(pool.map(lambda one: place.compile(one, {}), todo))
        finally:
            actors.compile_there = usual
        wall = time.monotonic() - started
    finally:
        ray.shutdown()
    lines = [line.split() for line in log.read_text().splitlines()]
    used: dict[str, float] = {}
    for pid, seconds, _ in lines:
        used[pid] = max(used.get(pid, 0.0), float(seconds))
    times = Counter(digest for _, _, digest in lines)
    return {
        "workers": workers,
        "builds": len(made),
        "processes": len(used),
        "processor_seconds": round(sum(used.values()), 2),
        "largest_processor_seconds": round(max(used.values()), 2),
        "wall_seconds": round(wall, 1),
        "builds_by_process": sorted(Counter(pid for pid, _, _ in lines).values()),
        "different": len(times),
        "built_twice": sum(many > 1 for many in times.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    root = str(Path(__file__).parents[2])
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": root,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "XLA_FLAGS": f"{QUICK_FLAGS} --xla_force_host_platform_device_count={DEVICES}",
    }
    import ray

    head = {"what": "builds on Ray workers", "ray": ray.__version__}
    rows = Rows(given.output, {**head, "cores": os.cpu_count(), "count": given.count})
    for workers in WORKERS:
        if rows.find(workers=workers) is None:
            log = given.output.with_suffix(f".{workers}.log")
            log.unlink(missing_ok=True)
            rows.add(measured(workers, given.count, log))
            print(rows.rows[-1], flush=True)
            log.unlink()


if __name__ == "__main__":
    main()
