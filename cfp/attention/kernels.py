"""What computes attention on one device, and what each of these cannot do.

An implementation computes a whole attention (`whole`, differentiable), and, where it
can, the parts that a ring is made of: the attention of a block with its log-sum-exp,
and a block's share of the gradients from the whole row's output and log-sum-exp. The
log-sum-exp that public functions return cannot be differentiated, which is why these
two are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from cfp.attention import chunked, cudnn, pallas, plain, tokamax
from cfp.attention.mask import Mask, Scores
from cfp.attention.problem import Problem

Attend = Callable[
    [jax.Array, jax.Array, jax.Array, Scores, Mask], tuple[jax.Array, jax.Array]
]
Gradients = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
Whole = Callable[
    [jax.Array, jax.Array, jax.Array, Scores, Mask, jax.Array | None], jax.Array
]
Refusal = Callable[[Problem, str], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One implementation.

    Attributes:
      name: as `cfp.attention(..., implementation=name)` has it.
      whole: (q, k, v, scores, mask, bias) -> output in the dtype of q.
      refusal: (problem on one device, platform) -> why it cannot be computed, or None.
      attend: the attention of a block, see `plain.attend`; None if there is none.
      gradients: a block's share of the gradients, see `plain.gradients`.
      any_positions: whether blocks may be masked by positions and segments; otherwise
        they are causal with queries and keys at the same positions, or see all.
    """

    name: str
    whole: Whole
    refusal: Refusal
    attend: Attend | None = None
    gradients: Gradients | None = None
    any_positions: bool = False


def _xla(q, k, v, scores, mask, bias):
    return plain.attend(q, k, v, scores, mask, bias)[0].astype(q.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _flash(q, k, v, scores, mask):
    return chunked.attend(q, k, v, scores, mask)[0].astype(q.dtype)


def _flash_forward(q, k, v, scores, mask):
    out, lse = chunked.attend(q, k, v, scores, mask)
    out = out.astype(q.dtype)
    return out, (q, k, v, out, lse, mask)


def _flash_backward(scores, kept, dout):
    q, k, v, out, lse, mask = kept
    grads = chunked.gradients(q, k, v, out, lse, dout, scores, mask)
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv, None


_flash.defvjp(_flash_forward, _flash_backward)


def _chunked(q, k, v, scores, mask, bias) -> Any:
    assert bias is None, "refused before"
    return _flash(q, k, v, scores, mask)


def _refuse_nothing(problem: Problem, platform: str) -> str | None:
    return None


def _refuse_bias(problem: Problem, platform: str) -> str | None:
    if problem.dense_mask:
        return "it takes no mask of queries by keys, which is as large as the scores"
    if problem.bias:
        return "it has no bias, whose gradient is as large as the scores"
    return None


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        kernel.name: kernel
        for kernel in (
            Kernel(
                name="cudnn",
                whole=cudnn.whole,
                refusal=cudnn.refusal,
                attend=cudnn.attend,
                gradients=cudnn.gradients,
            ),
            Kernel(name="tokamax", whole=tokamax.whole, refusal=tokamax.refusal),
            Kernel(name="pallas", whole=pallas.whole, refusal=pallas.refusal),
            Kernel(
                name="chunked",
                whole=_chunked,
                refusal=_refuse_bias,
                attend=chunked.attend,
                gradients=chunked.gradients,
                any_positions=True,
            ),
            Kernel(
                name="xla",
                whole=_xla,
                refusal=_refuse_nothing,
                attend=plain.attend,
                gradients=plain.gradients,
                any_positions=True,
            ),
        )
    }
)


def float32_oracle(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scores: Scores,
    mask: Mask,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Attention in float32 throughout, with all scores in memory."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision("float32"):
        return plain.attend(q, k, v, scores, mask, bias)[0]
