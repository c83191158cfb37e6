"""Small programs that the doctor runs in a process of its own.

``python -m cfp.cluster.probes NAME...`` prints a line of JSON for each. Packages are
imported by the probes that need them: an import may be what fails.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

from cfp.cluster.machine import MARK

# Small, and yet whole blocks of all kernels.
SHAPE, KV_HEADS = (1, 256, 4, 64), 2


def find_jax() -> dict[str, Any]:
    """Returns JAX's version and file, pipelines that it lacks, and known faults."""
    import jax

    from cfp.program import corrections, shardy

    return {
        "version": jax.__version__,
        "file": jax.__file__,
        "missing": sorted(shardy.missing_pipelines().values()),
        "faults": len(corrections.faults()),
    }


def find_devices() -> dict[str, Any]:
    """Returns the platform, kind and number of the devices that JAX finds."""
    import jax

    found = jax.local_devices()
    one = found[0]
    return {"platform": one.platform, "kind": one.device_kind, "count": len(found)}


def run_graft() -> dict[str, Any]:
    """Has cfp make a program that sums rows over all devices, and runs it.

    Returns:
        The greatest relative error, and the medians of ten all-reduces.
    """
    import jax
    import jax.numpy as jnp

    from cfp.program.constrain import Constraints
    from cfp.program.graft import lower_part
    from cfp.program.signature import cut_part
    from cfp.program.step import flatten_step
    from cfp.program.trace import trace

    devices = jax.local_devices()
    mesh = jax.sharding.Mesh(devices, ("x",))
    length = (1 << 20) * (1 if devices[0].platform == "cpu" else 64)
    shape = jax.ShapeDtypeStruct((mesh.size, length), jnp.float32)
    program, _ = trace(flatten_step(lambda x: x.sum(0), (shape,)), mesh)
    part = cut_part(program, [op.id for op in program.ops])
    rows, whole = (("x",), ()), ((),)
    lowered = lower_part(program, part, mesh, Constraints({}, {}), [rows], [whole])
    run = lowered.compile()
    (sharding,) = run.input_shardings[0]
    numbers = jnp.arange(1.0, mesh.size + 1)[:, None]  # One for each device.
    fill = partial(jnp.broadcast_to, shape=shape.shape)
    x = jax.jit(fill, out_shardings=sharding)(numbers)
    (total,) = run(x)
    error = float(jnp.abs(total / numbers.sum() - 1).max())
    times_ms = []
    for _ in range(10):
        started = time.perf_counter()
        jax.block_until_ready(run(x))
        times_ms.append((time.perf_counter() - started) * 1e3)
    found = {"devices": mesh.size, "bytes": 4 * length, "error": error}
    return {**found, "time_ms": sorted(times_ms)[5]}


def try_kernel(name: str) -> dict[str, float]:
    """Returns a kernel's relative L2 differences from float32; empty without a GPU.

    Args:
        name: a key of `cfp.attention.kernels.KERNELS`.

    Raises:
        CfpError: the kernel does not run here.
    """
    import jax
    import jax.numpy as jnp

    from cfp.attention.call import attention

    def passes(name, q, k, v, dout):
        call = partial(attention, causal=True, implementation=name)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(dout)

    if jax.default_backend() != "gpu":
        return {}
    shared = (*SHAPE[:2], KV_HEADS, SHAPE[3])
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [*map(draw, keys, (SHAPE, shared, shared, SHAPE))]
    exact = [x.astype(jnp.float32) for x in arrays]
    found = jax.jit(partial(passes, name))(*arrays)
    with jax.default_matmul_precision("highest"):
        right = jax.jit(partial(passes, "xla"))(*exact)
    off = {}
    for what, a, b in zip(("forward", "dq", "dk", "dv"), found, right, strict=True):
        distance = jnp.linalg.norm(a.astype(jnp.float32) - b)
        off[what] = float(distance / jnp.linalg.norm(b))
    return off


PROBES = {"jax": find_jax, "devices": find_devices, "graft": run_graft}


def main(*names: str) -> None:
    """Prints what each probe finds, or its error."""
    for name in names:
        try:
            found = PROBES.get(name, partial(try_kernel, name))()
        except Exception as error:
            # Libraries raise errors that have no type in common.
            text = " ".join(str(error).split("\n\n")[0].split())
            found = {"trouble": f"{type(error).__name__}: {text[:300]}"}
        print(f"\n{MARK}{json.dumps([name, found])}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
