"""Races after a search by what was compiled: interrupted ones, names, and errors."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cfp import find
from cfp.context import DecidedBy
from cfp.race.candidates import LESS_MEMORY
from cfp.race.programs import NoneFits
from cfp.solution import Candidate, Solution

PLAIN: Any = SimpleNamespace(remat=())
AGAIN: Any = SimpleNamespace(remat=(0,))
FIRST = Solution([Candidate("planned", PLAIN)])
SECOND = Solution([Candidate(LESS_MEMORY, AGAIN)])


def won(name, choice=PLAIN):
    made = SimpleNamespace(winner=Candidate(name, choice))
    return name, find.RaceOutcome(winner=made.winner)


@pytest.fixture
def decided(monkeypatch):
    """Decides where races end so, one after the other; returns what was said, too."""

    def make(*ends, alone=True, memory_bound=False):
        left, asked, told = [*ends], [], []

        def decide(context, analysis, solution, last_resort=True):
            asked.append((solution, last_resort))
            end = left.pop(0)
            if isinstance(end, BaseException):
                raise end
            return end

        monkeypatch.setattr(find, "decide", decide)
        monkeypatch.setattr(find, "search_as_compiled", lambda *_: SECOND)
        context: Any = SimpleNamespace(
            agreement=SimpleNamespace(alone=alone, is_over=lambda end: False),
            end=0.0,
            measure=SimpleNamespace(tell=told.append),
            decided_by=lambda interrupted=False: (
                DecidedBy.COMPILER if interrupted else DecidedBy.RACE
            ),
        )
        analysis: Any = None
        profiles: Any = SimpleNamespace(memory_bound=memory_bound)
        found = find._decided(context, analysis, FIRST, profiles, True)
        assert not left
        return found, asked, told

    return make


def test_interrupted_after_nothing_fitted_the_best_that_fits_is_taken(decided):
    best = won(LESS_MEMORY, AGAIN)
    found, asked, told = decided(NoneFits(1.5), KeyboardInterrupt(), best)
    second = SECOND.after_race(1.5)
    cut = replace(second, interrupted=True)
    assert found == (*best, cut)
    assert asked == [(FIRST, False), (second, True), (cut, True)]
    assert told == ["interrupted: taking the best by prediction"]


def test_interrupted_in_a_further_race_what_won_before_is_taken(decided):
    """Only what an earlier search has rematerialized fits."""
    made, outcome = won("from an earlier run", AGAIN)
    found, asked, told = decided((made, outcome), KeyboardInterrupt())
    assert found == (made, replace(outcome, interrupted=True), FIRST)
    assert [solution for solution, _ in asked] == [FIRST, SECOND]
    assert told == ["interrupted: taking what won before"]


@pytest.mark.parametrize("ends", [(NoneFits(1.5),), (won("planned", AGAIN),)])
def test_several_processes_are_interrupted_together(decided, ends):
    with pytest.raises(KeyboardInterrupt):
        decided(*ends, KeyboardInterrupt(), alone=False)
