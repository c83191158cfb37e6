"""Kernels that compute attention on one device: one record and one module each.

To add a kernel, write its module and its record in `KERNELS`: `cfp.attention`,
`--attention`, and estimates follow from these. Plans use unasked those that
`cfp.attention.matching.matches.usual` names. Estimates of memory know the chunks of
`cfp.attention.chunked`, and of no other kernel with `ScoreMemory.CHUNKS`. A module has

- ``whole(q, k, v, scores, mask, bias)``: the output in the dtype of q, differentiable;
- ``refusal(problem, platform)``: why it cannot compute a problem on one device, or
  None. The platform is JAX's name: "cpu", "gpu", "cuda", "rocm" or "tpu"; "gpu" may be
  of any vendor, and `cudnn.py` tells NVIDIA's by their compute capability;
- for rings ``attend`` and ``gradients``, as in `cfp.attention.plain`: the attention of
  a block of keys with its log-sum-exp, and a block's share of the gradients from the
  whole row's output and log-sum-exp. Outputs may be in q's dtype
  (`cfp.attention.chunked` casts); the log-sum-exp is float32. The log-sum-exp of public
  functions cannot be differentiated, so these two are functions of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from cfp.attention import chunked, cudnn, plain


class ScoreMemory(StrEnum):
    """Place of the scores while a kernel computes them."""

    TILES = "tiles"  # On the chip.
    CHUNKS = "chunks"  # A chunk of queries by a chunk of keys is in memory.
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
        matmul_share=0.1,  # By what keeping its scores takes.
        any_positions=True,
    ),
)
# The preferred first, for calls without an implementation.
KERNELS: Mapping[str, Kernel] = MappingProxyType({one.name: one for one in _ALL})
