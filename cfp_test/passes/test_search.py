"""Presets that are measured and race, and the search after what was compiled."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cfp.analysis.presets import presets
from cfp.cost.costs import Costs
from cfp.passes import _smallest, search_as_compiled
from cfp.profiling.record import CompiledBytes
from cfp.race.programs import LESS_MEMORY
from cfp.search.choices import picks_of, whole_choice
from cfp.search.guided import (
    Candidate,
    Prediction,
    Solution,
    build_problem,
    estimate_options,
    prediction_of,
)
from cfp.search.solver import scale_memory, solve
from cfp.settings import (
    ALL_DIMENSIONS,
    ConstraintLevel,
    Replacing,
)
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
    return analysis, named, build_problem(costs, options.problem.options, None)


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


@pytest.mark.parametrize("factor", [1.2, 1.5])
def test_a_search_as_compiled_finds_the_fastest_that_fits_then(
    found, monkeypatch, factor
):
    """All candidates need more than predicted by as much, and none fits."""
    analysis, named, free = found
    best = solve(free)
    assert best is not None
    problem = replace(free, budget_bytes=best.memory_bytes)
    first = Candidate("planned", whole_choice(analysis, problem, best))

    def needed(candidate, problem=problem):
        size = prediction_of(analysis, problem, candidate.choice).size
        rest = round(factor * size.temp_bytes)
        return CompiledBytes(argument_bytes=size.argument_bytes, temp_bytes=rest)

    every = [Candidate(n, c, is_preset=True) for n, c in named.items()]
    large = [c for c in every if needed(c).peak_bytes > best.memory_bytes]
    solution = Solution(
        [first, *large],
        problem=problem,
        rates=rates_of(SQUARE),
        named={one.name: one.choice for one in large},
    )
    monkeypatch.setattr(
        "cfp.passes.compiled_before",
        lambda _, programs: {
            one.candidate.key: needed(one.candidate) for one in programs
        },
    )
    context: Any = SimpleNamespace(
        settings=SimpleNamespace(dimensions=ALL_DIMENSIONS),
        defaults=SimpleNamespace(estimates=False, levels=(ConstraintLevel.EVERYTHING,)),
        environment=(),
        usual_temp_share=1.0,
    )
    again = search_as_compiled(context, analysis, solution)
    assert again is not None and again.problem is not None
    new = again.candidates[0]
    assert new.name == "planned, less memory 1"
    scaled = scale_memory(again.problem, factor)
    fastest = solve(scaled)
    assert fastest is not None
    assert new.predicted_ms == pytest.approx(fastest.cost_ms)
    assert needed(new, again.problem).peak_bytes <= problem.budget_bytes
    assert needed(first).peak_bytes > problem.budget_bytes
    assert [*again.candidates[-len(solution.candidates) :]] == solution.candidates
    # Presets that do not fit come with segments rematerialized, if they fit then.
    more = again.candidates[1 : -len(solution.candidates)]
    for one in more:
        fitted = needed(one, again.problem).peak_bytes <= problem.budget_bytes
        assert fitted and one.is_preset and one.choice.remat


def test_the_last_resort_is_named_like_no_candidate(found, monkeypatch):
    """There was no time to compile what the search as compiled has found."""
    analysis, _, free = found
    best = solve(free)
    assert best is not None
    problem = replace(free, budget_bytes=best.memory_bytes)
    choice = whole_choice(analysis, problem, best)
    names = ["planned", f"{LESS_MEMORY} 1", f"{LESS_MEMORY} 2"]
    solution = Solution([Candidate(n, choice) for n in names], problem=problem)
    monkeypatch.setattr(
        "cfp.passes.compiled_before",
        lambda _, programs: {
            programs[0].candidate.key: CompiledBytes(temp_bytes=best.memory_bytes)
        },
    )
    rules = SimpleNamespace(levels=(ConstraintLevel.EVERYTHING,))
    context: Any = SimpleNamespace(defaults=rules, environment=(), usual_temp_share=1.0)
    smallest = _smallest(context, analysis, solution, [])
    assert smallest is not None
    first, *_ = smallest.candidates
    assert first.name == "planned, less memory 3"
    assert first.choice == choice


def test_where_nothing_fits_the_smallest_is_tried_with_less_memory(monkeypatch):
    """A tighter budget would find that program, and name it as the smallest."""
    analysis, estimates = estimated(*PROGRAMS["conditioned_layers"]()[:2], SQUARE)
    choice = presets(analysis.frame)["zero1"]
    problem = estimate_options(
        estimates,
        {"zero1": choice},
        Costs(analysis, rates_of(SQUARE)),
        per_kind=2,
        budget_bytes=1000,
        replacing=Replacing(),
    ).problem
    assert problem is not None
    monkeypatch.setattr("cfp.passes.compiled_before", lambda *_: {})
    first = Candidate("zero1", choice)
    done: Any = SimpleNamespace(
        candidate=first, name="zero1, no limit", skipped="", peak_bytes=9
    )
    context: Any = SimpleNamespace(environment=())
    solution = Solution([first], problem=problem)
    smallest = _smallest(context, analysis, solution, [done])
    assert smallest is not None
    *_, last = smallest.candidates
    assert last.name == "zero1, leanest" and last.choice.remat
    assert (last.choice.blocks, last.choice.storage) == (choice.blocks, choice.storage)
    # Presets that are smaller by prediction come last, with the least constraints.
    done.peak_bytes = 2**40
    smallest = _smallest(
        context, analysis, replace(solution, named={"zero1": choice}), [done]
    )
    assert smallest is not None
    *_, last = smallest.candidates
    assert (last.choice, last.level) == (choice, ConstraintLevel.ARGUMENTS)
