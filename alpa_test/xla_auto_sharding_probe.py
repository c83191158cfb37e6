"""Can XLA's own auto-sharding, which grew out of Alpa's, be reached from this jaxlib?

    python alpa_test/xla_auto_sharding_probe.py [--json FILE]

Tries every door that there has been, and prints what each said. Nothing here is a
benchmark: if a door opens, a competitor can be written behind it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np


@dataclass(frozen=True, slots=True)
class Finding:
    """One door.

    Attributes:
      door: what was tried.
      open: whether it leads to sharding that was chosen automatically.
      said: what came instead, or what was found.
    """

    door: str
    open: bool
    said: str


def _step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def _shapes() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return tuple(jax.ShapeDtypeStruct((512, 512), jnp.float32) for _ in range(2))


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((len(jax.devices()),), ("x",))


def _auto_shardings() -> Finding:
    """`jit` with AUTO in place of shardings."""
    door = "jax.jit(in_shardings=AUTO(mesh))"
    auto = None
    for module in ("jax.experimental.pjit", "jax.sharding", "jax._src.sharding_impls"):
        found = getattr(__import__(module, fromlist=["AUTO"]), "AUTO", None)
        auto = auto or found
    if auto is None:
        return Finding(door, False, "this JAX has no AUTO (removed in 0.10.1)")
    compiled = (
        jax.jit(_step, in_shardings=auto(_mesh()), out_shardings=auto(_mesh()))
        .lower(*_shapes())
        .compile()
    )
    chosen = jax.tree.leaves(compiled.input_shardings)
    sharded = any(not s.is_fully_replicated for s in chosen)
    return Finding(door, sharded, f"chose {[str(s) for s in chosen]}")


def _compile_options(shardy: bool) -> Finding:
    """The fields of XLA's build options that ask for it, on a plainly lowered step."""
    from jax._src import compiler
    from jax._src.lib import xla_client
    from jax.extend import backend

    door = f"use_auto_spmd_partitioning, use_shardy_partitioner={shardy}"
    devices = jax.devices()
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.arange(len(devices)).reshape(1, -1),
    )
    build = options.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = shardy
    build.use_auto_spmd_partitioning = True
    build.auto_spmd_partitioning_mesh_shape = [len(devices)]
    build.auto_spmd_partitioning_mesh_ids = list(range(len(devices)))
    lowered = jax.jit(_step).lower(*_shapes())
    loaded = backend.get_backend().compile_and_load(
        str(lowered.compiler_ir("stablehlo")),
        xla_client.DeviceList(tuple(devices)),
        options,
    )
    text = loaded.hlo_modules()[0].to_string()
    sharded = "all-reduce" in text or "all-gather" in text
    said = "collectives were made" if sharded else "compiled, with nothing sharded"
    return Finding(door, sharded, said)


def _symbols() -> Finding:
    """Returns True if the pass is linked into the shared library at all."""
    door = "AutoSharding in jaxlib's shared libraries"
    found = []
    for path in sorted(Path(jaxlib.__file__).parent.rglob("*.so")):
        data = path.read_bytes()
        names = [
            name
            for name in (b"AutoShardingSolver", b"AutoShardingImplementation")
            if name in data
        ]
        if names:
            found.append(f"{path.name}: {', '.join(n.decode() for n in names)}")
    return Finding(door, False, "; ".join(found) or "no trace of it")


DOORS: dict[str, Callable[[], Finding]] = {
    "AUTO": _auto_shardings,
    "build options, Shardy": lambda: _compile_options(shardy=True),
    "build options, GSPMD": lambda: _compile_options(shardy=False),
    "libraries": _symbols,
}


def _try(name: str) -> Finding:
    """Tries one door in a process of its own: some end theirs."""
    done = subprocess.run(
        [sys.executable, __file__, "--door", name],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 0:
        return Finding(**json.loads(done.stdout.splitlines()[-1]))
    said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
    return Finding(name, False, f"exit code {done.returncode}: {said[:300]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--door", choices=DOORS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.door:
        print(json.dumps(asdict(DOORS[options.door]())))
        return 0
    found = [_try(name) for name in DOORS]
    reached = any(one.open for one in found)
    print(f"jax {jax.__version__}, jaxlib {jaxlib.__version__}")
    for one in found:
        print(f"{'open' if one.open else 'closed'}: {one.door}: {one.said}")
    print("reached" if reached else "XLA's auto-sharding cannot be reached from here.")
    if options.json:
        data = {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "reached": reached,
            "doors": [asdict(one) for one in found],
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
