"""The frontier of time and memory, against all choices there are."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfp.search.problem import Problem
from cfp.search.tradeoff import trade_off
from cfp_test.search.drawn import EXACT, MIB, NO_BUDGET, option, problems
from cfp_test.search.exhaustive import solve_exhaustively


def frontier(problem):
    """(memory, time) of every choice that no other beats, by trying all."""
    ranges = [range(len(problem.options[kind])) for kind in problem.kinds]
    found = {(problem.memory_bytes(p), problem.cost_ms(p)) for p in product(*ranges)}
    kept = []
    for memory, cost in sorted(found):
        if not kept or cost < kept[-1][1]:
            kept.append((memory, cost))
    return kept


@settings(max_examples=60, deadline=None)
@given(problems(budgets=NO_BUDGET, times=EXACT))
def test_the_frontier_is_that_of_all_choices(problem):
    found = trade_off(problem, most=1000)
    assert found.complete
    points = [(p.memory_bytes, p.cost_ms) for p in found.points]
    assert points == frontier(problem)
    for point in found.points:
        assert problem.memory_bytes(point.picks) == point.memory_bytes
        assert problem.cost_ms(point.picks) == point.cost_ms


@settings(max_examples=60, deadline=None)
@given(problems(times=EXACT), st.integers(2, 4))
def test_some_points_are_of_the_frontier_with_both_ends(problem, most):
    found = trade_off(problem, most)
    every = frontier(problem)
    points = [(p.memory_bytes, p.cost_ms) for p in found.points]
    assert len(points) == min(most, len(every))
    assert set(points) <= set(every)
    assert {points[0], points[-1]} == {every[0], every[-1]}
    assert not found.complete or points == every
    costs = [p.cost_ms for p in found.points]
    assert costs == sorted(costs, reverse=True)
    for point in found.points:
        within = replace(problem, budget_bytes=point.memory_bytes)
        assert within.fits(point.picks)
        below = solve_exhaustively(
            replace(problem, budget_bytes=point.memory_bytes - 1)
        )
        assert below is None or below.cost_ms > point.cost_ms


def test_points_are_spread_over_memory():
    """Sixteen equal segments, each fast and hungry or not."""
    fast, slim = option(1, 0, 10, 0), option(2, 0, 0, 0)
    problem = Problem(kinds=(0,) * 16, options=((fast, slim),), edge_ms={})
    found = trade_off(problem, 5)
    assert not found.complete
    gaps = [
        (b.memory_bytes - a.memory_bytes) // MIB
        for a, b in zip(found.points, found.points[1:], strict=False)
    ]
    assert gaps == [40, 40, 40, 40]
    assert trade_off(problem, 18).complete


def test_one_choice_is_a_frontier():
    problem = Problem(kinds=(0, 0), options=((option(3, 1, 2, 0),),), edge_ms={})
    (only,) = trade_off(problem).points
    assert (only.memory_bytes, only.cost_ms) == (6 * MIB, pytest.approx(6))
