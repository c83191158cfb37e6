"""What the solutions of a search mean for the whole program."""

from __future__ import annotations

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.strategies import Strategy
from cfp.search.candidates import segment_candidate
from cfp.search.dynamic import solve_among
from cfp.search.problem import Problem, Solution


def whole_choice(analysis: Analysis, problem: Problem, found: Solution) -> Choice:
    """The whole program's choice that a solution stands for."""
    frame = analysis.frame
    strategies: dict[int, Strategy] = {}
    storage = [Storage.USED] * len(frame.groups)
    remat, kernels = [], []
    for segment, pick in zip(analysis.segments, found.picks, strict=True):
        candidate = problem.options[segment.kind][pick].candidate
        for block, strategy in zip(segment.blocks, candidate.strategies, strict=True):
            strategies[block] = strategy
        for group in segment.groups:
            storage[group] = candidate.storage
        if candidate.remat:
            remat.append(segment.index)
        if candidate.kernel:
            kernels.append((segment.index, candidate.kernel))
    return Choice(
        tuple(strategies[block.index] for block in frame.blocks),
        tuple(storage),
        tuple(remat),
        tuple(kernels),
    )


def picks_of(analysis: Analysis, problem: Problem, choice: Choice) -> list[int] | None:
    """A whole program's choice as options of a problem; None if it has not all."""
    picks = []
    for segment in analysis.segments:
        wanted = segment_candidate(analysis, segment.index, choice).key
        keys = [option.candidate.key for option in problem.options[segment.kind]]
        if wanted not in keys:
            return None
        picks.append(keys.index(wanted))
    return picks


def best_solutions(problem: Problem, count: int) -> list[Solution]:
    """The best solution, and others that differ from it where it matters.

    Each next one may not use what the one before chose for the kind of segment that
    takes most of the time.
    """
    found: list[Solution] = []
    banned: set[tuple[int, int]] = set()
    while len(found) < count:
        kept = [
            [i for i in range(len(options)) if (kind, i) not in banned]
            for kind, options in enumerate(problem.options)
        ]
        if not all(kept):
            break
        best = solve_among(problem, kept)
        if best is None:
            break
        found.append(best)
        spent: dict[tuple[int, int], float] = {}
        for kind, pick in zip(problem.kinds, best.picks, strict=True):
            time_ms = problem.options[kind][pick].time_ms
            spent[kind, pick] = spent.get((kind, pick), 0.0) + time_ms
        if not spent:  # a program without segments leaves nothing to choose
            break
        banned.add(max(spent, key=lambda choice: spent[choice]))
    return found
