"""Computing values again in the backward pass: what is cloned, and that it is right."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir

from cfp.analysis.layout import Choice, Storage, constraints, lay_out
from cfp.analysis.presets import presets
from cfp.analysis.segments import find_segments
from cfp.cost.memory import turning_point
from cfp.program import shardy
from cfp.program.constrain import constrain, makeable, rematerializable
from cfp.program.part import cut_part
from cfp.program.trace import Lowering, lower_step
from cfp_test.program.stacks import rematerializations, stack_step
from cfp_test.programs.common import normal, squares, training
from cfp_test.programs.kernels import model_of
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import (
    differences,
    evaluate,
    prepare,
    run_part,
    shardings,
    to_host,
)

SIZES = (("x", 4),)
CONSTRAINT = "sdy.sharding_constraint"


@pytest.fixture(scope="module")
def case():
    return prepare("stack", stack_step, SIZES)


class Edited(NamedTuple):
    """A lowering, its shardings, and what was added to it, constraints excepted."""

    lowering: Lowering
    ins: list
    added: list


def edited(case, choice):
    """The step's lowering with every segment rematerialized."""
    layout = lay_out(case.frame, choice)
    ins, outs = shardings(case, layout)
    lowering = lower_step(case.step, ins, outs)
    constrained = dataclasses.replace(
        constraints(layout), rematerialized=rematerializations(case.frame)
    )
    before = {*shardy.every_op(lowering.module)}
    constrain(lowering.module, case.frame.program, case.mesh, constrained)
    every = shardy.every_op(lowering.module)
    new = [op for op in every if op not in before and op.name != CONSTRAINT]
    return Edited(lowering, ins, new)


def test_what_the_backward_pass_reads_is_cloned_behind_a_barrier(case):
    one = edited(case, presets(case.frame)["data_parallel"])
    barriers = barriers_of(one)
    products = [op for op in one.added if op.name == "stablehlo.dot_general"]
    assert len(barriers) == len(rematerializations(case.frame))
    # Of each layer the first product: its result is what tanh and the second
    # product's gradient need. No gradient needs the second product's.
    assert len(products) >= 4
    made = {r for op in one.added for r in op.results}
    for op in products:
        read = [constrained_by(v) for v in op.operands]
        assert any(v in made for v in read), "reads what went through a barrier"


def constrained_by(value):
    """The value in front of its constraints."""
    owner = shardy.owner_of(value)
    while owner is not None and owner.name == CONSTRAINT:
        value = owner.operands[0]
        owner = shardy.owner_of(value)
    return value


@pytest.mark.parametrize(
    "preset", ["data_parallel", "fully_sharded", "tensor_parallel"]
)
def test_the_step_computes_the_same(case, preset):
    lowering, ins, _ = edited(case, presets(case.frame)[preset])
    compiled = lowering.lowered.compile()
    arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, ins, strict=True)]
    assert differences(case, jax.tree.leaves(compiled(*arrays))) == {}


def test_a_kernel_with_a_rule_runs_again():
    case = prepare("kernel", lambda: model_of("strict", layers=2), SIZES)
    lowering, ins, added = edited(case, presets(case.frame)["tensor_parallel"])
    assert any(op.name == "stablehlo.custom_call" for op in added)
    compiled = lowering.lowered.compile()
    arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, ins, strict=True)]
    assert differences(case, jax.tree.leaves(compiled(*arrays))) == {}


def test_a_part_computes_the_same(case):
    """A layer by itself, its forward ops rematerialized."""
    frame = case.frame
    segment = find_segments(frame)[1]
    part = cut_part(frame.program, segment.ops)
    choice = presets(frame)["data_parallel"]
    layout = lay_out(frame, Choice(choice.blocks, (Storage.USED,) * len(frame.groups)))
    known = evaluate(case, (*part.inputs, *part.outputs))
    one = rematerializable(frame.program, segment.ops, turning_point(frame))
    assert one is not None
    constrained = dataclasses.replace(constraints(layout), rematerialized=(one,))
    outputs = run_part(case, layout, part, known, constrained)
    for v, got in zip(part.outputs, outputs, strict=True):
        assert to_host(got) == pytest.approx(known[v], rel=1e-5, abs=1e-6)


def barriers_of(one):
    return [op for op in one.added if op.name.endswith("optimization_barrier")]


@pytest.mark.parametrize("preset", ["data_parallel", "fully_sharded"])
def test_all_that_goes_through_a_barrier_is_read_behind_it(case, preset):
    """XLA takes the rest out of it, and clones need not wait for that any more."""
    one = edited(case, presets(case.frame)[preset])
    assert barriers_of(one)
    for barrier in barriers_of(one):
        assert all(list(result.uses) for result in barrier.results)


def test_what_was_gathered_is_gathered_again(case):
    """Otherwise it would be kept from the forward to the backward pass."""
    lowering, _, _ = edited(case, presets(case.frame)["fully_sharded"])
    block = shardy.main_function(lowering.module).regions[0].blocks[0]
    ops = [o.operation for o in block.operations]
    gathered = [op.results[0] for op in ops if is_gathering(op)]
    barriers = [op for op in ops if op.name.endswith("optimization_barrier")]
    entering = [v for op in barriers for v in op.operands]
    assert not set(entering) & set(gathered)
    # Of four layers two products each, and the head's: in the forward pass alone.
    stored = [v for v in entering if isinstance(v.owner, ir.Block)]
    weights = [v for v in stored if len(v.type.shape) == 2 and v.type.shape[0] > 8]
    assert len(weights) == 9
    products = [op for op in ops if op.name == "stablehlo.dot_general"]
    assert sum(any(v in gathered for v in op.operands) for op in products) == 9


