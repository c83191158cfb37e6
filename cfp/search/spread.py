"""When one program is faster than another, and when that cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

from cfp.profiling.timing import interquartile_range

# With fewer samples nothing is known of their spread.
ENOUGH_SAMPLES = 4
# Of normally distributed samples: standard deviations in an interquartile range, and
# standard errors of the mean in one of the median.
_SIGMAS, _OF_MEDIAN = 1.349, 1.253
# A difference of so many standard errors is no accident.
_SURE = 2.0


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
    return abs(median(some) - median(others)) <= _SURE * error


def _error(samples: Sequence[float]) -> float:
    """The standard error of the median."""
    return _OF_MEDIAN * interquartile_range(samples) / _SIGMAS / sqrt(len(samples))
