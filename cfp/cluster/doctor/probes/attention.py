"""Attention, forward and backward, by one implementation, beside plain XLA.

Named after the implementation: ``cudnn``, through `jax.nn`, or ``tokamax``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cfp.cluster.doctor.probes.answer import answer

_BATCH, _LENGTH, _HEADS, _HEAD_DIM = 2, 1024, 8, 64


def find() -> dict[str, Any]:
    """Relative differences of the result and of the three gradients."""
    import jax
    import jax.numpy as jnp

    attend = _implementation(sys.argv[1])
    shape = (_BATCH, _LENGTH, _HEADS, _HEAD_DIM)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weight = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)

    def reference(q: Any, k: Any, v: Any) -> jax.Array:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")

    def both(run: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        def loss(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
            out = run(q, k, v).astype(jnp.float32)
            return (out * weight.astype(jnp.float32)).sum(), out

        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
        grads, out = program(q, k, v)
        return (out, *grads)

    with jax.default_matmul_precision("highest"):
        right = both(reference)
    found = both(attend)
    names = ("forward", "dq", "dk", "dv")
    return {
        name: float(
            jnp.linalg.norm((a - b).astype(jnp.float32))
            / jnp.linalg.norm(b.astype(jnp.float32))
        )
        for name, a, b in zip(names, found, right, strict=True)
    }


def _implementation(name: str) -> Callable[..., Any]:
    if name == "tokamax":
        return import_module("tokamax").dot_product_attention

    import jax

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    return attend


if __name__ == "__main__":
    answer(find)
