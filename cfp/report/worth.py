"""The gain of each kind of choice: the best step with it, and without.

Measured where programs with and without it raced, predicted where they did not. The
best that raced without it is no faster than the best there is, so that a measured gain
is a bound from above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Storage
from cfp.cost.choice import SegmentChoice, segment_candidate
from cfp.plan.figures import WorthFigures
from cfp.presets.presets import plainest, presets
from cfp.search.problem import Problem
from cfp.search.solver import solve
from cfp.solution import Candidate

SHARDING = "sharding"
OPTIONS = "compiler options"

# Of each kind of choice whether an option of a segment goes without it.
_OF_SEGMENTS: Mapping[str, Callable[[SegmentChoice], bool]] = MappingProxyType(
    {
        "storage": lambda one: one.storage is Storage.USED,
        "rematerialization": lambda one: not one.remat,
        "attention kernels": lambda one: not one.kernels.attention,
        "cross-entropy in parts": lambda one: not one.kernels.vocabulary_parts,
    }
)


def worth(
    analysis: Analysis,
    problem: Problem,
    raced: Sequence[tuple[Candidate, float]] = (),
) -> tuple[WorthFigures, ...]:
    """Gives the gain of each kind of choice, largest kinds of choices first.

    Without sharding every block is as data parallelism has it. Kinds that no option
    makes use of are left out.

    Args:
        analysis: of the program.
        problem: what was searched.
        raced: whole programs, with their measured step times.
    """
    plain = plainest(presets(analysis.frame))
    segments = range(len(analysis.segments))
    shared = {
        (analysis.segments[i].kind, segment_candidate(analysis, i, plain).strategies)
        for i in segments
    }

    def goes_without(name: str, kind: int, one: SegmentChoice) -> bool:
        if name == SHARDING:
            return (kind, one.strategies) in shared
        return _OF_SEGMENTS[name](one)

    def is_without(name: str, one: Candidate) -> bool:
        if name == OPTIONS:
            return not one.options
        parts = ((i, segment_candidate(analysis, i, one.choice)) for i in segments)
        return all(
            goes_without(name, analysis.segments[i].kind, part) for i, part in parts
        )

    found = []
    for name in (SHARDING, *_OF_SEGMENTS, OPTIONS):
        without = [ms for one, ms in raced if is_without(name, one)]
        if without and len(without) < len(raced):
            best_ms = min(ms for _, ms in raced)
            found.append(
                WorthFigures(
                    name=name,
                    with_ms=best_ms,
                    without_ms=min(without),
                    is_measured=True,
                )
            )
        elif name != OPTIONS:
            kept = [
                [
                    place
                    for place, one in enumerate(options)
                    if goes_without(name, kind, one.candidate)
                ]
                for kind, options in enumerate(problem.options)
            ]
            found += _predicted(problem, name, kept)
    return tuple(found)


def _predicted(
    problem: Problem, name: str, kept: Sequence[Sequence[int]]
) -> list[WorthFigures]:
    """Predicts the gain of what some options make use of.

    Args:
        problem: what was searched.
        name: of the kind of choice.
        kept: for each kind of segment the options that go without it.
    """
    if [*map(len, kept)] == [*map(len, problem.options)]:
        return []
    best = solve(problem)
    if best is None:
        return []
    without = solve(problem.among(kept)) if all(kept) else None
    return [
        WorthFigures(
            name=name,
            with_ms=best.cost_ms,
            without_ms=without and without.cost_ms,
            is_measured=False,
        )
    ]
