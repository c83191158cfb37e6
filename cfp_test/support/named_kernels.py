"""Kernels of a segment by short names: ``chunked ring``, ``vocabulary/8``."""

from __future__ import annotations

from cfp.analysis.layout import SegmentKernels

_PARTS = "vocabulary/"


def kernels_named(name: str) -> SegmentKernels:
    """The kernels of attentions, of cross-entropies, or of both, joined by a plus."""
    *others, last = name.split("+")
    parts = int(last.removeprefix(_PARTS)) if last.startswith(_PARTS) else 0
    words = " ".join(others if parts else [last]).split()
    attention, spread = [*words, "", ""][:2]
    return SegmentKernels(
        attention=attention,
        spread="ring" if spread == "ring" else "",
        vocabulary_parts=parts,
    )


def name_of(kernels: SegmentKernels) -> str:
    """The name that `kernels_named` reads."""
    attention = " ".join(filter(None, (kernels.attention, kernels.spread)))
    parts = kernels.vocabulary_parts
    return "+".join(filter(None, (attention, f"{_PARTS}{parts}" if parts else "")))
