"""Costs of collectives by a formula: alpha + beta * bytes, as Alpa has it.

Sizes are those of a whole group's tensor, as in
`cfp.profiling.collectives.Rates.collective_ms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np

from cfp.profiling.collectives import Rates

_PRICED_AS = {"collective-permute": "all-to-all"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Links that connect the devices along an axis.

    Attributes:
      alpha_ms: what any collective takes, however small.
      beta_ms_per_byte: what one byte takes that a device sends.
    """

    alpha_ms: float
    beta_ms_per_byte: float


# By data sheet: bandwidth of one device in one direction. The latencies are about what
# NCCL shows for small messages.
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        # Fourth-generation NVLink: 18 links of 25 GB/s.
        "nvlink": Link(alpha_ms=0.02, beta_ms_per_byte=1 / 450e6),
        # 16 lanes of PCIe 5, through the host's memory: written, then read.
        "pcie": Link(alpha_ms=0.05, beta_ms_per_byte=1 / 32e6),
        # 16 lanes of PCIe 4, as the A100 cards of CFP's artifact have.
        "pcie4": Link(alpha_ms=0.05, beta_ms_per_byte=1 / 16e6),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """Prices as `Rates` has them, by formula. Memory traffic costs nothing.

    Attributes:
      mesh: names and sizes of the axes, in order.
      links: what connects devices along each axis.
      flops_per_ms: of matrix products on one device; None to ignore compute, as Alpa
        does.
      launch_ms: none, since it prices no launches.
    """

    mesh: tuple[tuple[str, int], ...]
    links: Mapping[str, Link]
    flops_per_ms: float | None = None
    launch_ms: float = 0.0

    @classmethod
    def uniform(
        cls,
        mesh: tuple[tuple[str, int], ...],
        link: Link,
        flops_per_ms: float | None = None,
    ) -> AlphaBeta:
        """The same link along every axis."""
        links = {name: link for name, _ in mesh}
        return cls(mesh=mesh, links=links, flops_per_ms=flops_per_ms)

    def collective_ms(self, kind: str, axes: tuple[str, ...], size: float) -> float:
        """The time of one collective.

        As in Alpa's LogicalDeviceMesh, with n devices: an all-gather and a
        reduce-scatter send (n-1)/n of the bytes, an all-reduce twice that, and an
        all-to-all (n-1)/n^2, with a penalty of n/2. Over several axes it is slowest
        link that counts.

        Args:
          kind: as in HLO.
          axes: of the mesh, in any order.
          size: bytes of a whole group's tensor.
        """
        sizes = dict(self.mesh)
        names = [name for name in axes if sizes[name] > 1]
        if not names or size <= 0:
            return 0.0
        n = prod(sizes[name] for name in names)
        alpha = max(self.links[name].alpha_ms for name in names)
        beta = max(self.links[name].beta_ms_per_byte for name in names)
        return alpha + beta * sent_share(kind, n) * size

    def combined_ms(
        self, kind: str, axes: tuple[str, ...], size: float, count: int
    ) -> float:
        """The time of one of several: Alpa's model prices each by itself."""
        del count
        return self.collective_ms(kind, axes, size)

    def matmul_ms(self, flops: float, dtype: str) -> float:
        """The time of matrix products, the same for all types."""
        del dtype
        return flops / self.flops_per_ms if self.flops_per_ms else 0.0

    def memory_ms(self, size: float) -> float:
        """Nothing: only communication counts, and matrix products if asked for."""
        del size
        return 0.0


def sent_share(kind: str, n: int) -> float:
    """The part of a group's tensor that Alpa has a device send."""
    passes = {
        "all-gather": 1.0,
        "reduce-scatter": 1.0,
        "all-reduce": 2.0,
        "all-to-all": 1.0 / n * (n / 2),
    }
    return passes[_PRICED_AS.get(kind, kind)] * (n - 1) / n


def fit(rates: Rates, flops_per_ms: float | None = None) -> AlphaBeta:
    """The links that explain measured collectives best.

    One alpha and one beta for each axis, fitted to all kinds and sizes at once, with
    errors counted relative to what was measured: a model as good as one of this form
    can be on these devices.
    """
    links = {}
    for name, n in rates.mesh:
        if n < 2:
            continue
        rows, times = [], []
        for (kind, axes), curve in rates.curves.items():
            if axes == (name,):
                rows += [(1.0, sent_share(kind, n) * size) for size, _ in curve]
                times += [ms for _, ms in curve]
        matrix, measured = np.array(rows), np.array(times)
        weighted = matrix / measured[:, None]
        scale = weighted.max(axis=0)  # One column is of ones, one of megabytes.
        found, *_ = np.linalg.lstsq(weighted / scale, np.ones(len(times)), rcond=None)
        alpha, beta = np.maximum(found / scale, [0.0, 1e-12])
        links[name] = Link(alpha_ms=float(alpha), beta_ms_per_byte=float(beta))
    return AlphaBeta(mesh=rates.mesh, links=links, flops_per_ms=flops_per_ms)
