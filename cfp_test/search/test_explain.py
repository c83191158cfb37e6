"""Costs of other choices, against all choices there are."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cfp.search.explain import explain
from cfp.search.problem import Problem
from cfp_test.search.drawn import BUDGETS, EXACT, MIB, NO_BUDGET, option, problems
from cfp_test.search.exhaustive import solve_exhaustively


def choices(problem):
    ranges = [range(len(problem.options[kind])) for kind in problem.kinds]
    return list(product(*ranges))


def forced(problem, kind, pick):
    """(time, memory) of the best choice whose segments of a kind all take an option.

    The time is None where nothing fits; the memory is the least that would do then.
    """
    those = [
        picks
        for picks in choices(problem)
        if all(
            k != kind or p == pick for k, p in zip(problem.kinds, picks, strict=True)
        )
    ]
    fitting = [problem.cost_ms(picks) for picks in those if problem.fits(picks)]
    if fitting:
        return min(fitting), None
    return None, min(map(problem.memory_bytes, those))


def check(problem, kind, alternative):
    cost, memory = forced(problem, kind, alternative.option)
    assert alternative.cost_ms == cost
    if cost is None:
        assert alternative.memory_bytes == memory
    else:
        assert problem.budget_bytes is None or (
            alternative.memory_bytes <= problem.budget_bytes
        )


@settings(max_examples=40, deadline=None)
@given(problems(times=EXACT), st.integers(1, 3))
def test_alternatives_cost_what_trying_all_says(problem, count):
    best = solve_exhaustively(problem)
    assume(best is not None)
    found = explain(problem, count=count)
    assert found.plan is None
    assert found.best.cost_ms == best.cost_ms
    for kind, item in enumerate(found.kinds):
        assert item.kind == kind
        assert sum(a.taken for a in item.chosen) == problem.kinds.count(kind)
        chosen = {a.option for a in item.chosen}
        listed = (*item.runners_up, *item.too_large)
        for alternative in (*item.chosen, *listed):
            check(problem, kind, alternative)
        assert all(a.cost_ms is not None for a in item.runners_up)
        assert all(a.cost_ms is None for a in item.too_large)
        others = [i for i in range(len(problem.options[kind])) if i not in chosen]
        costs = sorted(
            cost for i in others if (cost := forced(problem, kind, i)[0]) is not None
        )
        assert [a.cost_ms for a in item.runners_up] == costs[:count]
        assert len(listed) + item.others == len(others)
        last = costs[count - 1] if len(costs) >= count else float("inf")
        unlimited = replace(problem, budget_bytes=None)
        free = {i: forced(unlimited, kind, i)[0] for i in others}
        large = [i for i in others if forced(problem, kind, i)[0] is None]
        faster = sorted(free[i] for i in large if free[i] < last)
        assert [a.unlimited_ms for a in item.too_large] == faster[:count]


@settings(max_examples=25, deadline=None)
@given(problems(budgets=BUDGETS, times=EXACT), st.integers(1, 30))
def test_memory_binds_where_more_would_be_faster(problem, step):
    best = solve_exhaustively(problem)
    assume(best is not None)
    memory = explain(problem, step_bytes=step * MIB).memory

    def least(budget):
        costs = [
            problem.cost_ms(picks)
            for picks in choices(problem)
            if budget is None or problem.memory_bytes(picks) <= budget
        ]
        return min(costs, default=None)

    budget = problem.budget_bytes
    assert memory.unlimited.cost_ms == least(None)
    assert memory.binds == (least(None) < best.cost_ms)
    assert memory.more.cost_ms == least(budget and budget + step * MIB)
    below = least((memory.peak_bytes if budget is None else budget) - step * MIB)
    assert (memory.less.cost_ms if memory.less else None) == below


@settings(max_examples=20, deadline=None)
@given(problems(budgets=NO_BUDGET, times=EXACT), st.randoms())
def test_a_plan_that_is_not_the_best_is_explained_too(problem, random):
    picks = random.choice(choices(problem))
    found = explain(problem, picks)
    assert found.plan.cost_ms == problem.cost_ms(picks)
    for item in found.kinds:
        mine = [p for k, p in zip(problem.kinds, picks, strict=True) if k == item.kind]
        assert {a.option: a.taken for a in item.chosen} == {
            p: mine.count(p) for p in mine
        }
        for alternative in item.chosen:
            check(problem, item.kind, alternative)


@settings(max_examples=50, deadline=None)
@given(problems(times=EXACT), st.randoms(use_true_random=False))
def test_where_nothing_fits_the_budget_is_what_the_plan_needs(problem, random):
    """Only the compiler made it fit: by prediction it needs more."""
    every = choices(problem)
    least = min(map(problem.memory_bytes, every))
    tight = replace(problem, budget_bytes=least - 1)
    picks = random.choice(every)
    needed = problem.memory_bytes(picks)
    assert explain(tight, picks) == explain(replace(tight, budget_bytes=needed), picks)
    assert explain(tight) == explain(replace(tight, budget_bytes=least))


def test_what_does_not_fit_says_what_it_needs():
    """The fast option fits once only; a slow one never costs the most room."""
    fast, slim, slow = option(1, 0, 10, 0), option(3, 0, 2, 0), option(9, 0, 1, 0)
    problem = Problem(
        kinds=(0, 0),
        options=((fast, slim, slow),),
        edge_ms={},
        budget_bytes=13 * MIB,
    )
    found = explain(problem, picks=[1, 1], step_bytes=7 * MIB)
    (kind,) = found.kinds
    assert [(a.option, a.taken, a.cost_ms) for a in kind.chosen] == [(1, 2, 6)]
    assert [(a.option, a.memory_bytes) for a in kind.too_large] == [(0, 20 * MIB)]
    assert [(a.option, a.cost_ms) for a in kind.runners_up] == [(2, 18)]
    assert found.best.cost_ms == 4
    assert found.memory.binds
    assert found.memory.more.cost_ms == pytest.approx(2)
    assert found.memory.less.cost_ms == pytest.approx(6)
