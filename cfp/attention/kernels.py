"""Kernels that compute attention on one device: one record and one module each.

To add a kernel, write its module and its record in `KERNELS`: `cfp.attention`,
`--attention`, estimates, and `cfp doctor` on NVIDIA GPUs, follow from these. Plans use
by default those that `cfp.settings` names (`replacing`, `replacing_for_memory`).
Estimates of memory know the chunks of `cfp.attention.chunked`, and of no other kernel
with `ScoreMemory.CHUNKS` (`working_bytes` in `cfp.cost.costs`). A module has

- ``whole(q, k, v, scores, mask, bias)``: the output in the dtype of q, differentiable;
- ``refusal(problem, platform)``: why it cannot compute a problem on one device, or
  None. The platform is JAX's name: "cpu", "gpu", "cuda", "rocm" or "tpu"; "gpu" may be
  of any vendor, and `cudnn.py` tells NVIDIA's by their compute capability;
- for rings ``attend`` and ``gradients``, as in `cfp.attention.plain`: the attention of
  a block of keys with its log-sum-exp, and a block's share of the gradients from the
  whole row's output and log-sum-exp. Outputs may be in q's dtype
  (`cfp.attention.chunked` casts); the log-sum-exp is float32. The log-sum-exp of public
  functions cannot be differentiated, so these two are functions of their own.

Nothing here loads JAX, which `cfp doctor` does without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array

    from cfp.attention.problem import AttentionProblem, Mask, Scores

    Attend = Callable[[Array, Array, Array, Scores, Mask], tuple[Array, Array]]
    Gradients = Callable[..., tuple[Array, Array, Array]]
    Whole = Callable[[Array, Array, Array, Scores, Mask, Array | None], Array]
    Refusal = Callable[[AttentionProblem, str], str | None]


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
      is_preferred: True if calls without an implementation try it, in the order of
        `KERNELS`; on CPUs such calls take "xla".
      any_positions: True if positions and segments may mask blocks. Otherwise a block
        is causal with queries and keys at the same positions, or has no mask.
      remedy: advice if it does not load; "" for kernels that always load, which `cfp
        doctor` leaves out.
    """

    name: str
    module: str
    scores: ScoreMemory
    matmul_share: float
    is_preferred: bool = False
    any_positions: bool = False
    remedy: str = ""

    @property
    def whole(self) -> Whole:
        """Computes a whole attention."""
        return self._function("whole")

    @property
    def refusal(self) -> Refusal:
        """Gives the reason why a problem cannot be computed, or None."""
        return self._function("refusal")

    @property
    def attend(self) -> Attend:
        """Computes the attention of a block."""
        return self._function("attend")

    @property
    def gradients(self) -> Gradients:
        """Computes a block's share of the gradients."""
        return self._function("gradients")

    def _function(self, name: str) -> Any:
        return getattr(import_module(self.module), name)


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        kernel.name: kernel
        for kernel in (
            Kernel(
                name="cudnn",
                module="cfp.attention.cudnn",
                scores=ScoreMemory.TILES,
                matmul_share=0.6,
                is_preferred=True,
                remedy="pip install --upgrade nvidia-cudnn-cu13 (or -cu12), in the "
                "versions that the plugin asks for; cfp plans without it, and "
                "attention is XLA's then",
            ),
            Kernel(
                name="chunked",
                module="cfp.attention.chunked",
                scores=ScoreMemory.CHUNKS,
                matmul_share=0.12,
                is_preferred=True,
                any_positions=True,
            ),
            Kernel(
                name="xla",
                module="cfp.attention.plain",
                scores=ScoreMemory.ALL,
                matmul_share=0.1,  # By what keeping its scores takes.
                is_preferred=True,
                any_positions=True,
            ),
        )
    }
)
