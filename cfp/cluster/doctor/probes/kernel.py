"""One attention kernel, compiled and run forward and backward."""

from __future__ import annotations

import sys
from typing import Any

from cfp.cluster.doctor.probes.answer import answer

# Small, and yet whole blocks of all kernels.
SHAPE, KV_HEADS = (1, 256, 4, 64), 2


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
    from cfp.attention.mask import Mask, Scores
    from cfp.attention.plain import float32_oracle
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

    def run(q, k, v, dout):
        out, pull = jax.vjp(
            lambda q, k, v: attention(q, k, v, causal=True, implementation=name),
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
        return {"refusal": str(error).partition("got: ")[2].partition("\n")[0]}
    wide = [x.astype(jnp.float32) for x in arrays]
    return {
        name: float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for name, a, b in zip(
            ("forward", "dq", "dk", "dv"), found, jax.jit(right)(*wide), strict=True
        )
    }


if __name__ == "__main__":
    answer(lambda: try_kernel(sys.argv[1]))
