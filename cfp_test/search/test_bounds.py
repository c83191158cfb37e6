"""Lower bounds of a choice's cost, against all choices there are."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cfp.search.solver import Chain, Problem
from cfp_test.search.drawn import MIB, option, problems
from cfp_test.search.exhaustive import solve_exhaustively


@settings(max_examples=150, deadline=None)
@given(problems(), st.floats(0.0, 10.0))
def test_no_choice_costs_less_at_any_price(problem, per_mib):
    best = solve_exhaustively(problem)
    assume(best is not None)
    chain = Chain(problem)
    for price in (chain.best_price(), per_mib / MIB):
        assert chain.least_ms(price) <= best.cost_ms * (1 + 1e-9)


def test_the_price_bounds_better_than_no_price():
    """Ten segments of which five may be fast: the bound is exact."""
    fast, slim = option(1, 0, 10, 0), option(3, 0, 0, 0)
    problem = Problem(
        kinds=(0,) * 10, options=((fast, slim),), edge_ms={}, budget_bytes=50 * MIB
    )
    chain = Chain(problem)
    assert chain.best_price() * MIB == pytest.approx(0.2)
    assert chain.least_ms(chain.best_price()) == pytest.approx(20)
    assert chain.least_ms(0.0) == 10
    assert Chain(replace(problem, budget_bytes=None)).best_price() == 0


def test_a_price_is_found_where_nothing_fits():
    options = option(1, 9, 0, 0), option(3, 5, 0, 0)
    problem = Problem(kinds=(0,), options=(options,), edge_ms={}, budget_bytes=MIB)
    assert Chain(problem).best_price() * MIB == pytest.approx(2 / 4)
