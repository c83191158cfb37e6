"""What a choice costs at least, against all choices there are."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cfp.search.bounds import least_cost_ms, memory_price
from cfp.search.problem import Problem
from cfp_test.search.drawn import MIB, option, problems
from cfp_test.search.exhaustive import solve_exhaustively


@settings(max_examples=150, deadline=None)
@given(problems(), st.floats(0.0, 10.0))
def test_no_choice_costs_less_at_any_price(problem, per_mib):
    best = solve_exhaustively(problem)
    assume(best is not None)
    for price in (memory_price(problem), per_mib / MIB):
        assert least_cost_ms(problem, price) <= best.cost_ms * (1 + 1e-9)


def test_the_price_bounds_better_than_no_price():
    """Ten segments of which five may be fast: the bound is exact."""
    fast, slim = option(1, 0, 10, 0), option(3, 0, 0, 0)
    problem = Problem(
        kinds=(0,) * 10, options=((fast, slim),), edge_ms={}, budget_bytes=50 * MIB
    )
    price = memory_price(problem)
    assert price * MIB == pytest.approx(0.2, rel=1e-4)
    assert least_cost_ms(problem, price) == pytest.approx(20, rel=1e-4)
    assert least_cost_ms(problem, 0.0) == 10
    assert memory_price(replace(problem, budget_bytes=None)) == 0


def test_a_price_is_found_where_nothing_fits():
    problem = Problem(
        kinds=(0,), options=((option(1, 9, 0, 0),),), edge_ms={}, budget_bytes=MIB
    )
    assert memory_price(problem) > 0
