"""Scales results of truncated programs to the whole ones.

A whole program takes as many times as long as the truncated one as it does by the
profiles, which know how much of a step is layers, and how much is what stands before
and behind these. The same goes for its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from cfp.analysis.analyze import Analysis
from cfp.analysis.layout import Choice
from cfp.analysis.truncate import TruncatedProgram, treatments, truncate_program
from cfp.cost.memory import fixed_bytes
from cfp.search.choices import picks_of
from cfp.search.problem import Problem
from cfp.settings import TRUNCATED_AT_MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Ratios of a whole program to the truncated one.

    Attributes:
        time: that one takes so many times as long.
        memory: and needs so many times as much memory on each device.
    """

    time: float = 1.0
    memory: float = 1.0


# What a whole program says about itself.
WHOLE = Ratios()


# For each choice the truncated program, and what it says about the whole one. Choices
# that treat the same layers alike share a program.
Truncated = Mapping[Choice, tuple[TruncatedProgram, Ratios]]


def truncate(
    analysis: Analysis, problem: Problem, choices: Sequence[Choice], kept: int
) -> Truncated | None:
    """Truncates a program for a race of some choices.

    Args:
        choices: what is to be raced.
        kept: how many repeats of a stretch of segments stay that are treated alike.

    Returns:
        None if the program cannot be truncated, or not by enough, for one of the
        choices, or the profiles know neither it nor one that treats the same layers
        alike.
    """
    found: dict[Choice, tuple[TruncatedProgram, Ratios]] = {}
    alike: dict[tuple[int, ...], list[Choice]] = {}
    for choice in choices:
        alike.setdefault(treatments(analysis, choice), []).append(choice)
    if not alike:
        return None
    for kinds, group in alike.items():
        program = truncate_program(analysis, kinds, kept)
        if program is None:
            return None
        if len(program.segments) > TRUNCATED_AT_MOST * len(analysis.segments):
            return None
        left = (*program.part.inputs, *program.part.outputs)
        short = replace(
            problem.only(program.segments), fixed_bytes=fixed_bytes(analysis, left)
        )
        known = {
            choice: _ratios(problem, short, program.segments, picks)
            for choice in group
            if (picks := picks_of(analysis, problem, choice)) is not None
        }
        if not known:
            return None
        usual = Ratios(
            time=mean(one.time for one in known.values()),
            memory=mean(one.memory for one in known.values()),
        )
        found |= {choice: (program, known.get(choice, usual)) for choice in group}
    return found


def _ratios(
    problem: Problem,
    short: Problem,
    segments: Sequence[int],
    picks: Sequence[int],
) -> Ratios:
    left = [picks[i] for i in segments]
    short_ms, short_bytes = short.cost_ms(left), short.memory_bytes(left)
    return Ratios(
        time=problem.cost_ms(picks) / short_ms if short_ms else 1.0,
        memory=problem.memory_bytes(picks) / short_bytes if short_bytes else 1.0,
    )
