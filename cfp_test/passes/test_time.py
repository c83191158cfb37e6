"""A share of a budget of time is left for the race."""

import math
from types import SimpleNamespace

import pytest

from cfp.context import open_context
from cfp.passes import profile as room
from cfp.planner_settings import PlannerSettings
from cfp.profiling.rates import Rates
from cfp.search.requests import Profiles
from cfp.settings import MEASURED_SHARE
from cfp_test.support.checking import make_mesh


@pytest.fixture
def end_of_measuring(monkeypatch, tmp_path):
    """Finds the end of measuring, which begins 10 s after planning did, at 100 s."""
    ends = []

    def profile_segments(*where, end, **how):
        ends.append(end)
        known = {"presets": {}, "rates": Rates.default(mesh), "memory_bound": False}
        measurer = SimpleNamespace(known=set(), interrupted=False, has_end=True)
        return Profiles(rounds=(), **known), measurer

    mesh = make_mesh((("x", 2),))
    now = [100.0]
    monkeypatch.setattr(room, "profile_segments", profile_segments)
    monkeypatch.setattr(room, "measured_rates", lambda _: None)
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr("cfp.context.time", clock)
    monkeypatch.setattr(room, "time", clock)

    def of(budget_bytes=None, races=True, **settings):
        now[0] = 100.0
        how = PlannerSettings(measure=True, **settings)
        with open_context(mesh, tmp_path, budget_bytes, how) as context:
            now[0] = 110.0
            found = room.profile(context, SimpleNamespace(), races=races)
        assert "strategies_unmeasured" not in found.counts
        return ends.pop()

    return of


def test_where_a_race_follows_it_has_a_share_of_the_time_that_is_left(
    end_of_measuring,
):
    assert end_of_measuring(seconds=50) == pytest.approx(110 + MEASURED_SHARE * 40)
    with_memory = end_of_measuring(2**30, seconds=50)
    assert with_memory == pytest.approx(110 + MEASURED_SHARE * 40)


def test_when_time_is_over_none_is_left_for_measuring(end_of_measuring):
    assert end_of_measuring(seconds=5) < 110


def test_without_a_race_measuring_has_all_of_the_time(end_of_measuring):
    assert end_of_measuring(seconds=50, race=False) == 150
    assert end_of_measuring(seconds=50, races=False) == 150


def test_without_a_budget_of_time_nothing_ends(end_of_measuring):
    assert end_of_measuring() == math.inf
