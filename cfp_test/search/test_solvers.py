"""The solvers against the oracle, and the properties of the problem itself."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cfp.search.solver import Problem, leanest, solve
from cfp_test.search.drawn import MIB, NO_BUDGET, option, problems
from cfp_test.search.exhaustive import solve_exhaustively
from cfp_test.search.ilp import leanest as leanest_ilp
from cfp_test.search.ilp import solve_ilp


def check_solvers(problem):
    best = solve_exhaustively(problem)
    for solver in (solve_ilp, solve):
        found = solver(problem)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert problem.fits(found.picks)
            assert found.cost_ms == pytest.approx(best.cost_ms, rel=1e-6)


def one_segment(*options, fixed_bytes, budget_bytes):
    """A problem of one segment."""
    return Problem(
        kinds=(0,),
        options=(options,),
        edge_ms={},
        fixed_bytes=fixed_bytes * MIB,
        budget_bytes=budget_bytes * MIB,
    )


@settings(max_examples=100, deadline=None)
@given(problems())
@example(  # HiGHS gave the third, with variables for running sums of memory
    one_segment(
        option(1.0, 0, 0, 0),
        option(1.0, 1, 1, 0),
        option(2.0, 0, 1, 1),
        fixed_bytes=0,
        budget_bytes=3,
    )
)
@example(  # and none here
    one_segment(
        option(1.0, 0, 0, 0),
        option(1.0, 0, 1, 1),
        option(1.0, 1, 3, 0),
        fixed_bytes=5,
        budget_bytes=10,
    )
)
def test_solvers_agree_with_the_oracle(problem):
    check_solvers(problem)


@pytest.mark.nightly
@settings(max_examples=400, deadline=None)
@given(problems())
def test_solvers_agree_with_the_oracle_many_times(problem):
    check_solvers(problem)


def twins(problem, slower_ms):
    """Beside each option one that hands on alike, slower, and keeps nothing."""
    options = tuple(
        tuple(
            twin
            for one in several
            for twin in (
                one,
                replace(one, time_ms=one.time_ms + slower_ms, residual_bytes=0),
            )
        )
        for several in problem.options
    )

    def doubled(matrices):
        return {
            places: [[ms for ms in row for _ in "ab"] for row in matrix for _ in "ab"]
            for places, matrix in matrices.items()
        }

    edges, far = doubled(problem.edge_ms), doubled(problem.far_ms)
    return replace(problem, options=options, edge_ms=edges, far_ms=far)


@settings(max_examples=40, deadline=None)
@given(problems(budgets=st.integers(1, 60)), st.sampled_from([0.0, 0.5, 30.0]))
def test_solvers_agree_where_options_hand_on_alike(problem, slower_ms):
    """As with segments that rematerialize: what they keep still tells them apart."""
    double = twins(problem, slower_ms)
    found, other = solve_ilp(double), solve(double)
    assert (found is None) == (other is None)
    if found is not None and other is not None:
        assert double.fits(other.picks)
        assert other.cost_ms == pytest.approx(found.cost_ms, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(problems(), st.data())
def test_of_some_options_the_best_are_picked_under_their_own_numbers(problem, data):
    kept = [
        data.draw(st.lists(st.sampled_from(range(len(row))), min_size=1, unique=True))
        for row in problem.options
    ]
    some = problem.among(kept)
    best, found, lean = solve_exhaustively(some), solve(some), leanest(some)
    assert (found is None) == (best is None)
    for one in (found, lean):
        if one is not None:
            pairs = zip(problem.kinds, one.picks, strict=True)
            assert all(pick in kept[kind] for kind, pick in pairs)
            assert one.cost_ms == problem.cost_ms(one.picks)
            assert one.memory_bytes == problem.memory_bytes(one.picks)
    if found is not None and best is not None:
        assert found.cost_ms == pytest.approx(best.cost_ms)
    every = product(*(kept[kind] for kind in problem.kinds))
    assert lean.memory_bytes == min(map(problem.memory_bytes, every))


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(6, 40))
def test_solvers_agree_on_deep_programs(problem, depth):
    """Too many segments to try every choice."""
    kinds = [problem.kinds[i % len(problem.kinds)] for i in range(depth)]
    budget = problem.budget_bytes
    deep = replace(
        problem, kinds=tuple(kinds), budget_bytes=budget and budget * depth // 3
    )
    found, other = solve_ilp(deep), solve(deep)
    assert (found is None) == (other is None)
    if found is not None and other is not None:
        assert deep.fits(found.picks) and deep.fits(other.picks)
        assert found.cost_ms == pytest.approx(other.cost_ms, rel=1e-6)
    least = leanest_ilp(deep).memory_bytes  # To the solver's tolerances.
    assert leanest(deep).memory_bytes == pytest.approx(least, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(problems(budgets=NO_BUDGET))
def test_the_smallest_budget_is_feasible_and_no_smaller_one_is(problem):
    smallest = leanest(problem).memory_bytes

    def within(budget):
        return Problem(
            kinds=problem.kinds,
            options=problem.options,
            edge_ms=problem.edge_ms,
            fixed_bytes=problem.fixed_bytes,
            budget_bytes=budget,
        )

    assert solve_exhaustively(within(smallest)) is not None
    assert solve_exhaustively(within(smallest - 1)) is None


def test_the_cost_is_times_plus_edges():
    problem = Problem(
        kinds=(0, 1, 0),
        options=((option(1, 1, 2, 3), option(5, 1, 1, 1)), (option(7, 4, 5, 9),)),
        edge_ms={(0, 1): [[10.0], [20.0]], (1, 0): [[100.0, 200.0]]},
        fixed_bytes=MIB,
    )
    assert problem.cost_ms((0, 0, 1)) == 1 + 10 + 7 + 200 + 5
    # fixed 1, state 1 + 4 + 1; the second segment needs 9 beside residuals of 2 + 5
    assert problem.memory_bytes((0, 0, 1)) == (1 + 6 + 7 + 9) * MIB


def test_a_budget_changes_only_what_it_must():
    """Two equal segments: one of them may keep the fast and hungry option."""
    fast, slim = option(1, 0, 10, 0), option(3, 0, 2, 0)
    problem = Problem(
        kinds=(0, 0), options=((fast, slim),), edge_ms={}, budget_bytes=13 * MIB
    )
    found = solve_ilp(problem)
    assert found is not None
    assert sorted(found.picks) == [0, 1]
    assert found.cost_ms == 4
