"""Runs the program of a fault of XLA in plain JAX.

``python -m cfp_test.proving.shown N``, with the fault's place in the table, says if the
numbers are right; where XLA ends the process, it says nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp_test.proving.faults import SHOWN, Shown


def outcome(name: str) -> str:
    """Runs a fault's program; "right", or one of what a fault may show."""
    if SHOWN[name].shows != "abort":
        return _run(SHOWN[name])
    command = [sys.executable, "-m", __name__, str([*SHOWN].index(name))]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode > 0:
        raise RuntimeError(ended.stderr[-3000:])
    return "abort" if ended.returncode else ended.stdout.strip()


def _run(fault: Shown) -> str:
    axes = ("x", "y", "z")[: len(fault.mesh)]
    count = int(np.prod(fault.mesh))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(fault.mesh), axes)
    sharded = False

    def place(value: jax.Array, *spec: str | None) -> jax.Array:
        if not sharded:
            return value
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return lax.with_sharding_constraint(value, sharding)

    named = {"jax": jax, "jnp": jnp, "lax": lax, "P": PartitionSpec, "place": place}
    exec(fault.program, named)
    rng = np.random.default_rng(0)
    args = [rng.normal(size=shape).astype(np.float32) for shape in named["shapes"]]
    expected = np.asarray(jax.jit(lambda *args: named["f"](*args))(*args))
    sharded = True
    places = tuple(NamedSharding(mesh, spec) for spec in named["specs"])
    try:
        step = jax.jit(lambda *args: named["f"](*args), in_shardings=places)
        got = jax.block_until_ready(step(*args))
    except jax.errors.JaxRuntimeError:
        return "error"
    close = np.allclose(np.asarray(got), expected, rtol=1e-2, atol=1e-2)
    return "right" if close else "wrong"


if __name__ == "__main__":
    index = argparse.ArgumentParser(description="Runs the program of a fault of XLA.")
    index.add_argument("fault", type=int, choices=range(len(SHOWN)))
    print(_run([*SHOWN.values()][index.parse_args().fault]))
