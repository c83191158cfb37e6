"""Candidates to measure for segments (runs of blocks): best estimates, presets' parts.

Equal segments, such as layers, have one kind. A preset is a named choice for the whole
program; its part is the choice of one segment. Few of many mixed presets are measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, product

import numpy as np

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import AS_WRITTEN, Choice, SegmentKernels, Storage
from cfp.analysis.presets import (
    PRESETS,
    PROPAGATED,
    REPLICATED,
    named_choices,
    plainest,
)
from cfp.analysis.storage import USUAL_STORAGE
from cfp.analysis.strategies import Strategy
from cfp.cost.costs import (
    SegmentChoice,
    SegmentEstimate,
    estimate_segment,
    layout_of,
    segment_candidate,
)
from cfp.cost.terms import Terms
from cfp.kernels.kinds import KINDS, Kind
from cfp.profiling.collectives import Rates
from cfp.search.solver import Assignment, Problem
from cfp.settings import MIXED_PRESETS, Dimension, Replacing

# Partial choices that `ranked_candidates` keeps after each block.
BEAM_WIDTH = 256


def whole_choice(analysis: Analysis, problem: Problem, found: Assignment) -> Choice:
    """Converts a solver's option numbers to a choice for the whole program."""
    frame, pairs = analysis.frame, zip(analysis.segments, found.picks, strict=True)
    picked = [(s, problem.options[s.kind][pick].candidate) for s, pick in pairs]
    strategies: dict[int, Strategy] = {}
    storage = [Storage.USED] * len(frame.groups)
    for segment, candidate in picked:
        strategies |= zip(segment.blocks, candidate.strategies, strict=True)
        for group in segment.groups:
            storage[group] = candidate.storage
    return Choice(
        tuple(strategies[block.index] for block in frame.blocks),
        tuple(storage),
        tuple(s.index for s, one in picked if one.remat),
        tuple((s.index, one.kernels) for s, one in picked if one.kernels),
    )


def picks_of(analysis: Analysis, problem: Problem, choice: Choice) -> list[int] | None:
    """Returns each segment's option number for a choice; None if any has no option."""
    places = [
        {option.candidate: place for place, option in enumerate(options)}
        for options in problem.options
    ]
    picks = []
    for segment in analysis.segments:
        wanted = segment_candidate(analysis, segment.index, choice)
        if (pick := places[segment.kind].get(wanted)) is None:
            return None
        picks.append(pick)
    return picks


def preset_parts(
    analysis: Analysis, presets: Iterable[Choice]
) -> list[dict[SegmentChoice, Choice]]:
    """Returns ``[kind]{part: first preset with it}``, without duplicate parts.

    Equal segments may have different parts of one preset: the last layer, for example,
    is followed by another kind of segment.
    """
    found: list[dict[SegmentChoice, Choice]] = [{} for _ in analysis.representatives]
    for choice in presets:
        for segment in analysis.segments:
            part = segment_candidate(analysis, segment.index, choice)
            found[segment.kind].setdefault(part, choice)
    return found


def ranked_candidates(estimate: SegmentEstimate, count: int) -> list[SegmentChoice]:
    """Returns the choices of a segment with the shortest estimated times, in order.

    A beam search over the blocks, exact if the beam holds every partial choice.

    Args:
        count: largest number of choices for each storage mode.
    """
    before: dict[int, list[tuple[int, np.ndarray]]] = {}
    for (a, b), matrix in estimate.edge_ms.items():
        before.setdefault(b, []).append((a, matrix))
    found = []
    for storage in estimate.modes:
        if storage not in estimate.node_ms:
            continue
        costs, picks = np.zeros(1), np.zeros((1, 0), int)
        for place, options in enumerate(estimate.node_ms[storage]):
            grown = costs[:, None] + options[None, :]
            for a, matrix in before.get(place, ()):
                grown = grown + (np.diag(matrix) if a == place else matrix[picks[:, a]])
            best = np.argsort(grown, axis=None, kind="stable")[:BEAM_WIDTH]
            rows, strategies = np.unravel_index(best, grown.shape)
            costs = grown[rows, strategies]
            picks = np.concatenate([picks[rows], strategies[:, None]], axis=1)
        for cost, row in zip(costs[:count], picks[:count], strict=True):
            picked = tuple(estimate.strategies[b][s] for b, s in enumerate(row))
            found.append(SegmentChoice(picked, storage, float(cost)))
    return sorted(found, key=lambda candidate: candidate.estimate_ms)


def first_candidates(
    analysis: Analysis,
    estimates: Sequence[SegmentEstimate],
    parts: Sequence[Iterable[SegmentChoice]],
    replacing: Replacing,
    *,
    others: int,
    per_kind: int | None = None,
) -> list[list[SegmentChoice]]:
    """Returns the candidates of each kind to measure, or estimate, before any search.

    All parts of presets come first, then the best by estimate of each storage mode,
    then the next best. Variants of all these with kernels follow, and do not count.

    Args:
        parts: ``[kind]`` parts of presets; all are returned.
        others: largest number of candidates besides parts of presets.
        per_kind: largest number, parts of presets included; None for no limit.
    """
    every = []
    for kind, (estimate, required) in enumerate(zip(estimates, parts, strict=True)):
        found = dict.fromkeys(required)
        count = len(found) + others
        if per_kind is not None:
            count = max(len(found), min(per_kind, count))
        ranked = ranked_candidates(estimate, count)
        leaders = {c.storage: c for c in reversed(ranked)}
        leading = [leaders[mode] for mode in USUAL_STORAGE if mode in leaders]
        for candidate in (*leading, *ranked):
            if len(found) >= count:
                break
            found.setdefault(candidate)
        every.append([*found])
        for one in found:
            every[-1] += kernel_variants(analysis, kind, one, replacing)
    return every


