"""What a race of abridged programs says about the whole ones.

A whole program takes as many times as long as the abridged one as it does by the
profiles, which know how much of a step is layers, and how much is what stands before
and behind these. The same goes for its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from cfp.analysis.abridge import Abridged, abridge
from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.search.costs import fixed_bytes
from cfp.search.explain import picks_of
from cfp.search.finalist import Whole
from cfp.search.problem import Problem

# The winner is compiled whole, too: a little less for each is more for all.
_WORTH_IT = 0.7


@dataclass(frozen=True, slots=True)
class Shortened:
    """An abridged program, and what it says.

    Attributes:
        analysis: of the whole program.
        abridged: what is left of it.
        problem: what the profiles say about the whole program.
        short: what they say about what is left.
        usual: what follows for the whole program under a choice that the profiles do
            not know all of.
    """

    analysis: Analysis
    abridged: Abridged
    problem: Problem
    short: Problem
    usual: Whole

    def whole(self, choice: Choice) -> Whole:
        """What the abridged program says about the whole one, under a choice."""
        picks = picks_of(self.analysis, self.problem, choice)
        if picks is None:
            return self.usual
        return _whole(self.problem, self.short, self.abridged.segments, picks)


def shorten(
    analysis: Analysis, problem: Problem, choices: Sequence[Choice], kept: int
) -> Shortened | None:
    """Abridges a program for a race of some choices.

    Args:
        analysis: of the program.
        problem: what the profiles say.
        choices: what is to be raced.
        kept: how many repeats of a stretch of segments stay.

    Returns:
        None if the program cannot be abridged, or not by enough, or one of the choices
        treats repeats differently, or the profiles know none of the choices.
    """
    abridged = abridge(analysis, kept)
    if abridged is None or not all(abridged.stands_for(analysis, c) for c in choices):
        return None
    if len(abridged.segments) > _WORTH_IT * len(analysis.segments):
        return None
    known = [p for c in choices if (p := picks_of(analysis, problem, c)) is not None]
    if not known:
        return None
    short = replace(
        problem,
        kinds=tuple(problem.kinds[i] for i in abridged.segments),
        fixed_bytes=fixed_bytes(analysis, abridged.part.inputs),
    )
    found = [_whole(problem, short, abridged.segments, picks) for picks in known]
    usual = Whole(
        time_ratio=mean(one.time_ratio for one in found),
        bytes_ratio=mean(one.bytes_ratio for one in found),
    )
    return Shortened(analysis, abridged, problem, short, usual)


def _whole(
    problem: Problem, short: Problem, segments: Sequence[int], picks: Sequence[int]
) -> Whole:
    left = [picks[i] for i in segments]
    short_ms, short_bytes = short.cost_ms(left), short.memory_bytes(left)
    return Whole(
        time_ratio=problem.cost_ms(picks) / short_ms if short_ms else 1.0,
        bytes_ratio=problem.memory_bytes(picks) / short_bytes if short_bytes else 1.0,
    )
