"""JAX's cuDNN attention where there is no cuDNN: traced, and on CPUs run by XLA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.interpreters import mlir

from cfp.kernels import plain
from cfp.kernels.problem import NO_MASK, Scores


@contextmanager
def cudnn_on_cpus(monkeypatch: Any, parts: bool = False) -> Iterator[None]:
    """Lets the attention be traced without cuDNN, and lowered for CPUs.

    Args:
        parts: whether its ops are bound by themselves, as a ring binds them.
    """
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(
        fused, "is_cuda_compute_capability_equal", lambda capability: False
    )
    kind = "_p_wrapper" if parts else "_p"
    ops = {
        getattr(fused, f"_dot_product_attention_{name}{kind}"): function
        for name, function in (("fwd", _forward), ("bwd", _backward))
    }
    for op, function in ops.items():
        lowering = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(op, lowering, platform="cpu")
    try:
        yield
    finally:
        for op in ops:
            del mlir._platform_specific_lowerings["cpu"][op]


def _turned(layout: int, *arrays: jax.Array) -> list[jax.Array]:
    """[batch, tokens, heads, head_dim], of arrays in a layout: 1 has heads before."""
    return [x.swapaxes(1, 2) if layout else x for x in arrays]


def _mask(mask_type: Any) -> Any:
    import dataclasses

    return dataclasses.replace(NO_MASK, causal=mask_type.name == "CAUSAL")


def _forward(q, k, v, *_, scale, mask_type, layout, is_training, **more):
    out, lse = plain.attend(
        *_turned(layout, q, k, v), Scores(scale=float(scale)), _mask(mask_type)
    )
    [out] = _turned(layout, out.astype(q.dtype))
    return [out, lse.swapaxes(1, 2)] if is_training else [out]


def _backward(q, k, v, *rest, scale, mask_type, layout, **more):
    lse, out, dout = rest[-3:]
    assert lse.dtype == jnp.float32, "the log-sum-exp was rounded"
    q4, k4, v4, out, dout = _turned(layout, q, k, v, out, dout)
    rows = q4, out, lse.swapaxes(1, 2), dout
    scores = Scores(scale=float(scale))
    grads = plain.gradients(rows, k4, v4, scores, _mask(mask_type))
    grads = _turned(layout, *grads)
    return [g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)]


def attention(q, k, v, **how):
    """The attention, in bfloat16, of float32 arrays."""
    narrow = (x.astype(jnp.bfloat16) for x in (q, k, v))
    made = jax.nn.dot_product_attention(*narrow, implementation="cudnn", **how)
    return made.astype(jnp.float32)
