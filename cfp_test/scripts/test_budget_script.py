"""Conclusions that the script that sweeps memory budgets draws from measurements."""

import itertools
import math

import pytest

from cfp_test.scripts.budgets import largest_rise, report, spread, verdict


def test_budgets_reach_beyond_both_ends_evenly():
    found = spread(1000, 2000, 14)
    assert (found[0], found[-1]) == (850, 2200)
    steps = {b - a for a, b in itertools.pairwise(found)}
    assert max(steps) - min(steps) <= 1
    # The prediction of the smallest may be above what the fastest needs.
    assert spread(2000, 1000, 14) == found


@pytest.mark.parametrize(
    ("times", "rise"),
    [
        ([(1, 10.0), (2, 9.0), (3, 9.0)], 0.0),
        ([(1, 10.0), (2, 8.0), (3, 9.0)], 0.125),
        # Against the fastest of all smaller budgets, not against the one before.
        ([(1, 8.0), (2, 9.0), (3, 10.0)], 0.25),
        ([(3, 8.0), (1, 10.0), (2, 9.0)], 0.0),
        ([], 0.0),
    ],
)
def test_a_rise_is_from_any_budget_to_a_larger_one(times, rise):
    assert math.isclose(largest_rise(times), rise)


def fitting(budget, plan, peak, ms, what="budget"):
    return {
        "what": what,
        "budget_bytes": budget,
        "feasible": True,
        "plan": plan,
        "winner": "planned",
        "peak_bytes": peak,
        "measured_ms": ms,
    }


def refused(budget, least, what="budget"):
    return {
        "what": what,
        "budget_bytes": budget,
        "feasible": False,
        "least_bytes": least,
    }


def used(plan, budget, *peaks):
    return {
        "what": "measured",
        "plan": plan,
        "budget_bytes": budget,
        "peaks_bytes": list(peaks) or None,
        "time_ms": 1.0,
    }


ROWS = [
    fitting(None, "c", 380, 5.0, "free"),
    refused(50, 100),
    fitting(100, "a", 100, 10.0, "smallest"),
    fitting(200, "b", 150, 9.0),
    fitting(300, "b", 150, 9.9),
    {"what": "raced", "plan": "a", "time_ms": 10.0},
    {"what": "raced", "plan": "b", "time_ms": 9.0},
    used("a", 100, 80, 90),
    used("b", 200, 160, 140),
    used("c", None, 500, 500),
]


def claims(rows):
    """Its last line, by what each is about, and the word that it begins with."""
    return [line.split()[0] for line in report(rows).splitlines()[-5:]]


def test_what_holds_is_shown_with_the_worst_case():
    found = verdict(ROWS)
    assert (found["feasible"], found["infeasible"], found["distinct_plans"]) == (
        3,
        1,
        2,
    )
    assert found["compiled_share"] == 1.0
    assert found["used_share"] == 0.9  # No budget has no share.
    assert math.isclose(found["rise_own_races"], 0.1)
    assert found["rise_one_race"] == 0.0
    assert found["smallest_infeasible"] == found["smallest_untried"] == []
    assert claims(ROWS) == ["holds", "holds", "FAILS", "holds", "holds"]


@pytest.mark.parametrize(
    ("more", "place"),
    [
        (fitting(400, "d", 401, 8.0), 0),
        (used("d", 400, 390, 401), 1),
        (refused(60, 110), 4),
    ],
)
def test_what_does_not_hold_is_named(more, place):
    untried = "least_bytes" in more
    assert claims([*ROWS, more])[place] == ("unknown" if untried else "FAILS")


def test_a_smallest_budget_that_is_refused_fails():
    rows = [*ROWS, refused(60, 110), refused(110, 100, "smallest")]
    assert verdict(rows)["smallest_infeasible"] == [110]
    assert claims(rows)[4] == "FAILS"


def test_virtual_devices_tell_no_high_water_mark():
    rows = [used(r["plan"], 1) if r["what"] == "measured" else r for r in ROWS]
    assert verdict(rows)["used_share"] is None
    assert claims(rows)[1] == "unknown"
