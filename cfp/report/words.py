"""Names and words for the choices of a segment."""

from __future__ import annotations

from collections.abc import Sequence

from cfp.analysis.analyze import Analysis
from cfp.cost.choice import SegmentChoice, segment_candidate
from cfp.plan.describe import axis_roles
from cfp.plan.text import (
    REMATERIALIZED,
    STORAGE_WORDS,
    kernels_text,
    merged_name,
    roles_text,
)
from cfp.presets.propagated import named_choices
from cfp.printable import distinct_ends
from cfp.search.problem import Option


def option_names(
    analysis: Analysis, options: Sequence[Sequence[Option]]
) -> list[list[str]]:
    """A short name for each option of each kind of segment.

    That of the first preset whose part it is, or else its number: ``#7``. What is
    rematerialized has the name of what is not, and says so.
    """
    by_name = named_choices(analysis.frame)
    found = []
    for kind, index in enumerate(analysis.representatives):
        names: dict[tuple, str] = {}
        for name, choice in by_name.items():
            part = segment_candidate(analysis, index, choice)
            names.setdefault((part.strategies, part.storage), name)
        texts = []
        for number, option in enumerate(options[kind], 1):
            candidate = option.candidate
            alike = candidate.strategies, candidate.storage
            name = names.setdefault(alike, f"#{number}")
            kernels = candidate.kernels
            also = [kernels_text(kernels)] if kernels else []
            also += [REMATERIALIZED] if candidate.remat else []
            texts.append(f"{name} ({', '.join(also)})" if also else name)
        found.append(texts)
    return found


def kind_title(analysis: Analysis, kind: int) -> str:
    """Names the segments of a kind: ``Segments 1-4, from layer_0-3/up to ...``."""
    segments = [s for s in analysis.segments if s.kind == kind]
    blocks = analysis.frame.blocks
    text = f"Segment {segments[0].index}"
    if len(segments) > 1:
        text = merged_name([f"Segment {s.index}" for s in segments])
        text = text.replace("Segment", "Segments", 1)
    ends = [
        merged_name([blocks[s.blocks[place]].name for s in segments])
        for place in (0, -1)
        if segments[0].blocks
    ]
    names = " to ".join(dict.fromkeys(ends))
    return f"{text}: {names}" if names else text


def candidate_words(
    analysis: Analysis,
    kind: int,
    candidate: SegmentChoice,
    base: SegmentChoice | None = None,
) -> str:
    """A choice in words: what it shards, and how parameters are kept.

    Args:
        analysis: the program's analysis.
        kind: the kind of segment.
        candidate: the choice.
        base: say only in what it differs from this one.
    """
    frame = analysis.frame
    segment = analysis.segments[analysis.representatives[kind]]
    blocks: dict[str, list[str]] = {}
    names = distinct_ends([frame.blocks[b].name for b in segment.blocks])
    for place, b in enumerate(segment.blocks):
        strategy = candidate.strategies[place]
        if base is None or base.strategies[place] != strategy:
            op = frame.program.ops[frame.blocks[b].anchor]
            text = roles_text(axis_roles(frame, op, strategy))
            blocks.setdefault(text, []).append(names[place])
    parts = [f"{', '.join(alike)} {text}" for text, alike in blocks.items()]
    if segment.groups and (base is None or base.storage != candidate.storage):
        parts.append(f"parameters {STORAGE_WORDS[candidate.storage]}")
    if candidate.kernels and (base is None or base.kernels != candidate.kernels):
        parts.append(kernels_text(candidate.kernels))
    elif base is not None and base.kernels and not candidate.kernels:
        parts.append("computed as it is written")
    if candidate.remat:
        parts.append(REMATERIALIZED)
    elif base is not None and base.remat:
        parts.append("not rematerialized")
    return "; ".join(parts) or "the same"
