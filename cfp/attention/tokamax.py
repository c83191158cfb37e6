"""Attention by Tokamax, a library of kernels for JAX, where it is installed.

It chooses among its own kernels: Mosaic for Hopper and Blackwell, Triton, and XLA.
"""

from __future__ import annotations

from importlib import import_module

from jax import Array

from cfp.attention.problem import AttentionProblem, Mask, Scores


def refusal(problem: AttentionProblem, platform: str) -> str | None:
    """Returns the reason why Tokamax does not compute this, or None."""
    try:
        import_module("tokamax")
    except ImportError as error:
        return f"it cannot be imported: {error} (pip install tokamax; Python 3.12)"
    if problem.segments:
        return "packed segments would be a mask for it, as large as the scores"
    if problem.bias and problem.softcap is not None:
        return "its soft cap is applied after the bias"
    if problem.dtype == "float32" and platform != "cpu":
        return "its kernels compute gradients in float16 and bfloat16 only"
    return None


def whole(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask, bias: Array | None
) -> Array:
    """Attention by Tokamax, differentiable."""
    keys, queries = k.shape[1], q.shape[1]
    window = None
    if mask.left is not None or mask.right is not None:
        # A bound that nothing reaches stands for none.
        window = (
            queries if mask.left is None else mask.left,
            keys if mask.right is None else mask.right,
        )
    return import_module("tokamax").dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        scale=scores.scale,
        is_causal=mask.causal,
        key_value_seq_lengths=mask.lengths(q.shape[0]),
        local_window_size=window,
        logits_soft_cap=scores.softcap,
    )
