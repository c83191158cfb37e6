"""Presets that race where choices are made by estimates."""

from dataclasses import replace

import pytest

from cfp.cost.costs import Costs
from cfp.passes.search import _fastest
from cfp.presets.presets import presets
from cfp.search.choices import picks_of
from cfp.search.expected import build_problem, estimate_options
from cfp.settings import PRESETS_BY_ESTIMATE, Replacing
from cfp.solution import Prediction, prediction_of
from cfp_test.programs.registry import PROGRAMS
from cfp_test.search.made_up import estimated, rates_of

SQUARE = (("x", 2), ("y", 2))


@pytest.fixture(scope="module")
def found():
    """A perceptron's analysis, its presets, and the problem without a budget."""
    analysis, estimates = estimated(*PROGRAMS["mlp"]()[:2], SQUARE)
    named = presets(analysis.frame)
    costs = Costs(analysis, rates_of(SQUARE))
    given = {"per_kind": 2, "budget_bytes": None, "replacing": Replacing()}
    options = estimate_options(estimates, named, costs, **given)
    return analysis, named, build_problem(costs, options.estimated, None)


def test_presets_that_fit_race_before_faster_ones_that_do_not(found):
    analysis, named, problem = found
    known = {n: prediction_of(analysis, problem, c) for n, c in named.items()}
    needs = {name: one.peak_bytes or 0 for name, one in known.items()}
    times = {name: one.time_ms or 0.0 for name, one in known.items()}
    free = _fastest(analysis, named, problem)
    assert len(free) == PRESETS_BY_ESTIMATE
    assert sorted(times[n] for n in free) == sorted(times.values())[:2]
    budget = max(needs[name] for name in free) - 1
    small = [name for name in named if needs[name] <= budget]
    assert len(small) >= PRESETS_BY_ESTIMATE
    tight = _fastest(analysis, named, replace(problem, budget_bytes=budget))
    assert tight.keys() <= {*small}
    assert sorted(times[n] for n in tight) == sorted(times[n] for n in small)[:2]


def test_of_equally_fast_presets_the_smaller_ones_race_within_a_budget(found):
    analysis, named, problem = found
    plenty = replace(problem, budget_bytes=2**40)
    flat = tuple(
        tuple(replace(option, time_ms=1.0) for option in options)
        for options in plenty.options
    )
    plenty = replace(plenty, options=flat, edge_ms={}, far_ms={})
    known = {n: prediction_of(analysis, plenty, c) for n, c in named.items()}
    needs = {name: one.peak_bytes or 0 for name, one in known.items()}
    kept = _fastest(analysis, named, plenty)
    assert sorted(needs[n] for n in kept) == sorted(needs.values())[:2]


def test_a_prediction_has_time_and_memory_or_nothing(found):
    analysis, named, problem = found
    for choice in named.values():
        picks = picks_of(analysis, problem, choice)
        assert picks is not None
        known = prediction_of(analysis, problem, choice)
        assert known.time_ms == problem.cost_ms(picks)
        assert known.peak_bytes == problem.memory_bytes(picks)
        assert known.size is not None
        held = problem.fixed_bytes + problem.state_bytes(picks)
        assert known.size.argument_bytes == held
    again = replace(choice, remat=(0,))
    for nothing in (None, problem):
        unknown = prediction_of(analysis, nothing, again)
        assert unknown == Prediction() and unknown.peak_bytes is None
