"""Names of a search's options."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Storage
from cfp.analysis.presets import presets
from cfp.cost.costs import SegmentChoice, segment_candidate
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.solver import Option, Problem
from cfp.view.evidence import option_names, strategy_figures
from cfp.view.words import strategy_text
from cfp_test.support.checking import make_mesh

LAYERS, ROWS, WIDTH = 4, 16, 32
SIZES = (("x", 4),)
MIB = 2**20


def step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    grads = jax.grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]


@pytest.fixture(scope="module")
def analysis():
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * (LAYERS + 1)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    program, _ = trace(flatten_step(step, (weights, x)), make_mesh(SIZES))
    return analyze(program, SIZES)


@pytest.fixture(scope="module")
def problem(analysis):
    """Layers: data parallel, that rematerialized, fully sharded, or none of these.

    The first has a kind of its own, as its input's gradient is not asked for; here
    it costs nothing.
    """
    by_name = presets(analysis.frame)

    def options(index):
        data = segment_candidate(analysis, index, by_name["data_parallel"])
        full = segment_candidate(analysis, index, by_name["fully_sharded"])
        odd = SegmentChoice(
            segment_candidate(analysis, index, by_name["tensor_parallel"]).strategies,
            Storage.SHARDED,
        )
        again = SegmentChoice(data.strategies, data.storage, remat=True)
        return tuple(
            Option(
                candidate=candidate,
                time_ms=time_ms,
                state_bytes=state * MIB,
                residual_bytes=residual * MIB,
                temp_bytes=MIB,
            )
            for candidate, time_ms, state, residual in (
                (data, 2.0, 40, 20),
                (again, 3.0, 40, 0),
                (full, 5.0, 10, 20),
                (odd, 9.0, 10, 10),
            )
        )

    kinds = tuple(s.kind for s in analysis.segments)
    assert kinds == (0,) + (1,) * LAYERS
    first, layer = map(options, analysis.representatives)
    free = replace(first[0], time_ms=0.0, state_bytes=0, residual_bytes=0, temp_bytes=0)
    return Problem(
        kinds=kinds,
        options=((free,), layer),
        edge_ms={},
        budget_bytes=4 * 41 * MIB + 20 * MIB,
    )


def test_choices_have_names_and_words(analysis, problem):
    _, names = option_names(analysis, problem.options)
    assert names == [
        "data_parallel",
        "data_parallel (rematerialized)",
        "fully_sharded",
        "strategy 4 (no preset)",
    ]
    data, again, full, odd = (o.candidate for o in problem.options[1])

    def words(one):
        return strategy_text(strategy_figures(analysis, 1, one))

    assert words(data).endswith("x: rows (dim 0, size 16); parameters as used")
    assert words(again) == f"{words(data)}; rematerialized"
    assert words(full).endswith("; parameters sharded, gathered before use")
    assert "x: columns (dim 1, size 32)" in words(odd)
