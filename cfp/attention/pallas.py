"""The flash attention that comes with JAX, written in Pallas for Triton."""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax import Array

from cfp.attention.problem import AttentionProblem, Mask, Scores

KERNELS = "jax.experimental.pallas.ops.gpu"
BLOCK = 128  # Tokens; the kernels' own, forward.
MIN_HEAD_DIM = 16  # Of Triton's products.
MAX_HEAD_DIM = 128  # Of wider ones a block does not fit into registers.


def load(name: str) -> ModuleType:
    """A module of those kernels, such as ``jax.experimental.pallas.ops.gpu.attention``.

    Raises:
        ImportError: this JAX has none, or what it needs is not there.
    """
    with warnings.catch_warnings():
        # JAX 0.12 advises to take another library in its place: nothing that a user
        # of cfp could follow, and an error where warnings are errors.
        warnings.filterwarnings(
            "ignore", f"{re.escape(KERNELS)}.* is deprecated", DeprecationWarning
        )
        return import_module(name)


@cache
def _module() -> Any:
    return load(f"{KERNELS}.attention")


def refusal(problem: AttentionProblem, platform: str) -> str | None:
    """Returns the reason why this kernel does not compute a problem, or None."""
    if platform not in ("cuda", "gpu"):
        return f"it runs on GPUs, and devices are of platform {platform}"
    try:
        _module()
    except ImportError as error:
        return f"it cannot be imported: {error}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"it computes in float16 and bfloat16, not in {problem.dtype}"
    if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
        return (
            f"its head dim is from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, "
            f"not {problem.head_dim}"
        )
    if problem.queries != problem.keys:
        return "it has as many queries as keys"
    if problem.queries % BLOCK:
        return f"its lengths are multiples of {BLOCK}, not {problem.queries}"
    for unable, name in (
        (problem.window, "window"),
        (problem.bias, problem.bias_text),
        (problem.softcap is not None, "soft cap"),
        (problem.padded_keys, "mask of padded keys"),
    ):
        if unable:
            return f"it has no {name}"
    if problem.segments and not problem.same_segments:
        return "its queries and keys have the same segment ids"
    return None


def whole(
    q: Array,
    k: Array,
    v: Array,
    scores: Scores,
    mask: Mask,
    bias: Array | None,
    interpret: bool = False,
) -> Array:
    """Attention by Triton kernels, differentiable; interpreted for tests on CPUs."""
    assert bias is None, "refused before"
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    return _module().mha(
        q,
        k,
        v,
        mask.query_segments,
        sm_scale=scores.scale,
        causal=mask.causal,
        interpret=interpret,
    )
