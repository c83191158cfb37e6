"""cuDNN's flash attention, through `jax.nn.dot_product_attention`.

A ring calls the two kernels of JAX's function separately. The forward kernel returns
its log-sum-exp in float32; the backward kernel takes the whole row's log-sum-exp. Their
primitives are found by name in the jaxpr of the public function, so that no private
module of JAX is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cfp.errors import CfpError
from cfp.kernels.problem import AttentionProblem, Mask, Scores, finite_bias, padded
from cfp.program.jaxprs import equations

FORWARD = "dot_product_attention_fwd_wrapper"
BACKWARD = "dot_product_attention_bwd_wrapper"
# Indices of BACKWARD's operands. Operands 0, 1, 2 of both are q, k, v.
_LSE, _OUT, _DOUT = 10, 11, 12

LEAST_CAPABILITY = 8.0
HEAD_DIM_STEP = 8
# By compute capability; jax.nn.dot_product_attention says the same.
MAX_HEAD_DIM_HOPPER, MAX_HEAD_DIM = 256, 128


def refusal(problem: AttentionProblem, platform: str) -> str | None:
    """Reason why cuDNN does not compute a problem on one device, or None."""
    if platform not in ("cuda", "gpu"):
        return f"it needs NVIDIA GPUs, and devices are of platform {platform}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"it computes in float16 and bfloat16, not in {problem.dtype}"
    capability = _least_capability()
    if capability is None:
        return "it needs NVIDIA GPUs, and a device is of another vendor"
    if capability < LEAST_CAPABILITY:
        return f"it needs compute capability 8.0 or more, and a device has {capability}"
    widest = MAX_HEAD_DIM_HOPPER if capability >= 9.0 else MAX_HEAD_DIM
    if problem.head_dim % HEAD_DIM_STEP or problem.head_dim > widest:
        return (
            f"its head dim must be a multiple of {HEAD_DIM_STEP} up to {widest} on "
            f"these devices, not {problem.head_dim}"
        )
    if problem.softcap is not None:
        return "it computes no soft cap"
    if problem.segments and not problem.hides_keys:
        return "JAX's public function does not support packed segments"
    if problem.right is not None or (problem.left is not None and not problem.causal):
        return "it supports a window only to the left, with a causal mask"
    if problem.rounds_bias:
        return (
            f"it would round the bias, which it adds in {problem.dtype}; to use it, "
            f"cast the bias to {problem.dtype}"
        )
    return None


def _least_capability() -> float | None:
    """Least compute capability of local devices; None if a GPU is not NVIDIA's.

    Devices without the attribute, such as CPUs, count as 9.0.
    """
    found = [getattr(d, "compute_capability", "9.0") for d in jax.local_devices()]
    try:
        return min(map(float, found))
    except ValueError:
        return None


def whole(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask, bias: Array | None
) -> Array:
    """Computes what `refusal` accepts by JAX's public function, differentiably.

    JAX refuses gradients for odd numbers of tokens, so zeros fill these up.
    """
    queries, keys = q.shape[1], k.shape[1]
    is_shown = keys % 2 and not (mask.causal and queries <= keys)
    if is_shown or (mask.left is not None and queries > keys):
        # It hides the added key. Windows over more queries than keys need lengths, too.
        mask = replace(mask, keys=mask.keys or keys)
    wide, long = queries + queries % 2, keys + keys % 2
    q, k, v = padded(q, {1: wide}), padded(k, {1: long}), padded(v, {1: long})
    if bias is not None:
        bias = padded(finite_bias(bias, q.dtype), {2: wide, 3: long})
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        scale=scores.scale,
        is_causal=mask.causal,
        key_value_seq_lengths=mask.lengths(q.shape[0]),
        local_window_size=None if mask.left is None else (mask.left, 0),
        implementation="cudnn",
    )[:, :queries]


def attend(
    q: Array, k: Array, v: Array, scores: Scores, mask: Mask
) -> tuple[Array, Array]:
    """Like `plain.attend`: output in q's dtype, mask causal or none, no derivative."""
    call = _find(FORWARD, q, k, v, scores, mask)
    out, lse = _bind(call, {0: q, 1: k, 2: v})[:2]
    return out, lse.swapaxes(1, 2)


def gradients(
    rows: tuple[Array, ...], k: Array, v: Array, scores: Scores, mask: Mask
) -> tuple[Array, Array, Array]:
    """Like `plain.gradients`, in the operands' dtypes; with a causal mask or none."""
    q, out, lse, dout = rows
    call = _find(BACKWARD, q, k, v, scores, mask)
    given = {0: q, 1: k, 2: v, _LSE: lse.swapaxes(1, 2)}
    given |= {_OUT: out.astype(q.dtype), _DOUT: dout.astype(q.dtype)}
    dq, dk, dv = _bind(call, given)[:3]
    return dq, dk, dv


def _find(name: str, q: Array, k: Array, v: Array, scores: Scores, mask: Mask) -> Any:
    """A primitive's equation in the jaxpr of JAX's function; CfpError if missing."""
    assert mask.query_segments is None and mask.query_positions is None

    def both(q: Array, k: Array, v: Array) -> Any:
        out, pull = jax.vjp(lambda q, k, v: whole(q, k, v, scores, mask, None), q, k, v)
        return pull(out)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    for equation in equations(jax.make_jaxpr(both)(*shapes).jaxpr):
        if equation.primitive.name == name:
            return equation
    raise CfpError(
        f"Sharded keys cannot use cuDNN with jax {jax.__version__}: the primitive "
        f'{name} of jax 0.10.2 to 0.12 is missing. Use "chunked" instead.'
    )


def _bind(equation: Any, given: dict[int, Array]) -> Any:
    """Runs an equation's primitive on {index: operand}; others must have size 0."""
    unread = {i: v.aval for i, v in enumerate(equation.invars) if i not in given}
    assert not any(one.size for one in unread.values()), "unused operands are empty"
    every = given | {i: jnp.zeros(one.shape, one.dtype) for i, one in unread.items()}
    return equation.primitive.bind(
        *(every[i] for i in sorted(every)), **equation.params
    )
