"""Kernels that compute attention on one device: one record and one module each.

To add a kernel, write its module and its record in `_ALL`. `cfp.attention`, the
option `--kernels`, and estimates use these records. By default plans use the kernels
of `cfp.kernels.matches.usual`. Memory estimates of `ScoreMemory.CHUNKS` are
for `cfp.kernels.chunked`. A module has

- ``whole(q, k, v, scores, mask, bias)``: the output in the dtype of q, differentiable;
- ``refusal(problem, platform)``: why it cannot compute a problem on one device, or
  None. The platform is JAX's name: "cpu", "gpu", "cuda", "rocm" or "tpu". "gpu" may be
  any vendor's; `cudnn.py` recognises NVIDIA GPUs by their compute capability;
- for rings and gathered keys ``attend`` and ``gradients``, as in `cfp.kernels.plain`:
  attention to a block of keys with its log-sum-exp, and a block's contribution to the
  gradients, from the whole row's output and log-sum-exp. Outputs may be in q's dtype;
  the log-sum-exp is float32. The two are separate, since log-sum-exps of public
  functions are not differentiable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from cfp.kernels import chunked, cudnn, plain


class ScoreMemory(StrEnum):
    """Place of a kernel's scores: the chip, memory by chunks, or all in memory."""

    TILES = "tiles"  # On the chip.
    CHUNKS = "chunks"  # In memory, a chunk of queries by a chunk of keys.
    ALL = "all"  # In memory, and kept for the backward pass.


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One implementation of attention.

    Attributes:
      name: as in `cfp.attention(..., implementation=name)`.
      scores: the place of the scores.
      matmul_share: share of a large matrix product's rate, forward and backward, at 4k
        to 64k tokens; docs/results/attention.md.
      any_positions: True if positions and segments may mask blocks. Otherwise a block
        is causal with queries and keys at the same positions, or has no mask.
    """

    name: str
    module: Any
    scores: ScoreMemory
    matmul_share: float
    any_positions: bool = False


_ALL = (
    Kernel(name="cudnn", module=cudnn, scores=ScoreMemory.TILES, matmul_share=0.6),
    Kernel(
        name="chunked",
        module=chunked,
        scores=ScoreMemory.CHUNKS,
        matmul_share=0.12,
        any_positions=True,
    ),
    Kernel(
        name="xla",
        module=plain,
        scores=ScoreMemory.ALL,
        matmul_share=0.1,  # Low, since scores are written to memory.
        any_positions=True,
    ),
)
# The preferred first, for calls without an implementation.
KERNELS: Mapping[str, Kernel] = MappingProxyType({one.name: one for one in _ALL})
