"""Which reshardings are worth measuring, and what the search does with them."""

import random
from itertools import pairwise

import pytest

from cfp.models import registry
from cfp.presets.classics import presets
from cfp.profiling.record import ProfileRecord
from cfp.search.candidates import segment_candidate
from cfp.search.costs import Costs, build_problem
from cfp.search.problem import Option
from cfp.search.reshard import moves_worth_measuring
from cfp.search.shortlist import leading_classics
from cfp.search.wanted import WantedMaker, total_ms
from cfp_test.models.tiny import TINY
from cfp_test.search.test_estimate import estimated, rates_of

SIZES = (("x", 4),)


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden": 2048, "heads": 16, "seq": 512, "vocab": 8192, "batch": 16}
    return estimated(*registry.build("gpt", **{**TINY["gpt"], **sizes}), SIZES)


@pytest.fixture(scope="module")
def analysis(model):
    return model[0]


def option(candidate, time_ms=1.0):
    return Option(
        candidate=candidate,
        time_ms=time_ms,
        state_bytes=0,
        residual_bytes=0,
        temp_bytes=0,
    )


def options_of(analysis, seed=None):
    """The parts of the classics, equally fast or of times that a seed tells."""
    draw = random.Random(seed)
    found = []
    for index in analysis.representatives:
        parts = {}
        for choice in presets(analysis.frame).values():
            part = segment_candidate(analysis, index, choice)
            time_ms = 1.0 if seed is None else draw.uniform(0.1, 2.0)
            parts.setdefault(part.key, option(part, time_ms))
        found.append(list(parts.values()))
    return found


def all_moves(costs, options):
    """Every move between neighbours that can be measured, with its price."""
    found = {}
    for left, right in pairwise(costs.analysis.segments):
        for a in options[left.kind]:
            for b in options[right.kind]:
                moves = costs.handover(
                    left.index, right.index, a.candidate, b.candidate
                )
                found.update((m, p) for m, p in moves if costs.can_measure(m))
    return found


def best_pairs(costs, options):
    """For each pair of kinds the least time of two neighbours and their handover."""
    problem = build_problem(costs, options, None)
    return {
        (a, b): min(
            one.time_ms + other.time_ms + edges[i][j]
            for i, one in enumerate(options[a])
            for j, other in enumerate(options[b])
        )
        for (a, b), edges in problem.edge_ms.items()
    }


def test_moves_are_few_distinct_and_the_most_expensive(analysis):
    costs = Costs(analysis, rates_of(SIZES))
    most = 0
    for seed in range(20):
        options = options_of(analysis, seed)
        priced = all_moves(costs, options)
        every = moves_worth_measuring(costs, options, most=1000, share=0.0)
        assert len(every) == len(set(every))
        assert set(every) <= priced.keys()
        assert all(move.have != move.want for move in every)
        prices = [priced[move] for move in every]
        assert prices == sorted(prices, reverse=True)
        assert all(price > 0 for price in prices)
        assert moves_worth_measuring(costs, options, most=2, share=0.0) == every[:2]
        most = max(most, len(every))
    assert most > 2


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_what_is_left_out_decides_nothing(analysis, share):
    """Were it free, the best two neighbours would take as long, or little less."""
    rates = rates_of(SIZES)
    costs = Costs(analysis, rates)
    left_out = 0
    for seed in range(20):
        options = options_of(analysis, seed)
        asked = moves_worth_measuring(costs, options, most=1000, share=share)
        free = dict.fromkeys(all_moves(costs, options).keys() - set(asked), 0.0)
        left_out += len(free)
        before = best_pairs(costs, options)
        after = best_pairs(Costs(analysis, rates, free), options)
        for pair, time_ms in before.items():
            # Forward and backward, of a value or two.
            assert time_ms * (1 - 4 * share) - 1e-9 <= after[pair] <= time_ms
    assert left_out


def test_where_what_goes_together_is_fastest_nothing_is_measured(analysis):
    costs = Costs(analysis, rates_of(SIZES))
    options = options_of(analysis)
    assert all_moves(costs, options)
    assert moves_worth_measuring(costs, options, share=0.0) == []


def test_what_was_measured_takes_the_place_of_the_curve(analysis):
    rates = rates_of(SIZES)
    plain = Costs(analysis, rates)
    options = options_of(analysis)
    priced = all_moves(plain, options)
    moved_ms = {move: 7.0 for move in list(priced)[::2]}
    measured = build_problem(Costs(analysis, rates, moved_ms), options, None)
    curves = build_problem(plain, options, None)
    changed = 0
    for left, right in pairwise(analysis.segments):
        pair = left.kind, right.kind
        for i, a in enumerate(options[left.kind]):
            for j, b in enumerate(options[right.kind]):
                moves = plain.handover(
                    left.index, right.index, a.candidate, b.candidate
                )
                by_hand = sum(moved_ms.get(m, price) for m, price in moves)
                if (left.index, right.index) == first_of(analysis, pair):
                    assert measured.edge_ms[pair][i][j] == pytest.approx(by_hand)
                    changed += (
                        measured.edge_ms[pair][i][j] != curves.edge_ms[pair][i][j]
                    )
    assert changed


def first_of(analysis, pair):
    return next(
        (a.index, b.index)
        for a, b in pairwise(analysis.segments)
        if (a.kind, b.kind) == pair
    )


def test_a_segment_beside_a_neighbour_is_told_apart_by_the_same_price(model):
    """What the search adds for a handover is what was subtracted before."""
    analysis, estimates = model
    classics = leading_classics(analysis, estimates, presets(analysis.frame))
    maker = WantedMaker(analysis, classics, estimates, ())
    items = [item for item in maker.first(100, 4) if total_ms(item.handover)]
    assert items
    for item in items:
        alone, carrier, pair = (job.key.digest for job in item.jobs)
        records = {
            key: ProfileRecord(key=key, parts=(), status="ok", samples_ms=(ms,))
            for key, ms in ((carrier, 100.0), (pair, 250.0), (alone, 100.0))
        }
        moved_ms = {move: 0.5 for move, _ in item.handover}
        wanted = 150.0 - 0.5 * len(item.handover)
        assert item.time_ms(records, moved_ms) == pytest.approx(wanted)
        assert item.time_ms(records) == pytest.approx(150.0 - total_ms(item.handover))
