"""Kernels of a segment by short names, such as ``chunked ring``."""

from __future__ import annotations

from cfp.analysis.layout import SegmentKernels


def kernels_named(name: str) -> SegmentKernels:
    """The kernels that a name stands for."""
    attention, spread = [*name.split(), "", ""][:2]
    return SegmentKernels(
        attention=attention, spread="ring" if spread == "ring" else ""
    )


def name_of(kernels: SegmentKernels) -> str:
    """The name that `kernels_named` reads."""
    return " ".join(filter(None, (kernels.attention, kernels.spread)))
