"""The gain of each kind of choice, against a search over everything there is."""

import itertools

import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.layout import Storage
from cfp.analysis.presets import presets
from cfp.context import PlannerSettings, open_context
from cfp.models import build
from cfp.passes import analyze_step, profile, search
from cfp.program.step import flatten_step
from cfp.search.guided import Candidate
from cfp.view.evidence import worth
from cfp_test.models.tiny import TINY

SETTINGS = PlannerSettings(per_kind=2, kernels=("chunked",))


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A problem of a few options, and its analysis."""
    step, args = build("gpt", **{**TINY["gpt"], "layers": 2})
    mesh = cfp.described("4xh100")
    analyzed = analyze_step(flatten_step(step, args, {}), mesh, None)
    folder = tmp_path_factory.mktemp("store")
    with open_context(mesh, folder, None, SETTINGS) as context:
        profiles = profile(context, analyzed.analysis)
        found = search(context, analyzed.analysis, profiles)
    return analyzed.analysis, found.problem


def of_data_parallel(analysis):
    plain = presets(analysis.frame)["data_parallel"].blocks
    return {
        (segment.kind, tuple(plain[b] for b in segment.blocks))
        for segment in analysis.segments
    }


def brute_force(problem, may):
    """The least cost of all picks of options that may be."""
    allowed = [
        [i for i, one in enumerate(problem.options[kind]) if may(kind, one.candidate)]
        for kind in problem.kinds
    ]
    every = (p for p in itertools.product(*allowed) if problem.fits(p))
    return min(map(problem.cost_ms, every), default=None)


def test_predicted_gains_are_those_of_trying_everything(searched):
    analysis, problem = searched
    plain = of_data_parallel(analysis)
    without = {
        "sharding": lambda kind, one: (kind, one.strategies) in plain,
        "storage": lambda _, one: one.storage is Storage.USED,
        "kernels": lambda _, one: not one.kernels,
    }
    # Alike segments at both ends of a stack are what makes a step deep: few are enough.
    found = {one.name: one for one in worth(analysis, problem)}
    assert {*found} >= {*without}
    best = brute_force(problem, lambda *_: True)
    for name, may in without.items():
        assert found[name].with_ms == pytest.approx(best)
        assert found[name].without_ms == pytest.approx(brute_force(problem, may))
        assert not found[name].is_measured
        assert found[name].without_ms >= best - 1e-9


def test_what_raced_with_and_without_is_measured(searched):
    analysis, problem = searched
    known = presets(analysis.frame)
    tensor = Candidate("tensor_parallel", known["tensor_parallel"])
    raced = [
        (Candidate("data_parallel", known["data_parallel"]), 10.0),
        (Candidate("fully_sharded", known["fully_sharded"]), 9.0),
        (tensor, 8.0),
        (Candidate("other", tensor.choice, options={"xla_a": "1"}), 7.0),
    ]
    found = {one.name: one for one in worth(analysis, problem, raced)}
    measured = {
        name: (one.with_ms, one.without_ms)
        for name, one in found.items()
        if one.is_measured
    }
    assert measured == {
        "sharding": (7.0, 9.0),
        "storage": (7.0, 7.0),
        "compiler options": (7.0, 8.0),
    }
    assert not found["kernels"].is_measured


def step(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def test_a_plan_says_what_it_chose_among_if_that_is_not_all(tmp_path):
    args = ({"a": jnp.ones((64, 128)), "b": jnp.ones((128, 64))}, jnp.ones((64, 64)))
    mesh = cfp.described("4xh100")

    def said(**choose):
        return repr(cfp.plan(step, *args, mesh=mesh, cache_dir=tmp_path, **choose))

    assert "chosen among sharding, storage alone" in said(
        choose=("storage", "sharding")
    )
    assert "alone" not in said()
