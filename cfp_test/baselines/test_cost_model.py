"""The cost model against brute force, and its prices against what they are made of."""

import itertools

import numpy as np
import pytest

from alpa_test.cost_model import LINKS, AlphaBeta, choose, fit, formulate
from alpa_test.cost_model.communication import Link, sent_share
from alpa_test.cost_model.formulation import MODES
from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.analysis.strategies import NONE
from cfp.errors import CfpError
from cfp.models import build
from cfp.profiling.collectives import KINDS, Rates
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.models.tiny import TINY
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

ONE_AXIS = (("x", 4),)
TWO_AXES = (("x", 2), ("y", 2))
LINK = Link(alpha_ms=0.001, beta_ms_per_byte=1e-6)


def analysed(fn, args, sizes):
    program, _ = trace(flatten_step(fn, args, {}), make_mesh(sizes))
    return analyze(program, sizes)


@pytest.fixture(scope="module", params=[ONE_AXIS, TWO_AXES], ids=["x4", "x2y2"])
def small(request):
    """A perceptron of two layers: all of its choices can be looked at."""
    sizes = request.param
    return analysed(*PROGRAMS["mlp"]()[:2], sizes), AlphaBeta.uniform(sizes, LINK)


def every_choice(problem):
    options = [
        list(itertools.product(range(len(strategies)), range(len(MODES))))
        for strategies in problem.strategies
    ]
    return itertools.product(*options)


@pytest.mark.parametrize("share", [None, 0.0, 0.3, 0.8])
def test_choice_is_that_of_brute_force(small, share):
    """With no budget, and with budgets from the smallest need up."""
    analysis, prices = small
    problem = formulate(analysis, prices)
    assert len(problem.strategies) == 2
    budget = None
    if share is not None:
        needs = [problem.memory_bytes(picks) for picks in every_choice(problem)]
        budget = int(min(needs) + share * (max(needs) - min(needs)))
    best = min(
        problem.cost_ms(picks)
        for picks in every_choice(problem)
        if budget is None or problem.memory_bytes(picks) <= budget
    )
    found = choose(analysis, prices, budget_bytes=budget)
    assert found.optimal
    assert found.cost_ms == pytest.approx(best, rel=1e-6)
    assert found.formulation.believed_ms(found.choice) == pytest.approx(best)
    if budget is not None:
        assert found.memory_bytes <= budget


def test_memory_that_is_too_small_is_an_error(small):
    analysis, prices = small
    with pytest.raises(CfpError, match="found no choice"):
        choose(analysis, prices, budget_bytes=1000)


def test_heavy_ops_are_never_replicated(small):
    analysis, prices = small
    for options in formulate(analysis, prices).strategies:
        assert options
        assert all(axis.inner != NONE for s in options for axis in s)


@pytest.mark.parametrize("model", ["gpt", *at_night(["moe"])])
def test_no_preset_is_cheaper_by_the_model(model):
    step, args = build(model, **{**TINY[model], "batch": 8})
    analysis = analysed(step, args, ONE_AXIS)
    found = choose(analysis, AlphaBeta.uniform(ONE_AXIS, LINK))
    believed = {
        name: found.formulation.believed_ms(choice)
        for name, choice in presets(analysis.frame).items()
    }
    known = {name: ms for name, ms in believed.items() if ms is not None}
    assert {"data_parallel", "fully_sharded"} <= known.keys()
    assert all(found.cost_ms <= ms * (1 + 1e-6) for ms in known.values())
    assert found.optimal


def test_links_decide(small):
    """Twice the price of a byte is, without latency, twice the cost of the same."""
    analysis, prices = small
    costs = []
    for beta in (1e-6, 2e-6):
        link = Link(alpha_ms=0.0, beta_ms_per_byte=beta)
        costs.append(choose(analysis, AlphaBeta.uniform(prices.mesh, link)).cost_ms)
    assert costs[1] == pytest.approx(2 * costs[0])


def test_flops_count_if_asked_for(small):
    """All that may be chosen splits every product by four: a constant, then."""
    analysis, prices = small
    plain = choose(analysis, prices)
    timed = choose(analysis, AlphaBeta.uniform(prices.mesh, LINK, flops_per_ms=1e3))
    flops = 2 * 16 * 16 * 32 * 5  # Two products forward, three backward.
    assert timed.cost_ms == pytest.approx(plain.cost_ms + flops / 4 / 1e3, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-gather", 3 / 4),
        ("reduce-scatter", 3 / 4),
        ("all-reduce", 2 * 3 / 4),
        ("all-to-all", 3 / 16 * 2),
        ("collective-permute", 3 / 16 * 2),
    ],
)
def test_prices_are_those_of_alpa(kind, sent):
    prices = AlphaBeta.uniform(ONE_AXIS, LINK)
    expected = LINK.alpha_ms + LINK.beta_ms_per_byte * sent * 1e6
    assert prices.collective_ms(kind, ("x",), 1e6) == pytest.approx(expected)
    assert prices.collective_ms(kind, ("x",), 0) == 0.0
    assert prices.memory_ms(1e9) == prices.matmul_ms(1e12, "float32") == 0.0


def test_a_group_goes_by_its_slowest_link():
    links = {"x": LINKS["pcie"], "y": LINKS["nvlink"]}
    prices = AlphaBeta(mesh=TWO_AXES, links=links)
    both = prices.collective_ms("all-gather", ("x", "y"), 1e8)
    alone = AlphaBeta.uniform((("x", 4),), LINKS["pcie"])
    assert both == alone.collective_ms("all-gather", ("x",), 1e8)
    assert prices.collective_ms("all-gather", ("y",), 1e8) < both / 2


def test_fit_recovers_links_of_which_curves_were_made():
    sizes = (1 << 14, 1 << 20, 1 << 26)
    link = Link(alpha_ms=0.03, beta_ms_per_byte=1 / 200e6)
    curves = {
        (kind, ("x",)): tuple(
            (s, link.alpha_ms + link.beta_ms_per_byte * sent_share(kind, 4) * s)
            for s in sizes
        )
        for kind in KINDS
    }
    measured = Rates(
        mesh=ONE_AXIS,
        curves=curves,
        matmul_flops_per_ms={"float32": 1.0, "bfloat16": 1.0},
        memory_bytes_per_ms=1.0,
    )
    found = fit(measured).links["x"]
    assert found.alpha_ms == pytest.approx(link.alpha_ms)
    assert found.beta_ms_per_byte == pytest.approx(link.beta_ms_per_byte)


def test_fit_of_what_no_line_explains_is_close_where_it_counts():
    rates = Rates.default(make_mesh(ONE_AXIS))
    model = fit(rates)
    size = 1 << 28
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        modelled = model.collective_ms(kind, ("x",), size)
        measured = rates.collective_ms(kind, ("x",), size)
        assert np.isclose(modelled, measured, rtol=0.3)
