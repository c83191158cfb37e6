"""The shortlists: of a segment's choices, and of the presets."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from cfp import models
from cfp.analysis.layout import Storage
from cfp.analysis.presets import PRESETS, presets
from cfp.analysis.storage import USUAL_STORAGE
from cfp.cost.costs import Costs, SegmentChoice, segment_candidate
from cfp.search.choices import (
    leading_presets,
    picks_of,
    ranked_candidates,
    whole_choice,
)
from cfp.search.guided import build_problem, estimate_options
from cfp.settings import Replacing
from cfp_test.models.tiny import TINY
from cfp_test.programs.registry import PROGRAMS
from cfp_test.search.made_up import estimated, rates_of
from cfp_test.support.covering import at_night


@pytest.fixture(
    scope="module",
    params=[((("x", 4),), set()), ((("x", 2), ("y", 2)), {"x"})],
    ids=["one host", "two hosts"],
)
def small(request):
    """A perceptron, whose choices can all be looked at, with its estimates."""
    return estimated(*PROGRAMS["mlp"]()[:2], *request.param)


@pytest.mark.parametrize("mode", USUAL_STORAGE)
def test_beam_search_finds_the_cheapest(small, mode, monkeypatch):
    analysis, estimates = small
    for estimate in estimates:
        if mode is Storage.INNER and not analysis.frame.outer:
            assert mode not in estimate.node_ms
            continue
        every = [
            estimate.total_ms(SegmentChoice(picks, mode))
            for picks in itertools.product(*estimate.strategies)
        ]
        monkeypatch.setattr("cfp.search.choices.BEAM_WIDTH", len(every))
        found = [c for c in ranked_candidates(estimate, 5) if c.storage is mode]
        if not estimate.segment.groups and mode is not Storage.USED:
            assert not found  # There is nothing to store.
            continue
        assert np.allclose([c.estimate_ms for c in found], sorted(every)[:5])
        for candidate in found:
            assert np.isclose(estimate.total_ms(candidate), candidate.estimate_ms)


@pytest.fixture(scope="module")
def gpt():
    """A model on a mesh of two axes, with its estimates."""
    return estimated(*models.build("gpt", **TINY["gpt"]), (("x", 2), ("y", 2)))


@pytest.mark.parametrize("reach", [1.3, *at_night([1.0, 2.0])])
def test_presets_far_behind_by_estimate_are_not_measured(gpt, reach):
    analysis, estimates = gpt
    every = leading_presets(analysis, estimates, presets(analysis.frame))
    found = leading_presets(analysis, estimates, every, reach)
    kinds = [segment.kind for segment in analysis.segments]
    total_ms = {
        name: sum(
            kinds.count(kind)
            * estimates[kind].total_ms(segment_candidate(analysis, index, choice))
            for kind, index in enumerate(analysis.representatives)
        )
        for name, choice in every.items()
    }
    limit_ms = reach * min(total_ms.values())
    assert found == {n: c for n, c in every.items() if total_ms[n] <= limit_ms}
    assert 0 < len(found) < len(every)


@pytest.mark.parametrize("reach", [1.6, float("inf")])
def test_where_nothing_takes_any_time_no_preset_is_far_behind(reach):
    analysis, estimates = estimated(lambda x: x, (np.ones((8, 8)),), (("x", 2),))
    every = presets(analysis.frame)
    assert len(every) > 1
    assert leading_presets(analysis, estimates, every, reach) == every


def test_of_equal_presets_the_first_are_measured_whatever_the_hashes(gpt):
    analysis, estimates = gpt
    alike = presets(analysis.frame)["data_parallel"]
    for names in (every := [f"x=alike{n}" for n in range(20)]), every[::-1]:
        found = leading_presets(analysis, estimates, dict.fromkeys(names, alike))
        assert [*found] == names[:6]


def test_few_of_many_presets_are_measured():
    sizes = (("x", 2), ("y", 2), ("z", 2))
    analysis, estimates = estimated(*PROGRAMS["mlp"]()[:2], sizes)
    every = presets(analysis.frame)
    chosen = leading_presets(analysis, estimates, every)
    assert len(every) > 40
    assert len(chosen) <= len(PRESETS) + 6
    assert set(chosen) >= set(every) & set(PRESETS)
    left_out = set(every) - set(chosen)

    def total(name):
        return sum(
            [s.kind for s in analysis.segments].count(kind)
            * estimates[kind].total_ms(segment_candidate(analysis, index, every[name]))
            for kind, index in enumerate(analysis.representatives)
        )

    mixed = [total(name) for name in chosen if name not in PRESETS]
    assert max(mixed) <= min(total(name) for name in left_out)


def test_a_choice_is_one_option_of_each_segment_and_the_options_are_the_choice(small):
    analysis, estimates = small
    named, rates = presets(analysis.frame), rates_of(analysis.frame.mesh)
    costs = Costs(analysis, rates)
    found = estimate_options(
        estimates, named, costs, per_kind=2, budget_bytes=None, replacing=Replacing()
    )
    problem = build_problem(costs, found.problem.options, None)
    for choice in named.values():
        picks = picks_of(analysis, problem, choice)
        assert picks is not None
        assert whole_choice(analysis, problem, problem.solution(picks)) == choice
    assert picks_of(analysis, problem, replace(choice, remat=(0,))) is None
