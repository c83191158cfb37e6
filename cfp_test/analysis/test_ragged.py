"""Ragged products, as mixtures of experts have them, on GPUs as on CPUs."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import cfp
from cfp.analysis.analyze import (
    build_frame,
    model_work,
    program_flops,
    rematerialized_flops,
)
from cfp.analysis.contractions import number_values
from cfp.analysis.dump import opaque_ops
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.strategies import AxisChoice, block_strategies
from cfp.program.constrain import propagate
from cfp.program.graph import op_flops
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.cli.toy_targets import experts
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import compile_choice, differences, make_mesh, prepare

MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}
CUDA = cfp.described("4xh200").abstract
MODES = {
    "rows": ((64, 32), (4, 32, 16), ((1,), (1,)), ((), ()), 0, [0]),
    "contracted": ((64, 32), (64, 16), ((0,), (0,)), ((), ()), 0, []),
    "batch": ((64, 8, 32), (64, 32, 16), ((2,), (1,)), ((0,), (0,)), 0, []),
}


def program_of(name, mesh=CUDA):
    fn, args, *_ = PROGRAMS[name]()
    return trace(flatten_step(fn, args), mesh)[0]


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_rules_and_flops_on_gpus(mode):
    left, right, contracting, batch, ragged, groups = MODES[mode]
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), [ragged], groups)

    def product(x, w, sizes):
        return lax.ragged_dot_general(x, w, sizes, numbers)

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (left, right)]
    args = (*shapes, jax.ShapeDtypeStruct((4,), jnp.int32))
    program, _ = trace(flatten_step(product, args), CUDA)
    (dot,) = (op for op in program.ops if "dot" in op.kind)
    assert dot.kind == "dot_general"
    rows = 64 * (8 if mode == "batch" else 1)
    # Each row is multiplied by one expert's matrix.
    assert program_flops(program) == 2 * rows * 32 * 16
    # XLA computes, and is timed for, every row with every expert, but for batches.
    experts = 1 if mode == "batch" else 4
    assert op_flops(program, dot) == 2 * rows * 32 * 16 * experts


def trained(experts, times=1, policy=None):
    """The program of the gradient of a loss of ragged products, and their FLOPs."""

    def layer(x, w, sizes):
        return jnp.tanh(lax.ragged_dot(x, w, sizes))

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)

    def step(weights, x, sizes):
        def loss(weights):
            out, _ = lax.scan(lambda h, w: (layer(h, w, sizes), None), x, weights)
            return (out**2).sum()

        return jax.value_and_grad(loss)(weights)

    args = (
        jax.ShapeDtypeStruct((times, experts, 32, 32), jnp.float32),
        jax.ShapeDtypeStruct((64, 32), jnp.float32),
        jax.ShapeDtypeStruct((experts,), jnp.int32),
    )
    return trace(flatten_step(step, args), CUDA)[0], 2 * 64 * 32 * 32


@pytest.mark.parametrize("experts", [1, 4, 16])
def test_flops_of_a_model_do_not_grow_with_its_experts(experts):
    program, once = trained(experts, times=3)
    frame = build_frame(program, (("x", 4),))
    # Forward, of the rows, and of the matrices, in each of three layers.
    assert program_flops(program) == 3 * 3 * once
    assert model_work(frame, {})["model_flops"] == 3 * 3 * once


def test_what_a_step_rematerializes_of_its_experts_is_counted_alike():
    save_none = jax.checkpoint_policies.nothing_saveable
    program, once = trained(4, times=3, policy=save_none)
    frame = build_frame(program, (("x", 4),))
    assert program_flops(program) == 4 * 3 * once
    assert rematerialized_flops(program, frame.blocks) == 3 * once


def test_products_of_what_is_masked_otherwise_count_in_full():
    """As a window of attention: no copies for groups, or no bounds of these."""

    def step(x, w, first, last):
        rows = lax.broadcasted_iota(jnp.int32, (8, 8), 0)
        one = jnp.where((rows >= first) & (rows < last), x, 0.0) @ w
        copies = jnp.broadcast_to(x, (4, 8, 8))
        every = lax.broadcasted_iota(jnp.int32, (4, 8, 8), 1)
        mask = (every >= first) & (every < last)
        return one, jnp.einsum("gmk,kn->gmn", jnp.where(mask, copies, 0.0), w)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program, _ = trace(flatten_step(step, (square, square, number, number)), CUDA)
    assert program_flops(program) == 2 * 8**3 * (1 + 4)


def test_a_step_has_the_same_products_on_gpus_and_cpus():
    on_gpus, here = (
        program_of("moe_ragged", m) for m in (CUDA, make_mesh((("x", 4),)))
    )
    products = [
        [op.rule for op in program.ops if op.kind == "dot_general"]
        for program in (on_gpus, here)
    ]
    assert products[0] == products[1]
    assert "ragged_dot" not in {op.kind for op in on_gpus.ops}
    assert program_flops(on_gpus) == program_flops(here) > 0


def test_a_kernel_that_is_asked_for_stays(monkeypatch):
    flag = "--xla_gpu_experimental_use_ragged_dot_fusion=true"
    monkeypatch.setenv("XLA_FLAGS", flag)
    kinds = {op.name for op in program_of("moe_ragged").ops}
    assert "chlo.ragged_dot" in kinds


@pytest.mark.parametrize("mesh", MESHES)
def test_experts_are_sharded_and_right(mesh):
    case = prepare("moe_ragged", PROGRAMS["moe_ragged"], MESHES[mesh])
    program, frame = case.frame.program, case.frame
    experts, *inside = whole = [4, 16, 16]
    strategies, sharded = [], 0
    for block in frame.blocks:
        op = program.ops[block.anchor]
        own = [
            dims[0][0]
            for v, dims in zip(op.operands, op.rule.operands, strict=True)
            if [*program.values[v].shape] == whole
        ]
        choice = (AxisChoice(own[0]) if own else AxisChoice(), *[AxisChoice()] * 3)
        strategies.append(choice[: len(frame.mesh)])
        assert strategies[-1] in block_strategies(program, block, frame.mesh)
        sharded += bool(own)
    assert sharded
    choice = Choice(tuple(strategies), (Storage.USED,) * len(frame.groups))
    run = compile_choice(case, choice)
    local = [experts // frame.mesh[0][1], *inside]
    assert re.search(rf"f32\[{','.join(map(str, local))}\]", run.compiled.as_text())
    assert differences(case, run()) == {}


def test_a_mixture_of_experts_planned_for_gpus_shards_them(tmp_path):
    train_step, (weights, x) = experts()
    plan = cfp.plan(
        train_step,
        weights,
        x,
        mesh=cfp.described("4xh200"),
        donate_argnums=0,
        cache_dir=tmp_path,
        quiet=True,
    )
    specs = dict(zip(plan.arg_names, plan.arg_specs, strict=True))
    found = [spec for name, spec in specs.items() if name.endswith(("up", "down"))]
    assert len(found) == 2
    assert all(any(spec) for spec in found)
    program, _ = trace(flatten_step(train_step, (weights, x)), CUDA)
    # Five products of all rows with all experts: two of them forward. Of the model's
    # each row has one expert.
    products = 5 * 2 * 512 * 1024 * 4096 * 32
    flops = program_flops(program)
    assert plan.search["model_flops"] == flops
    assert products / 32 <= flops < products / 16
    # What GPUs compile: under the plan each device does a part of every product.
    placed = propagate(
        program,
        plan.mesh_axes,
        plan.arg_specs,
        plan.output_specs,
        dict(plan.constraints.values),
    )
    large = [
        op
        for op in program.ops
        if op.kind == "dot_general" and op_flops(program, op) >= products // 5
    ]
    assert len(large) == 5
    for op in large:
        uses = [plan.constraints.uses.get((op.id, i), ()) for i in range(2)]
        specs = [*uses, *(placed.get(v, ()) for v in (*op.operands, *op.results))]
        assert any(any(spec) for spec in specs)


def test_cumulative_sums_have_the_same_factors_on_gpus_and_cpus():
    """From jax 0.12 on they are ops for which Shardy has no rule on GPUs."""

    def step(x):
        return jnp.cumsum(x, axis=1), jnp.cumsum(x, axis=0), lax.cumsum(x, 2)

    x = jax.ShapeDtypeStruct((8, 16, 4), jnp.float32)
    on_gpus, here = (
        [
            (op.rule.operands[0], op.rule.results[0], op.rule.fixed)
            for op in trace(flatten_step(step, (x,)), mesh)[0].ops
            if op.kind in ("scan", "reduce_window")
        ]
        for mesh in (CUDA, make_mesh((("x", 4),)))
    )
    assert len(on_gpus) == 3 and on_gpus == here


def test_a_sum_over_the_only_dim_is_a_known_op_on_gpus():
    program, _ = trace(
        flatten_step(
            lambda n: (jnp.cumsum(n), jnp.cumsum(n) + 1),
            (jax.ShapeDtypeStruct((32,), jnp.int32),),
        ),
        CUDA,
    )
    sums = [op for op in program.ops if op.kind in ("scan", "reduce_window")]
    assert len(sums) == 2 and opaque_ops(program) == []
    numbers = number_values(program)
    assert numbers[sums[0].results[0]] == numbers[sums[1].results[0]]


def test_gradients_of_experts_belong_to_their_products():
    frames = [
        build_frame(program_of("moe_ragged", mesh), (("x", 4),))
        for mesh in (CUDA, make_mesh((("x", 4),)))
    ]
    on_gpus, here = (
        [(block.name, [m.factors for m in block.members]) for block in frame.blocks]
        for frame in frames
    )
    assert on_gpus == here
