"""What a race of abridged programs says about the whole ones.

A whole program takes as many times as long as the abridged one as it does by the
profiles, which know how much of a step is layers, and how much is what stands before
and behind these. The same goes for its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from cfp.analysis.abridge import Abridged, abridge, treatments
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
    """Abridged programs, and what they say of the whole one, by choice.

    Attributes:
        programs: what is left. Choices that treat the same layers alike share one.
        wholes: what it says.
    """

    programs: Mapping[Choice, Abridged]
    wholes: Mapping[Choice, Whole]

    def whole(self, choice: Choice) -> Whole:
        """What the abridged program says about the whole one, under a choice."""
        return self.wholes[choice]


def shorten(
    analysis: Analysis, problem: Problem, choices: Sequence[Choice], kept: int
) -> Shortened | None:
    """Abridges a program for a race of some choices.

    Args:
        analysis: of the program.
        problem: what the profiles say.
        choices: what is to be raced.
        kept: how many repeats of a stretch of segments stay that are treated alike.

    Returns:
        None if the program cannot be abridged, or not by enough, for one of the
        choices, or the profiles know neither it nor one that treats the same layers
        alike.
    """
    programs: dict[Choice, Abridged] = {}
    wholes: dict[Choice, Whole] = {}
    alike: dict[tuple[int, ...], list[Choice]] = {}
    for choice in choices:
        alike.setdefault(treatments(analysis, choice), []).append(choice)
    if not alike:
        return None
    for kinds, group in alike.items():
        abridged = abridge(analysis, kinds, kept)
        if abridged is None:
            return None
        if len(abridged.segments) > _WORTH_IT * len(analysis.segments):
            return None
        short = replace(
            problem.only(abridged.segments),
            fixed_bytes=fixed_bytes(analysis, abridged.part.inputs),
        )
        known = {
            choice: _whole(problem, short, abridged.segments, picks)
            for choice in group
            if (picks := picks_of(analysis, problem, choice)) is not None
        }
        if not known:
            return None
        usual = Whole(
            time_ratio=mean(one.time_ratio for one in known.values()),
            bytes_ratio=mean(one.bytes_ratio for one in known.values()),
        )
        programs |= dict.fromkeys(group, abridged)
        wholes |= dict.fromkeys(group, usual) | known
    return Shortened(programs, wholes)


def _whole(
    problem: Problem, short: Problem, segments: Sequence[int], picks: Sequence[int]
) -> Whole:
    left = [picks[i] for i in segments]
    short_ms, short_bytes = short.cost_ms(left), short.memory_bytes(left)
    return Whole(
        time_ratio=problem.cost_ms(picks) / short_ms if short_ms else 1.0,
        bytes_ratio=problem.memory_bytes(picks) / short_bytes if short_bytes else 1.0,
    )
