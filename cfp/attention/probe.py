"""Whether kernels of attention work on this machine: each compiled and run.

    python -m cfp.attention.probe [KERNEL...]

Each runs forward and backward in a process of its own, which may crash, and is compared
with a float32 oracle. Prints a line of JSON for each; exit code 0 if any works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from cfp.attention.call import attention
from cfp.attention.kernels import KERNELS, float32_oracle
from cfp.attention.mask import Mask, Scores
from cfp.errors import AttentionError

# Small, and yet whole blocks of all kernels.
SHAPE, KV_HEADS = (1, 256, 4, 64), 2
# Relative L2 distance in bfloat16, as of the tests.
ALLOWED = 5e-3
SECONDS = 300.0  # A first compile may tune kernels for minutes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """How a kernel did.

    Attributes:
      kernel: its name.
      reason: why it does not work here, or None.
      relative_l2: distance to the oracle of the output and of dq, dk, dv; empty if it
        did not run.
    """

    kernel: str
    reason: str | None
    relative_l2: tuple[float, ...] = ()


def probe(kernel: str, seconds: float = SECONDS) -> Probed:
    """Tries a kernel in a process of its own.

    Args:
      kernel: one of `KERNELS`.
      seconds: after which it counts as hung.
    """
    # This process may hold the devices' memory already.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "cfp.attention.probe", "--here", kernel]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probed(kernel=kernel, reason=f"it did not end within {seconds:.0f} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        return Probed(
            kernel=kernel, reason=f"its process ended ({done.returncode}): {last}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return Probed(**{**found, "relative_l2": tuple(found["relative_l2"])})


def probe_here(kernel: str) -> Probed:
    """Tries a kernel in this process."""
    keys = jax.random.split(jax.random.key(0), 4)
    shared = (*SHAPE[:2], KV_HEADS, SHAPE[3])
    shapes = (SHAPE, shared, shared, SHAPE)
    arrays = [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    mask = Mask(causal=True, left=None, right=None, keys=None)
    scores = Scores(scale=SHAPE[3] ** -0.5)

    def run(q, k, v, dout):
        out, pull = jax.vjp(
            lambda q, k, v: attention(q, k, v, causal=True, implementation=kernel),
            q,
            k,
            v,
        )
        return out, *pull(dout)

    def right(q, k, v, dout):
        out, pull = jax.vjp(
            lambda q, k, v: float32_oracle(q, k, v, scores, mask), q, k, v
        )
        return out, *pull(dout.astype(out.dtype))

    try:
        found = jax.jit(run)(*arrays)
    except AttentionError as error:
        said = str(error).partition("got: ")[2].partition("\n")[0]
        return Probed(kernel=kernel, reason=said)
    wide = [x.astype(jnp.float32) for x in arrays]
    off = tuple(
        float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for a, b in zip(found, jax.jit(right)(*wide), strict=True)
    )
    wrong = not max(off) <= ALLOWED
    reason = f"it is wrong by {max(off):.1e}" if wrong else None
    return Probed(kernel=kernel, reason=reason, relative_l2=off)


def main(arguments: list[str]) -> int:
    here = "--here" in arguments
    names = [name for name in arguments if name != "--here"] or list(KERNELS)
    if unknown := [name for name in names if name not in KERNELS]:
        print(f"no kernel {unknown[0]!r}; known: {', '.join(KERNELS)}", file=sys.stderr)
        return 2
    found = [(probe_here if here else probe)(name) for name in names]
    for one in found:
        print(json.dumps(asdict(one)))
    return 0 if here or any(one.reason is None for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
