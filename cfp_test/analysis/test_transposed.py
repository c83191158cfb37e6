"""Values with constraints: if a value is only transposed, behind the transpose."""

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import constraints, lay_out
from cfp.analysis.presets import presets
from cfp.profiling.hlo import collectives_in
from cfp.program.part import lower_part
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.requests import constraints_of, whole_job
from cfp.settings import ConstraintLevel
from cfp_test.support.checking import make_mesh

SIZES = (("x", 4),)


def step(weights, x, y):
    """Plain descent on two weights."""

    def loss(w):
        hidden = jnp.tanh(x @ w["up"])
        return jnp.mean((hidden @ w["down"] - y) ** 2)

    grads = jax.grad(loss)(weights)
    return {name: w - 0.1 * grads[name] for name, w in weights.items()}


@pytest.fixture(scope="module")
def analysis():
    weights = {
        "up": jax.ShapeDtypeStruct((32, 64), jnp.float32),
        "down": jax.ShapeDtypeStruct((64, 32), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    flat = flatten_step(step, (weights, batch, batch), donate_argnums=(0,))
    return analyze(trace(flat, make_mesh(SIZES))[0], SIZES)


def transposed(program):
    """(product, transpose) pairs of values where nothing else reads the product."""
    for op in program.ops:
        if op.kind == "transpose" and len(program.users[op.operands[0]]) == 1:
            yield op.operands[0], op.results[0]


@pytest.mark.parametrize("name", ["data_parallel", "zero1", "fully_sharded"])
def test_a_product_that_is_only_transposed_is_constrained_behind_that(analysis, name):
    program = analysis.frame.program
    layout = lay_out(analysis.frame, presets(analysis.frame)[name])
    constrained = constraints(layout)
    pairs = list(transposed(program))
    assert len(pairs) >= 1
    for product, result in pairs:
        assert product not in constrained.values
        assert constrained.values[result] == layout.value_spec[result]
        # It is the same sharding, and the same axes are summed over.
        have, found = layout.value_spec[product], layout.value_spec[result]
        assert sorted(have) == sorted(found)


def test_where_the_transpose_is_left_out_the_product_is_constrained(analysis):
    program = analysis.frame.program
    layout = lay_out(analysis.frame, presets(analysis.frame)["data_parallel"])
    product, _ = next(transposed(program))
    producer = program.values[product].producer
    constrained = constraints(layout, {producer})
    assert constrained.values[product] == layout.value_spec[product]


@pytest.mark.parametrize("name", ["data_parallel", "zero1", "fully_sharded"])
def test_the_same_is_sent(analysis, name):
    """With the constraint on the product, too, there is nothing more or less."""
    frame = analysis.frame
    choice = presets(frame)[name]
    layout = lay_out(frame, choice)
    job = whole_job(analysis, choice, (), name)
    constrained = constraints_of(analysis, choice, ConstraintLevel.EVERYTHING)
    before = {
        product: layout.value_spec[product] for product, _ in transposed(frame.program)
    }
    assert before and not before.keys() & constrained.values.keys()
    sent = []
    for values in (constrained.values, {**constrained.values, **before}):
        all_told = type(constrained)(
            values, constrained.uses, constrained.rematerialized
        )
        lowered = lower_part(
            frame.program,
            job.part,
            make_mesh(SIZES),
            all_told,
            job.in_specs,
            job.out_specs,
            job.donated,
        )
        sent.append(collectives_in(lowered.compile().as_text()))
    assert sent[0] == sent[1] != ()
