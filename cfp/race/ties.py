"""When one program is faster than another, and when that is not known."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

from cfp.presets.classics import CLASSICS
from cfp.profiling.timing import interquartile_range
from cfp.race.programs import RaceResult, TimedCandidate
from cfp.settings import ENOUGH_SAMPLES, SURE_STANDARD_ERRORS

# Of normally distributed samples: standard deviations in an interquartile range, and
# standard errors of the mean in one of the median.
_SIGMAS, _OF_MEDIAN = 1.349, 1.253


def is_tie(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the medians of two programs' samples differ by no more than noise.

    Args:
        some, others: samples of one race, in milliseconds.

    Returns:
        False where either has too few samples to tell.
    """
    if min(len(some), len(others)) < ENOUGH_SAMPLES:
        return False
    error = sqrt(_error(some) ** 2 + _error(others) ** 2)
    return abs(median(some) - median(others)) <= SURE_STANDARD_ERRORS * error


def _error(samples: Sequence[float]) -> float:
    """The standard error of the median."""
    return _OF_MEDIAN * interquartile_range(samples) / _SIGMAS / sqrt(len(samples))


def tied_with(won: RaceResult, field: Sequence[TimedCandidate]) -> list[TimedCandidate]:
    """What ran as fast as the fastest within the spread of samples, and that itself.

    Nothing where there are too few samples to tell. What was timed for a larger budget,
    and is too large for this one, ties with nothing.
    """
    return [
        (candidate, result)
        for candidate, result in field
        if result.ran and is_tie(result.samples_ms, won.samples_ms)
    ]


def complexity(raced: TimedCandidate) -> tuple[bool, int, float]:
    """What decides a tie: presets before plans, fewer compiler options, the time."""
    candidate, result = raced
    is_preset = candidate.name.partition(", ")[0] in CLASSICS
    return not is_preset, len(candidate.options), result.time_ms
