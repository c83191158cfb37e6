"""Estimates of gradients that a loop makes, one layer after another."""

import jax
import jax.numpy as jnp
import pytest

from cfp import models
from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.cost.costs import segment_candidate
from cfp.cost.terms import Terms
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.models.tiny import TINY
from cfp_test.search.made_up import rates_of
from cfp_test.support.checking import make_mesh


def gradients_ms(step, args, sizes):
    """The estimated time to reduce a program's gradients, for every preset.

    The first of two axes is from host to host.
    """
    program, _ = trace(flatten_step(step, args), make_mesh(sizes))
    analysis = analyze(program, sizes, outer=frozenset(name for name, _ in sizes[:-1]))
    terms, found = Terms(analysis.frame, rates_of(sizes)), {}
    for name, choice in presets(analysis.frame).items():
        found[name] = sum(
            terms.gradients_ms(
                segment.groups,
                terms.block(block, choice.blocks[block]),
                segment_candidate(analysis, segment.index, choice).storage,
            )
            for segment in analysis.segments
            for block in segment.blocks
        )
    return found


def gpt(scan):
    sizes = {"hidden": 1024, "heads": 16, "seq": 64, "batch": 16, "layers": 6}
    return models.build("gpt", **TINY["gpt"] | sizes, scan=scan)


def square(scan):
    """Weights whose dims cannot be told apart by their sizes."""

    def loss(weights, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        else:
            for w in weights:
                x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(weights, x):
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    one = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    stack = jax.ShapeDtypeStruct((6, 1024, 1024), jnp.float32)
    return step, (stack if scan else [one] * 6, one)


@pytest.mark.parametrize("sizes", [(("x", 4),), (("x", 2), ("y", 2))])
@pytest.mark.parametrize("program", [gpt, square])
def test_gradients_cost_in_a_loop_what_they_cost_without(program, sizes):
    # Large enough that latencies, of which a loop has others, count little.
    unrolled, scanned = (gradients_ms(*program(scan), sizes) for scan in (False, True))
    stored = ["data_parallel", "zero1", "fully_sharded", *["hsdp"][: len(sizes) - 1]]
    expected = {name: unrolled[name] for name in stored}
    assert expected["data_parallel"] > 1.2 * expected["fully_sharded"] > 0.0
    assert {name: scanned[name] for name in stored} == pytest.approx(expected, rel=0.1)
    # Transposing a gradient that is sharded like its weight moves nothing.
    for found in (unrolled, scanned):
        assert found["tensor_parallel"] < 0.1 * found["data_parallel"]
