"""Races after a search by what was compiled."""

from types import SimpleNamespace
from typing import Any

import pytest

from cfp import find
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
    """Decides where races end so, one after the other."""

    def make(*ends, memory_bound=False):
        left, asked = [*ends], []

        def decide(context, analysis, solution, last_resort=True):
            asked.append((solution, last_resort))
            end = left.pop(0)
            if isinstance(end, BaseException):
                raise end
            return end

        monkeypatch.setattr(find, "decide", decide)
        monkeypatch.setattr(find, "search_as_compiled", lambda *_: SECOND)
        context: Any = SimpleNamespace(
            is_over=False,
        )
        analysis: Any = None
        profiles: Any = SimpleNamespace(memory_bound=memory_bound)
        found = find._decided(context, analysis, FIRST, profiles, True)
        assert not left
        return found, asked

    return make


def test_after_nothing_fitted_what_a_further_search_finds_races(decided):
    best = won(LESS_MEMORY, AGAIN)
    found, asked = decided(NoneFits(1.5), best)
    second = SECOND.after_race(1.5)
    assert found == (*best, second)
    assert asked == [(FIRST, False), (second, True)]


def test_where_only_what_is_rematerialized_fits_it_is_searched_again(decided):
    before, best = won("from an earlier run", AGAIN), won(LESS_MEMORY, AGAIN)
    found, asked = decided(before, best)
    assert found == (*best, SECOND)
    assert [solution for solution, _ in asked] == [FIRST, SECOND]
    assert decided(won("planned"))[0] == (*won("planned"), FIRST)
