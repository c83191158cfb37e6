"""Layers inside a scan over microbatches are found as they are outside of one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import constraints, lay_out
from cfp.analysis.presets import presets
from cfp.analysis.segments import open_loops
from cfp.cost.memory import accumulated_bytes, can_rematerialize, residuals
from cfp.cost.terms import Terms
from cfp.models import build
from cfp.profiling.collectives import KINDS, Rates
from cfp.program import shardy
from cfp.program.constrain import constrain, misfit
from cfp.program.part import cut_part, lower_part
from cfp.program.step import flatten_step
from cfp.program.trace import lower_step, trace
from cfp.search.requests import constraints_of
from cfp.settings import ConstraintLevel
from cfp_test.models.tiny import TINY
from cfp_test.programs.common import normal, squares
from cfp_test.support.checking import (
    differences,
    make_mesh,
    prepare,
    shardings,
    spec_of,
)
from cfp_test.support.covering import at_night, cover_values

SIZES = (("x", 4),)
LAYERS = 3
RATES = Rates(
    mesh=SIZES,
    curves={(kind, ("x",)): ((1, 1e-3), (1_000, 1.0)) for kind in KINDS},
    matmul_flops_per_ms={"float32": 1e6},
    memory_bytes_per_ms=1e6,
)


def step_of(parts):
    """A training step of three layers, its batch in parts; 0 for no scan."""

    def make():
        layers = [
            {"a": normal(2 * i, 16, 32), "b": normal(2 * i + 1, 32, 16)}
            for i in range(LAYERS)
        ]
        params = {"layers": layers, "head": normal(20, 16, 8)}

        def loss(p, x):
            for w in p["layers"]:
                x = x + jnp.tanh(x @ w["a"]) @ w["b"]
            return squares(x @ p["head"]) / max(1, parts)

        gradient = jax.value_and_grad(loss)

        def step(p, x):
            def add(total, part):
                return jax.tree.map(jnp.add, total, gradient(p, part)), None

            if parts:
                nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
                split = x.reshape(parts, -1, x.shape[-1])
                (value, grads), _ = jax.lax.scan(add, nothing, split)
            else:
                value, grads = gradient(p, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

        return step, (params, normal(21, 16, 16))

    return make


@functools.cache
def opened(parts):
    """The step with its loops opened, and its analysis."""
    case = prepare(f"parts {parts}", step_of(parts), SIZES)
    case = dataclasses.replace(case, frame=open_loops(case.frame))
    return case, analyze(case.frame.program, SIZES)


@pytest.fixture(scope="module", params=[2, 4])
def looped(request):
    return opened(request.param)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_segments_are_those_of_the_step_without_a_scan(parts):
    _, plain = opened(0)
    _, found = opened(parts)
    kinds = [s.kind for s in plain.segments]
    assert len(kinds) > len(set(kinds)), "layers repeat"
    assert [s.kind for s in found.segments] == [s.kind for s in plain.segments]
    assert [len(s.blocks) for s in found.segments] == [
        len(s.blocks) for s in plain.segments
    ]
    assert [len(s.groups) for s in found.segments] == [
        len(s.groups) for s in plain.segments
    ]
    assert {s.repeat for s in found.segments} == {parts}
    everything = [op for s in found.segments for op in s.ops]
    assert len(everything) == len(set(everything)), "each op is in one segment"


def test_a_scan_of_one_iteration_leaves_no_loop():
    case, _ = opened(1)
    assert not any(op.has_regions for op in case.frame.program.ops)
    assert not case.frame.program.opened


@cover_values(preset=["data_parallel", "fully_sharded"], remat=[False, True])
def test_the_step_computes_the_same(looped, preset, remat):
    case, analysis = looped
    frame = case.frame
    able = [s.index for s in analysis.segments if can_rematerialize(frame, s)]
    assert len(able) >= LAYERS
    again = tuple(able) if remat else ()
    choice = dataclasses.replace(presets(frame)[preset], remat=again)
    ins, outs = shardings(case, lay_out(frame, choice))
    lowering = lower_step(case.step, ins, outs)
    constrained = constraints_of(analysis, choice, ConstraintLevel.EVERYTHING)
    assert len(constrained.rematerialized) == len(again), "as memory is predicted"
    as_read = dataclasses.replace(frame.program, opened=frozenset())
    assert misfit(as_read, case.mesh, constrained) is None
    before = {*shardy.every_op(lowering.module)}
    constrain(lowering.module, frame.program, case.mesh, constrained)
    clones = [
        op
        for op in shardy.every_op(lowering.module)
        if op not in before and op.name == "stablehlo.dot_general"
    ]
    assert len(clones) >= (LAYERS if remat else 0)
    compiled = lowering.lowered.compile()
    arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, ins, strict=True)]
    assert differences(case, jax.tree.leaves(compiled(*arrays))) == {}


def test_casts_in_front_of_the_loop_are_kept_if_rematerialized():
    """They are the loop's operands, and no op in it makes them."""
    make, half = step_of(2), jnp.bfloat16
    step, (params, x) = make()

    def cast_first(p, x):
        return step(jax.tree.map(lambda w: w.astype(half), p), x.astype(half))

    program, _ = trace(flatten_step(cast_first, (params, x), {}), make_mesh(SIZES))
    analysis = analyze(program, SIZES)
    assert analysis.frame.program.opened
    layer = analysis.segments[1].ops
    for again in (False, True):
        found = residuals(analysis.frame, layer, again)
        assert {"bf16[16,32]", "bf16[32,16]"} <= {str(program.values[v]) for v in found}


