"""Estimates of how long the rest of planning takes, by what it took so far.

Planning on GPUs has ten stages, and lines of progress say how long all of the rest
takes, not the stage that is at work. What is at work goes on as it went; of what
follows the number of programs is known or guessed, and each takes what it took in
recorded runs on two GPUs: kernels were tuned for 0.2 to 3.4 s a program, segments took
0.25 to 0.7 s, whole programs 0.4 to 4.3 s (docs/results/by_hand_h100x2_202611.json;
decisions.md, "What planning takes by stage"). A look and a turn take some steps, as
long as predicted.
What each stage took is kept, too, for the plan's record.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from types import MappingProxyType

from cfp.units import clock_text

# The end of a line that says how long the rest takes.
_LEFT = re.compile(r", about \d+:\d\d left$")


def without_left(text: str) -> str:
    """A line without what `Outlook.left_text` says."""
    return _LEFT.sub("", text)


class Stage(StrEnum):
    """The stages of planning that take long, in their order."""

    RATES = "rates of devices"
    TUNING = "tuning"
    BUILDS = "segments built"
    RUNS = "segments run"
    WHOLE = "whole programs"
    WARM_UP = "warm-up"
    LOOKS = "looks"
    VARIANTS = "whole programs with other options"
    WARM_UP_AGAIN = "second warm-up"
    TURNS = "turns"


# Seconds for each program of a stage, if nothing is known of an earlier stage;
# otherwise so many, and a multiple of what each takes there.
_SECONDS: Mapping[Stage, tuple[float, float, Stage | None, float]] = MappingProxyType(
    {
        Stage.RATES: (0.2, 0.0, None, 0.0),
        Stage.TUNING: (1.2, 0.0, None, 0.0),
        Stage.BUILDS: (0.25, 0.0, Stage.TUNING, 0.4),
        Stage.RUNS: (0.2, 0.0, None, 0.0),
        Stage.WHOLE: (0.7, 0.3, Stage.BUILDS, 2.2),
        Stage.WARM_UP: (3.5, 0.0, None, 0.0),
        Stage.LOOKS: (0.5, 0.0, None, 0.0),
        Stage.VARIANTS: (0.5, 0.0, None, 0.0),
        Stage.WARM_UP_AGAIN: (3.5, 0.0, None, 0.0),
        Stage.TURNS: (0.7, 0.0, Stage.LOOKS, 1.35),
    }
)
# Seconds and steps of a look and of a turn, where it is predicted how long steps take.
_RUNS: Mapping[Stage, tuple[float, float]] = MappingProxyType(
    {Stage.LOOKS: (0.1, 5.0), Stage.TURNS: (0.5, 2.5)}
)
# All variants of a leader take this share of what all whole programs do: both are
# compiled side by side, and a program takes as long as it does.
_VARIANTS_SHARE = 0.5
# How the counts of a plan begin that say what a stage took.
PART = "seconds_in_"
# So many programs of a stage count as much as what is usual: the first few say little,
# but of kernels, which take from 1 s a program to 3.
_TRUSTED, _TRUSTED_OF_TUNING = 6, 2


class Outlook:
    """Expects how long planning takes, from what is known of its stages.

    Args:
        end: when planning is to end in any case, as `time.monotonic` counts.
    """

    def __init__(self, end: float = math.inf) -> None:
        self._end = end
        self._expected: set[Stage] = set()
        self._counts: dict[Stage, int] = {}
        self._rest: dict[Stage, float] = {}
        self._each: dict[Stage, float] = {}
        self._took: dict[Stage, float] = {}
        self._step_seconds: float | None = None
        self._is_open = False

    @property
    def counts(self) -> Mapping[str, float]:
        """Seconds that each stage took, as plans keep them."""
        return {
            f"{PART}{stage.name.lower()}": self._took[stage]
            for stage in Stage
            if stage in self._took
        }

    def took(self, stage: Stage, seconds: float) -> None:
        """Adds seconds to what a stage took."""
        self._took[stage] = self._took.get(stage, 0.0) + seconds

    @contextmanager
    def at(self, stage: Stage) -> Iterator[None]:
        """Adds what is done meanwhile to what a stage took."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.took(stage, time.monotonic() - started)

    def leave_open(self) -> None:
        """Takes note that nobody knows how much is asked for: no rest is known."""
        self._is_open = True

    def expect(self, counts: Mapping[Stage, int]) -> None:
        """Takes note of how many programs stages are to have."""
        self._expected |= counts.keys()
        self._counts |= counts
        self._rest |= counts

    def expect_step(self, seconds: float) -> None:
        """Takes note of how long a step is predicted to take; races run several."""
        self._step_seconds = seconds

    def note(self, stage: Stage, done: float, total: int, seconds: float) -> None:
        """Takes note of how a stage goes; see `left_seconds`."""
        known = 0
        if stage in self._expected:
            known = _TRUSTED_OF_TUNING if stage is Stage.TUNING else _TRUSTED
        self._counts[stage] = total
        if done + known:
            spent = seconds + known * self._usual(stage)
            self._each[stage] = spent / (done + known)
            self._rest[stage] = total - done

    def left_seconds(
        self, stage: Stage, done: float, total: int, seconds: float
    ) -> float | None:
        """Estimates the time until planning ends.

        Args:
            done: how many of its programs are done, those at work by halves.
            seconds: since the stage began.

        Returns:
            None if nothing is known: the stage was not expected, and nothing is done.
            Infinity if nothing can be: see `leave_open`.
        """
        self.note(stage, done, total, seconds)
        if self._is_open:
            return math.inf
        if stage not in self._each:
            return None
        order = [*Stage]
        left = sum(
            self._rest.get(one, 0) * self._each.get(one, self._usual(one))
            for one in order[order.index(stage) :]
        )
        return min(left, max(0.0, self._end - time.monotonic()))

    def expected_seconds(self, counts: Mapping[Stage, int]) -> float:
        """Expects how long so many programs of some stages take."""
        return sum(
            count * self._each.get(stage, self._usual(stage))
            for stage, count in counts.items()
        )

    def left_text(self, stage: Stage, done: float, total: int, seconds: float) -> str:
        """The same as the end of a line: ``, about 0:40 left``; empty if not known."""
        left = self.left_seconds(stage, done, total, seconds) or 0.0
        is_known = math.isfinite(left) and round(left)
        return f", about {clock_text(round(left))} left" if is_known else ""

    def _usual(self, stage: Stage) -> float:
        """Seconds for each program of a stage, by what is known of earlier ones."""
        if stage in _RUNS and self._step_seconds is not None:
            seconds, steps = _RUNS[stage]
            return seconds + steps * self._step_seconds
        if stage is Stage.VARIANTS and Stage.WHOLE in self._counts:
            each = self._each.get(Stage.WHOLE, self._usual(Stage.WHOLE))
            # What batches of them took, or the one that is expected.
            whole_seconds = max(
                self._took.get(Stage.WHOLE, 0.0), self._counts[Stage.WHOLE] * each
            )
            return _VARIANTS_SHARE * whole_seconds / max(1, self._counts.get(stage, 1))
        usual, least, earlier, times = _SECONDS[stage]
        if earlier is None or earlier not in self._each:
            return usual
        return least + times * self._each[earlier]
