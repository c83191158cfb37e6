"""Small programs, each run by the doctor in a process of its own.

``python -m cfp.cluster.probes NAME`` prints one line of JSON. Packages are
imported by the probes that need them: an import may be what fails.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from cfp.cluster.machine import MARK, last_line

if TYPE_CHECKING:
    import jax


_REPEATS = 10
_MEGABYTES = {"cpu": 4}
_DEFAULT_MEGABYTES = 256
# Small, and yet whole blocks of all kernels.
SHAPE, KV_HEADS = (1, 256, 4, 64), 2


def find_jax() -> dict[str, str]:
    """Returns JAX's version, and the file that it comes from."""
    import jax

    return {"version": jax.__version__, "file": jax.__file__}


def find_devices() -> dict[str, Any]:
    """Returns the platform, kind and number of the devices that JAX finds."""
    import jax

    found = jax.local_devices()
    return {
        "platform": found[0].platform,
        "kind": found[0].device_kind,
        "count": len(found),
    }


def all_reduce() -> dict[str, Any]:
    """All-reduces over all devices: if the sum is right, and the median time."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.local_devices()
    count = len(devices)
    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")
    megabytes = _MEGABYTES.get(devices[0].platform, _DEFAULT_MEGABYTES)
    length = megabytes * 2**20 // 4

    def fill() -> jax.Array:
        # A row for each device, each with another number.
        numbers = jnp.arange(1.0, count + 1, dtype=jnp.float32)
        return jnp.broadcast_to(numbers[:, None], (count, length))

    x = jax.jit(fill, out_shardings=NamedSharding(mesh, spec))()
    total = partial(jax.lax.psum, axis_name="x")
    run = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec))
    wanted = count * (count + 1) / 2  # Each device's sum stands in its own row.
    right = all(bool((one.data == wanted).all()) for one in run(x).addressable_shards)
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


def find_passes() -> dict[str, Any]:
    """Returns the pipelines that are missing, the number of rules, and known faults."""
    import jax
    import jax.numpy as jnp

    from cfp.program import shardy
    from cfp.program.corrections import faults

    missing = shardy.missing_pipelines()
    rules = 0
    if not missing:
        shape = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        lowered = jax.jit(lambda x: jnp.tanh(x @ x.T)).lower(shape)
        module = lowered.compiler_ir("stablehlo")
        assert module is not None, "JAX lowers to StableHLO"
        shardy.normalise(module)
        shardy.add_rules(module)
        main = shardy.main_function(module)
        rules = sum(shardy.RULE in op.attributes for op in shardy.walk(main))
    return {
        "needed": len(shardy.PIPELINES),
        "missing": sorted(missing),
        "reasons": sorted(missing.values()),
        "rules": rules,
        "faults": [fault.name for fault in faults()],
    }


def run_graft() -> dict[str, Any]:
    """Compiles a part of a program as a program of its own, and runs it.

    Returns:
        The difference from NumPy's result, the compile time and the number of devices.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from cfp.program.constrain import Constraints
    from cfp.program.graft import lower_part
    from cfp.program.signature import cut_part
    from cfp.program.step import flatten_step
    from cfp.program.trace import trace

    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.tanh(x @ up) @ down

    mesh = Mesh(np.array(jax.local_devices()), ("x",))
    draw = np.random.default_rng(0).standard_normal
    shapes = ((8 * mesh.size, 64), (64, 128), (128, 64))
    x, up, down = (draw(shape).astype(np.float32) / 8 for shape in shapes)
    with jax.default_matmul_precision("highest"):
        program, _ = trace(flatten_step(step, (x, up, down)), mesh)
    last = max(op.id for op in program.ops if op.kind == "tanh")
    part = cut_part(program, [op.id for op in program.ops if op.id <= last])
    rows = (("x",), ())
    values = dict(zip(program.args, (x, up, down), strict=True))
    specs = [rows if value == program.args[0] else ((), ()) for value in part.inputs]
    outs = [rows] * len(part.outputs)
    lowered = lower_part(program, part, mesh, Constraints({}, {}), specs, outs)
    started = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - started
    inputs = [values[value] for value in part.inputs]
    (result,) = compiled(*jax.device_put(inputs, list(compiled.input_shardings[0])))
    difference = float(np.abs(np.asarray(result) - np.tanh(x @ up)).max())
    return {"difference": difference, "compile_s": compile_s, "devices": mesh.size}


def try_kernel(name: str) -> dict[str, Any]:
    """Compares a kernel with a float32 oracle.

    Args:
        name: a key of `cfp.attention.kernels.KERNELS`.

    Returns:
        Relative L2 differences of the output, dq, dk and dv, by name; or "refusal",
        the reason for which the kernel does not run here.
    """
    import jax
    import jax.numpy as jnp

    from cfp.attention.call import attention
    from cfp.attention.plain import float32_oracle
    from cfp.attention.problem import Mask, Scores
    from cfp.errors import AttentionError

    keys = jax.random.split(jax.random.key(0), 4)
    shared = (*SHAPE[:2], KV_HEADS, SHAPE[3])
    shapes = (SHAPE, shared, shared, SHAPE)
    arrays = [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    mask = Mask(causal=True, left=None, right=None, keys=None)
    scores = Scores(scale=SHAPE[3] ** -0.5)

    def passes(function, q, k, v, dout):
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(dout.astype(out.dtype))

    kernel = partial(attention, causal=True, implementation=name)
    oracle = partial(float32_oracle, scores=scores, mask=mask)
    try:
        found = jax.jit(partial(passes, kernel))(*arrays)
    except AttentionError as error:
        return {"refusal": str(error).partition("got: ")[2].partition("\n")[0]}
    right = jax.jit(partial(passes, oracle))(*(x.astype(jnp.float32) for x in arrays))
    off = [
        float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for a, b in zip(found, right, strict=True)
    ]
    return dict(zip(("forward", "dq", "dk", "dv"), off, strict=True))


PROBES: Mapping[str, Callable[..., Mapping[str, Any]]] = {
    "imports": find_jax,
    "devices": find_devices,
    "allreduce": all_reduce,
    "shardy": find_passes,
    "graft": run_graft,
    "kernel": try_kernel,
}


def main(name: str, *arguments: str) -> None:
    """Prints the findings of a probe, or its error."""
    try:
        found = dict(PROBES[name](*arguments))
    except Exception as error:
        # Libraries raise errors that have no type in common.
        text = last_line(str(error).split("\n\n")[0].split("\n")[0])
        found = {"trouble": f"{type(error).__name__}: {text}".rstrip(": ")}
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
