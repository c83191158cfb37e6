"""Estimates, as compilers do, launch once what is combined."""

import re
from dataclasses import replace
from itertools import repeat

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Storage
from cfp.analysis.presets import presets
from cfp.cost.costs import Costs, segment_candidate
from cfp.cost.terms import Terms
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.choices import estimate_kinds
from cfp.search.guided import build_problem, estimate_options, prediction_of
from cfp.settings import Replacing, defaults_of
from cfp_test.cost import recurrent
from cfp_test.support.checking import make_mesh

LAYERS, WIDTH, ROWS = 12, 256, 4096
SIZES = (("x", 8),)
LAYER_BYTES = 4 * WIDTH * WIDTH


def step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


def arguments(rows=ROWS):
    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return [*repeat(shape, LAYERS)], jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def state_ms(name, rates):
    """Estimates the time that a preset's state takes to move in a step."""
    program, _ = trace(flatten_step(step, arguments()), make_mesh(SIZES))
    analysis = analyze(program, SIZES)
    terms, choice = Terms(analysis.frame, rates), presets(analysis.frame)[name]
    total = 0.0
    for segment in analysis.segments:
        mode = segment_candidate(analysis, segment.index, choice).storage
        blocks = [terms.block(b, choice.blocks[b]) for b in segment.blocks]
        owned = terms.owned_groups(segment.groups, blocks)
        for groups, block in zip(owned, blocks, strict=True):
            total += terms.state_ms(groups, block, mode)[1]
            total += terms.gradients_ms(segment.groups, block, mode)
    return total, mode


@pytest.mark.parametrize("name", ["data_parallel", "fully_sharded"])
def test_what_is_combined_is_launched_once(name):
    """An all-reduce for each gradient; or a gather, and a reduce-scatter."""
    rates = cfp.described("8xh100").rates
    assert rates.combined_bytes == defaults_of("gpu").combined_bytes > LAYER_BYTES
    alone = replace(rates, combined_bytes=0)
    kinds = {
        Storage.USED: ["all-reduce"],
        Storage.SHARDED: ["all-gather", "reduce-scatter"],
    }
    many_ms, mode = state_ms(name, alone)
    launch_ms = sum(rates.collective_ms(kind, ("x",), 1.0) for kind in kinds[mode])
    saved_ms = many_ms - state_ms(name, rates)[0]
    assert saved_ms == pytest.approx((LAYERS - 1) * launch_ms)
    # Of what takes up half of the bytes that are combined there are half as many.
    two = replace(rates, combined_bytes=2 * LAYER_BYTES)
    saved_ms = many_ms - state_ms(name, two)[0]
    assert saved_ms == pytest.approx(LAYERS / 2 * launch_ms)
    few = replace(rates, combined_bytes=LAYER_BYTES)
    assert state_ms(name, few)[0] == pytest.approx(many_ms)


@pytest.mark.parametrize("devices", ["1xh100", "8xh100"])
def test_a_step_takes_as_long_as_its_kernels_do_at_least(devices, tmp_path):
    """However little they compute: each of the products, forward and backward."""
    args = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2, arguments(8)[1]
    plan = cfp.plan(step, *args, mesh=cfp.described(devices), cache_dir=tmp_path)
    products = 2 + 2 + 1
    assert plan.predicted_ms >= products * defaults_of("gpu").launch_ms > 0.0


def test_a_small_model_on_described_gpus_is_not_replicated():
    """Launched one by one, its gradients took longer than what sharding saves."""
    plan = cfp.plan(step, *arguments(), mesh=cfp.described("8xh100"), quiet=True)
    assert plan.arg_specs[-1] == (("x",), ())


def test_a_compiler_combines_gradients_of_a_program():
    """XLA's pass is the same for CPUs; what depends on another stays apart."""
    mesh = make_mesh(SIZES)
    plan = cfp.plan(step, *arguments(64), mesh=mesh, preset="data_parallel", quiet=True)
    text = plan.compile(step, *arguments(64)).as_text()
    calls = re.findall(r"= (.*) all-reduce\(", text)
    gradients = [call.count(f"f32[{WIDTH},{WIDTH}]") for call in calls]
    assert sum(gradients) == LAYERS and len(calls) < LAYERS / 2


def test_gradients_summed_in_two_steps_and_of_tables_are_launched_once():
    """Biases have their sums in a layer, a table its gradient in another segment."""
    mesh, args = make_mesh(SIZES), recurrent.arguments(64)
    program, _ = trace(flatten_step(recurrent.step, args), mesh)
    analysis = analyze(program, SIZES)
    choice = presets(analysis.frame)["data_parallel"]
    rates = cfp.described("8xh100").rates
    alone = replace(rates, curves=dict.fromkeys(rates.curves, ((1, 0.0),)))

    def step_ms(rates):
        costs = Costs(analysis, rates, measured=False)
        found = estimate_options(
            estimate_kinds(analysis, rates),
            {"data_parallel": choice},
            costs,
            per_kind=0,
            budget_bytes=None,
            replacing=Replacing(),
        )
        problem = build_problem(costs, found.problem.options, None)
        return prediction_of(analysis, problem, choice).time_ms

    gradients = sum(leaf.size * 4 for leaf in jax.tree.leaves(args[0]))
    once_ms = rates.collective_ms("all-reduce", ("x",), gradients)
    launch_ms = rates.collective_ms("all-reduce", ("x",), 1.0)
    assert step_ms(rates) - step_ms(alone) == pytest.approx(once_ms, abs=launch_ms)
    own, args = recurrent.step, recurrent.arguments(8)
    plan = cfp.plan(own, *args, mesh=mesh, preset="data_parallel", quiet=True)
    text = plan.compile(own, *args).as_text()
    assert len(re.findall(r"all-reduce\(", text)) == 1
