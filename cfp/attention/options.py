"""All ways to compute an attention, and why some are ruled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from jax.sharding import Mesh

from cfp.attention.call import platform_of, refusal
from cfp.attention.kernels import KERNELS
from cfp.attention.problem import Window, problem_of
from cfp.attention.strategy import ROLES, AttentionStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way.

    Attributes:
      strategy: what axes of the mesh do, by name; none is left out.
      implementation: what computes on each device.
      reason: why it is ruled out, or None if it is possible.
    """

    strategy: tuple[tuple[str, str], ...]
    implementation: str
    reason: str | None

    @property
    def possible(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        said = ", ".join(f"{axis}: {role}" for axis, role in self.strategy) or "none"
        return f"{said} / {self.implementation}: {self.reason or 'possible'}"


def attention_options(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Window = None,
    segment_ids: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    mesh: Mesh | None = None,
    platform: str | None = None,
    implementations: Sequence[str] = tuple(KERNELS),
) -> tuple[Option, ...]:
    """Lists all strategies with all implementations; runs nothing.

    Args:
      q: like k, v, causal, window, segment_ids, bias, softcap, scale and mesh as of
        `cfp.attention`; of arrays only shapes and dtypes matter.
      k: see q.
      v: see q.
      causal: see q.
      window: see q.
      segment_ids: see q.
      bias: see q.
      softcap: see q.
      scale: see q.
      dropout: share of the weights that are dropped.
      mesh: every axis takes every role, or none.
      platform: of the devices; by default the mesh's, or JAX's.
      implementations: to be looked at.

    Returns:
      Those that are possible and those that are ruled out, with the reason. Whether a
      kernel works on this machine, `cfp doctor` finds out.

    Raises:
      AttentionError: arguments do not fit together.
    """
    problem = problem_of(
        q,
        k,
        v,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        bias=bias,
        softcap=softcap,
        scale=scale,
        dropout=dropout,
    )
    sizes = dict(mesh.shape) if mesh is not None else {}
    platform = platform or platform_of(mesh)
    found = []
    for roles in product((None, *ROLES), repeat=len(sizes)):
        given = {a: role for a, role in zip(sizes, roles, strict=True) if role}
        strategy = AttentionStrategy.of(given, sizes)
        for name in implementations:
            reason = refusal(problem, strategy, KERNELS[name], platform)
            found.append(
                Option(strategy=strategy.roles, implementation=name, reason=reason)
            )
    return tuple(found)
