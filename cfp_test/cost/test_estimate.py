"""Estimates: matrices against sums over pairs."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp import models
from cfp.analysis.presets import presets
from cfp.cost.costs import _pair_ms, segment_candidate
from cfp.cost.terms import Terms
from cfp_test.models.tiny import TINY
from cfp_test.programs.registry import PROGRAMS
from cfp_test.search.made_up import estimated, rates_of
from cfp_test.support.covering import at_night


@pytest.fixture(scope="module", params=[(("x", 4),), (("x", 2), ("y", 2))])
def small(request):
    """A perceptron, whose choices can all be looked at, with its estimates."""
    return estimated(*PROGRAMS["mlp"]()[:2], request.param)


def test_matrices_hold_what_each_pair_of_strategies_moves(small):
    analysis, estimates = small
    terms = Terms(analysis.frame, rates_of(analysis.frame.mesh))
    for estimate in estimates:
        if len(estimate.segment.blocks) < 2 or estimate.segment.kind in (
            s.kind for s in analysis.segments if s.index != estimate.segment.index
        ):
            continue  # what moves into a twin is in the matrices, too
        for (a, b), matrix in estimate.edge_ms.items():
            for i, j in itertools.product(range(matrix.shape[0]), range(3)):
                left = terms.block(
                    estimate.segment.blocks[a], estimate.strategies[a][i]
                )
                right = terms.block(
                    estimate.segment.blocks[b], estimate.strategies[b][j]
                )
                one = _pair_ms(terms, [left], [right])
                assert one.shape == (1, 1)
                assert matrix[i, j] == pytest.approx(one[0, 0])


def test_strategies_that_shard_alike_are_searched_once(small):
    analysis, estimates = small
    for estimate in estimates:
        for b, numbers, kept in zip(
            estimate.segment.blocks,
            estimate.numbers,
            estimate.strategies,
            strict=True,
        ):
            sharding = analysis.frame.shardings[b]
            axes = [tuple(sharding.factor_axes(s).values()) for s in kept]
            assert len(set(axes)) == len(axes)
            for strategy, number in numbers.items():
                mine = tuple(sharding.factor_axes(strategy).values())
                assert mine == axes[number]


@pytest.mark.parametrize("remat", [True, *at_night([False])])
def test_a_loop_costs_what_its_layers_cost(remat):
    # Large enough that latencies, of which a loop has fewer, count little.
    sizes = {"hidden": 4096, "heads": 32, "seq": 1024, "vocab": 512, "batch": 16}
    options = {**TINY["gpt"], **sizes, "layers": 6, "remat": remat}
    totals = []
    for scan in (False, True):
        step = models.build("gpt", **options, scan=scan)
        analysis, estimates = estimated(*step, (("x", 4),))
        index = analysis.representatives[1]
        repeats = [s.kind for s in analysis.segments].count(1)
        totals.append(
            {
                name: repeats
                * estimates[1].total_ms(segment_candidate(analysis, index, c))
                for name, c in presets(analysis.frame).items()
            }
        )
    unrolled, scanned = totals
    assert unrolled.keys() == scanned.keys()
    # A loop also writes and reads what it keeps for the backward pass.
    ratios = [scanned[name] / unrolled[name] for name in unrolled]
    assert 0.8 < min(ratios) and max(ratios) < 1.6, ratios
    assert max(ratios) / min(ratios) < 1.3


def test_a_scanned_step_is_estimated_like_its_layers_one_by_one(tmp_path):
    """All of it, what its layers hand on to one another included."""
    sizes = {"hidden": 1024, "heads": 16, "seq": 1024, "vocab": 4096, "batch": 64}
    options = {**TINY["gpt"], **sizes, "layers": 4, "remat": True}
    mesh, found = cfp.described("v5e:2x4"), []
    for scan in (False, True):
        step, args = models.build("gpt", **options, scan=scan)
        plan = cfp.plan(step, *args, mesh=mesh, cache_dir=tmp_path, quiet=True)
        found.append({row.name: row.predicted_ms for row in plan.race})
    unrolled, scanned = found
    assert scanned["tensor_parallel"] > 1.5 * scanned["data_parallel"]
    for name in ("data_parallel", "zero1", "fully_sharded", "tensor_parallel"):
        assert scanned[name] == pytest.approx(unrolled[name], rel=0.03), name


def test_products_take_as_long_as_their_flops():
    """A convolution's windows overlap, and complex products are four real ones."""

    def step(k, w, x):
        y = jax.lax.conv_general_dilated(
            x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y.sum(), (jax.lax.complex(w, w) @ jax.lax.complex(w, w)).real.sum()

    args = (jnp.ones((3, 3, 16, 64)), jnp.ones((64, 64)), jnp.ones((8, 32, 32, 16)))
    analysis, _ = estimated(step, args, (("x", 4),))
    program, rates = analysis.frame.program, rates_of(analysis.frame.mesh)
    terms = Terms(analysis.frame, rates)
    found = {
        op.kind: terms.compute_ms(op, ((),) * len(op.rule.sizes))[0]
        for op in program.ops
        if op.kind in ("convolution", "dot_general") and op.rule is not None
    }
    flops = {
        "convolution": 2 * (8 * 16 * 16 * 64) * (3 * 3 * 16),
        "dot_general": 8 * 64 * 64 * 64,
    }
    assert found == pytest.approx(
        {kind: rates.matmul_ms(number, "f32") for kind, number in flops.items()}
    )