def is_gathering(op):
    is_constraint = op.name == "sdy.sharding_constraint"
    return is_constraint and isinstance(op.operands[0].owner, ir.Block)


def normed_step():
    params = [{"a": normal(2 * i, 16, 32), "b": normal(i, 32, 16)} for i in range(3)]

    def loss(p, x):
        for w in p:
            normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
            x = x + jnp.tanh(normed @ w["a"]) @ w["b"]
        return squares(x)

    return training(loss, params, normal(21, 8, 16))


def test_what_cheap_ops_make_of_what_is_kept_is_not_kept(monkeypatch):
    case = prepare("normed", normed_step, SIZES)
    program = case.frame.program
    turn = turning_point(case.frame)
    products = [op for op in program.ops[:turn] if op.kind == "dot_general"]
    first, second, third, *_ = (op.operands[0] for op in products)
    # What the second layer reads: the sum with the second product.
    [stream] = {
        op.results[0]
        for op in program.ops[:turn]
        if op.kind == "add" and products[1].results[0] in op.operands
    }
    found = makeable(program, [stream, third])
    assert found.keys() == {third}
    assert program.values[third].producer in found[third]
    assert program.values[stream].producer not in found[third]
    # Without the stream it takes the product before, which is not cheap; with it, but
    # with no leave to do those ops again, it is kept, too.
    assert makeable(program, [third]) == {}
    assert makeable(program, [stream, third], within={products[0].id}) == {}
    assert makeable(program, [first]).keys() == {first}
    assert makeable(program, [second, third]) == {}

    one = edited(case, presets(case.frame)["data_parallel"])
    arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, one.ins, strict=True)]
    made = one.lowering.lowered.compile()(*arrays)
    assert differences(case, jax.tree.leaves(made)) == {}
    entering = sum(len(barrier.operands) for barrier in barriers_of(one))
    monkeypatch.setattr("cfp.program.constrain.makeable", lambda *how: {})
    other = edited(case, presets(case.frame)["data_parallel"])
    assert entering < sum(len(barrier.operands) for barrier in barriers_of(other))


def pooled_step():
    """The stream is what means are taken of, and sums; no gradient needs it."""
    params = [{"a": normal(i, 8, 8), "b": normal(9 + i, 8, 8)} for i in range(4)]

    def loss(p, x):
        pooled = jnp.mean(x, axis=1)
        for w in p:
            x = x + jnp.tanh(pooled @ w["a"])[:, None]
            pooled = jnp.mean(x, axis=1)
            x = x + jnp.tanh(pooled @ w["b"])[:, None] + pooled[:, None]
        return jnp.mean(x) + squares(pooled)

    return training(loss, params, normal(9, 8, 32, 8))


def test_nothing_is_kept_only_to_make_something_smaller_of_it():
    case = prepare("pooled", pooled_step, SIZES)
    segments = find_segments(case.frame)
    turn = turning_point(case.frame)
    outside = []
    for segment in segments:
        one = rematerializable(case.frame.program, segment.ops, turn)
        outside.append(set() if one is None else {*one.forward} - {*segment.ops})
    assert len(segments) > 1
    assert not any(outside)


def test_what_depends_on_no_argument_goes_through_no_barrier():
    """The compiler would have to write it to memory, and keep it there."""

    def step():
        params = [{"a": normal(i, 16, 16)} for i in range(3)]

        def loss(p, x):
            later = jnp.arange(16) > jnp.arange(8)[:, None]
            for w in p:
                x = x + 0.5 * jnp.tanh(jnp.where(later, x @ w["a"], -1.0))
            return squares(x)

        return training(loss, params, normal(21, 8, 16))

    case = prepare("masked", step, SIZES)
    one = edited(case, presets(case.frame)["data_parallel"])
    barriers = barriers_of(one)
    through = [v for op in barriers for v in op.operands]
    assert through

    assert [v for v in through if not depends(v)] == []


def depends(value):
    """Returns True if a value depends on an argument."""
    if not isinstance(value.owner, ir.Operation | ir.OpView):
        return True
    return any(map(depends, value.owner.operands))


@jax.custom_vjp
def activation(x):
    return x * x


activation.defvjp(lambda x: (x * x, x), lambda x, grad: (jnp.maximum(x, 0.25) * grad,))


def test_clones_wait_though_the_first_that_reads_them_does_not():
    """Its other operand is a constant; the gradient comes with the next op."""

    def step():
        params = [{"a": normal(2 * i, 16, 16), "b": normal(i, 16, 16)} for i in (0, 1)]

        def loss(p, x):
            for w in p:
                x = x + activation(x @ w["a"]) @ w["b"]
            return squares(x)

        return training(loss, params, normal(21, 8, 16))

    case = prepare("activation", step, SIZES)
    one = edited(case, presets(case.frame)["data_parallel"])
    block = shardy.main_function(one.lowering.module).regions[0].blocks[0]
    place = {o.operation: number for number, o in enumerate(block.operations)}
    barriers = barriers_of(one)
    # Of the last segment the backward pass begins with what is rematerialized.
    first, *others = barriers
    assert len(others) == 2
    for barrier in others:
        assert all(map(depends, barrier.operands))
        owners = [v.owner for v in barrier.operands]
        made = [o.operation for o in owners if not isinstance(o, ir.Block)]
        assert max(place[op] for op in made) > place[first]


def test_loops_and_inference_have_nothing_to_compute_again():
    scanned = prepare("scan_mlp", PROGRAMS["scan_mlp"], SIZES)
    assert all(
        not scanned.frame.program.ops[op].body
        for one in rematerializations(scanned.frame)
        for op in one.forward
    )
    serving = prepare("serving", PROGRAMS["serving"], SIZES)
    assert rematerializations(serving.frame) == ()