def estimate_kinds(
    analysis: Analysis,
    rates: Rates,
    fixed: Sequence[Strategy] | None = None,
    modes: Set[Storage] = frozenset(Storage),
) -> tuple[SegmentEstimate, ...]:
    """Estimates times of one segment of each kind.

    Args:
        fixed: one strategy for each block, the only ones to estimate; None for all.
        modes: storage modes of parameters to estimate.
    """
    terms = Terms(analysis.frame, rates)
    segments = analysis.segments
    found = []
    for kind, index in enumerate(analysis.representatives):
        behind = segments[index + 1] if index + 1 < len(segments) else None
        twin = behind if behind is not None and behind.kind == kind else None
        among = None
        if fixed is not None:
            alike = [one.blocks for one in segments if one.kind == kind]
            among = [{*map(fixed.__getitem__, o)} for o in zip(*alike, strict=True)]
        found.append(estimate_segment(terms, segments[index], twin, among, modes))
    return tuple(found)


def estimate_among(
    analysis: Analysis, rates: Rates, dimensions: Set[Dimension]
) -> tuple[tuple[SegmentEstimate, ...], dict[str, Choice]]:
    """Estimates every kind, and selects presets, within the dimensions to search.

    Without `SHARDING`, every block has the strategy of the `plainest` preset.
    Without `STORAGE`, parameters are stored as used. Returns the estimates by kind, and
    the presets of `leading_presets` by name.
    """
    named, modes, fixed = named_choices(analysis.frame), {*Storage}, None
    if Dimension.STORAGE not in dimensions or not analysis.frame.mesh:
        modes = {Storage.USED}
    if Dimension.SHARDING not in dimensions:
        fixed = plainest(named).blocks
    kept = {
        name: choice
        for name, choice in named.items()
        if modes.issuperset(choice.storage) and fixed in (None, choice.blocks)
    }
    estimates = estimate_kinds(analysis, rates, fixed, modes)
    return estimates, leading_presets(analysis, estimates, kept)


def leading_presets(
    analysis: Analysis,
    estimates: Sequence[SegmentEstimate],
    presets: Mapping[str, Choice],
    reach: float = float("inf"),
) -> dict[str, Choice]:
    """Selects presets to measure: the unmixed ones, and the fastest mixed ones.

    Args:
        reach: largest estimated time of all these, as a multiple of the best preset's.
    """
    total_ms = preset_times(analysis, estimates, presets)
    # A program that only returns its arguments has estimated times of zero.
    best_ms = min(total_ms.values(), default=0.0)
    limit_ms = reach * best_ms if best_ms else float("inf")
    always = {*PRESETS, REPLICATED, *PROPAGATED}
    mixed = sorted((n for n in presets if n not in always), key=total_ms.__getitem__)
    leading = {*always, *mixed[:MIXED_PRESETS]}
    return {
        name: choice
        for name, choice in presets.items()
        if name in leading and total_ms[name] <= limit_ms
    }


def preset_times(
    analysis: Analysis,
    estimates: Sequence[SegmentEstimate],
    presets: Mapping[str, Choice],
) -> dict[str, float]:
    """Returns {name: estimated step time, ms}, without resharding between kinds."""
    kinds = [segment.kind for segment in analysis.segments]
    return {
        name: sum(
            kinds.count(kind)
            * estimates[kind].total_ms(segment_candidate(analysis, index, choice))
            for kind, index in enumerate(analysis.representatives)
        )
        for name, choice in presets.items()
    }


def kernel_variants(
    analysis: Analysis, kind: int, candidate: SegmentChoice, replacing: Replacing
) -> list[SegmentChoice]:
    """Returns variants of `candidate` with kernels; [] if it has some, or none can.

    Each row of `Kind.variants` gives its first able kernel. Kinds are combined.
    """
    if candidate.kernels or not replacing.kernels:
        return []
    index = analysis.representatives[kind]
    frame, ops = analysis.frame, analysis.segments[index].ops
    program = frame.program
    sites = {of.NAME: of.find(program).among(program, ops) for of in KINDS}
    if not any(sites.values()):
        return []
    layout = layout_of(analysis, {index: candidate})
    where = dict(frame.mesh), replacing.platform

    def can(of: Kind, name: str) -> bool:
        every = [of.propose(program, s, name, layout.axes) for s in sites[of.NAME]]
        able = [one for one in every if not isinstance(one, str)]
        return bool(able) and not any(one.refusal(*where) for one in able)

    ways: list[list[SegmentKernels]] = []
    for of in KINDS:
        rows = of.variants(replacing.kernels)
        able = ([(of.NAME, name) for name in row if can(of, name)] for row in rows)
        ways.append([*((names[0],) for names in able if names), AS_WRITTEN])
    kernels = (tuple(chain(*way)) for way in product(*ways))
    return [replace(candidate, kernels=one) for one in kernels if one]