def test_sharded_parameters_are_gathered_inside_of_the_loop(looped):
    """And held in shards meanwhile, as their gradients are."""
    case, _ = looped
    layout = lay_out(case.frame, presets(case.frame)["fully_sharded"])
    (loop,) = case.frame.program.opened
    op = case.frame.program.ops[loop]
    kernel = (16, 32)
    results = [v for v in op.results if case.frame.program.values[v].shape == kernel]
    assert len(results) == 2 * LAYERS  # parameters, and sums of gradients
    assert all(any(layout.spec(v)) for v in results)


def products_of_segments(parts):
    """Counts the products of each segment by itself, as it is compiled."""
    case, analysis = opened(parts)
    program = case.frame.program
    layout = lay_out(case.frame, presets(case.frame)["fully_sharded"])
    found = []
    for segment in analysis.segments:
        part = cut_part(program, segment.ops)
        lowered = lower_part(
            program,
            part,
            case.mesh,
            constraints(layout, program.with_bodies(part.ops)),
            [spec_of(layout, v) for v in part.inputs],
            [spec_of(layout, v) for v in part.outputs],
        )
        text = str(lowered.compiler_ir("stablehlo"))
        assert "stablehlo.while" not in text
        lowered.compile()
        found.append(text.count("stablehlo.dot_general"))
    return found


def test_each_segment_compiles_by_itself_without_the_loop():
    assert products_of_segments(2) == products_of_segments(0)


def test_what_moves_inside_of_the_loop_is_paid_in_each_turn():
    """Twice the turns with half the rows: parameters and gradients move as often."""
    moved = {}
    for parts in (0, 2, 4):
        _, analysis = opened(parts)
        terms = Terms(analysis.frame, RATES)
        groups = analysis.segments[1].groups
        choice = presets(analysis.frame)["fully_sharded"]
        block = analysis.segments[1].blocks[0]
        terms_of = terms.block(block, choice.blocks[block])
        mode = choice.storage[groups[0]]
        owned = terms.owned_groups(groups, [terms_of])[0]
        moved[parts] = terms.state_ms(owned[:1], terms_of, mode)[1]
    assert moved[2] == pytest.approx(2 * moved[0])
    assert moved[4] == pytest.approx(4 * moved[0])


def test_sums_of_gradients_are_memory_of_their_segment(looped):
    case, analysis = looped
    layout = lay_out(case.frame, presets(case.frame)["data_parallel"])
    sums = [accumulated_bytes(layout, segment) for segment in analysis.segments]
    assert sum(sums) == 4 * (LAYERS * 2 * 16 * 32 + 16 * 8)
    assert sums[1] == 4 * 2 * 16 * 32


@pytest.mark.parametrize(
    ("name", "scan"),
    [
        *(("gpt", False), ("llama", True)),
        *at_night((name, scan) for name in ("moe", "bert") for scan in (False, True)),
        *at_night([("gpt", True), ("llama", False)]),
    ],
)
def test_models_have_the_segments_that_they_have_without(name, scan):
    """Also where the layers are a scan inside of the scan over microbatches.

    There a block of what follows the layers may go with their loop.
    """

    def of(parts):
        layers = 4 if name == "moe" else 2  # Each kind of them twice.
        options = {**TINY[name], "layers": layers, "scan": scan, "microbatches": parts}
        program, _ = trace(flatten_step(*build(name, **options), {}), make_mesh(SIZES))
        found = analyze(program, SIZES).segments
        return [
            (one.kind, *(() if scan else (len(one.blocks), len(one.groups))))
            for one in found
        ]

    plain = of(1)
    assert len(plain) > 2
    assert of(2) == plain
