"""JAX's cuDNN attention where there is no cuDNN: traced, and on CPUs run by XLA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.interpreters import mlir

from cfp.kernels import plain
from cfp.kernels.problem import NO_MASK, Mask, Scores


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


def _mask(mask_type: Any, q: jax.Array, k: jax.Array, lengths: jax.Array) -> Mask:
    """The mask of queries and keys [batch, tokens, heads, head_dim]."""
    mask = replace(NO_MASK, causal="CAUSAL" in mask_type.name)
    if "PADDING" not in mask_type.name:
        return mask
    is_padding = jnp.arange(k.shape[1]) >= lengths[:, None]
    return replace(
        mask,
        query_segments=jnp.zeros(q.shape[:2], jnp.int32),
        key_segments=is_padding.astype(jnp.int32),
    )


def _forward(q, k, v, *rest, scale, mask_type, layout, is_training, **more):
    q4, k4, v4 = _turned(layout, q, k, v)
    mask = _mask(mask_type, q4, k4, rest[2])
    out, lse = plain.attend(q4, k4, v4, Scores(scale=float(scale)), mask)
    [out] = _turned(layout, out.astype(q.dtype))
    return [out, lse.swapaxes(1, 2)] if is_training else [out]


def _backward(q, k, v, *rest, scale, mask_type, layout, **more):
    lse, out, dout = rest[-3:]
    assert lse.dtype == jnp.float32, "the log-sum-exp was rounded"
    q4, k4, v4, out, dout = _turned(layout, q, k, v, out, dout)
    rows = q4, out, lse.swapaxes(1, 2), dout
    scores = Scores(scale=float(scale))
    mask = _mask(mask_type, q4, k4, rest[2])
    grads = plain.gradients(rows, k4, v4, scores, mask)
    grads = _turned(layout, *grads)
    return [g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)]


def attention(q, k, v, **how):
    """The attention, in bfloat16, of float32 arrays."""
    narrow = (x.astype(jnp.bfloat16) for x in (q, k, v))
    made = jax.nn.dot_product_attention(*narrow, implementation="cudnn", **how)
    return made.astype(jnp.float32)
