"""Ties: differences of 1 %, which no race tells apart."""

import pytest

from cfp.analysis.layout import Choice
from cfp.profiling.record import ProfileRecord
from cfp.race.turns import Ranking
from cfp.search.guided import Candidate
from cfp.settings import ConstraintLevel
from cfp_test.race.results import result_of


def entrant(name, samples, options=(), fits=True, level=ConstraintLevel.EVERYTHING):
    record = ProfileRecord(key=name, parts=(), status="ok", samples_ms=tuple(samples))
    is_preset = name != "planned"
    one = Candidate(name, Choice((), ()), None, level, dict(options), is_preset)
    return result_of(one, record, fits=fits)


@pytest.mark.parametrize(
    ("others", "winner"),
    [
        ([("data_parallel", (38.1, 38.3, 38.9, 38.5), ())], "data_parallel"),
        (
            [
                ("data_parallel, fast", (38.1, 38.2, 38.8, 38.3), {"o": "1"}),
                ("zero1", (38.1, 38.3, 38.9, 38.5), ()),
            ],
            "zero1",
        ),
        ([("data_parallel", (39.1, 39.3, 39.9, 39.5), ())], "planned"),
    ],
)
def test_the_simplest_of_ties_wins(others, winner):
    planned = entrant("planned", (38.0, 38.2, 38.9, 38.4))
    contest = [planned, *(entrant(*other) for other in others)]
    assert Ranking((), contest).best.name == winner
    assert Ranking(contest, [entrant("zero1", (1.0, 1.0))]).best.name == winner


def test_what_was_timed_for_a_larger_budget_ties_with_nothing():
    planned = entrant("planned", (38.0, 38.2, 38.9, 38.4))
    too_large = entrant("data_parallel", (38.1, 38.3, 38.9, 38.5), fits=False)
    assert Ranking((), [planned, too_large]).ties == [planned]


def test_one_per_cent_is_a_tie_of_two_samples_and_what_is_constrained_less_wins():
    bare = ConstraintLevel.ARGUMENTS
    slow = entrant("data_parallel", (38.3, 38.3), level=bare)
    contest = [
        entrant("planned", (38.0, 38.0)),
        entrant("data_parallel, everywhere", (38.1, 38.1)),
        slow,
    ]
    assert Ranking((), contest).best == slow
    # With a sample each nothing is a tie.
    ones = [entrant("planned", (38.0,)), entrant("data_parallel", (38.1,))]
    assert Ranking((), ones).best.name == "planned"
    assert Ranking((), ones).ties == ones[:1]
