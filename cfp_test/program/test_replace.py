"""Other functions in the place of ops: in whole programs, parts, and loops."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.layout import Choice, Storage, constraints, lay_out
from cfp.analysis.presets import presets
from cfp.analysis.segments import find_segments
from cfp.cost.memory import turning_point
from cfp.program.constrain import constrain, rematerializable
from cfp.program.part import cut_part
from cfp.program.replace import Replacement, Stage, erase_unread, is_in_order
from cfp.program.trace import lower_step
from cfp_test.program.stacks import rematerializations
from cfp_test.programs.common import normal, squares, training
from cfp_test.support.checking import (
    differences,
    evaluate,
    prepare,
    run_part,
    shardings,
    to_host,
)

SIZES = (("x", 4),)


@dataclass(frozen=True)
class Tanh:
    """tanh on each device by itself, with another residual than JAX's."""

    factor: float = 1.0

    def stages(self, mesh):
        spec = jax.P("x")

        @jax.jit
        def inner(x):
            return self.factor * jnp.sinh(x) / jnp.cosh(x)

        def spread(function, count):
            specs = (spec,) * count
            return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=spec)

        def forward(x):
            return spread(inner, 1)(x), jnp.cosh(x)

        def backward(dy, cosh):
            return [spread(lambda dy, cosh: dy / cosh**2, 2)(dy, cosh)]

        return forward, backward


def layer(w, x):
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


def weights(count):
    return [
        {"a": normal(2 * i, 16, 32), "b": normal(2 * i + 1, 32, 16)}
        for i in range(count)
    ]


def stack_step():
    def loss(p, x):
        for w in p["layers"]:
            x = layer(w, x)
        return squares(x @ p["head"])

    params = {"layers": weights(3), "head": normal(20, 16, 8)}
    return training(loss, params, normal(21, 8, 16))


def scanned_step():
    def loss(p, x):
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, p["layers"])
        return squares(x @ p["head"])

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *weights(3))
    return training(
        loss, {"layers": stacked, "head": normal(20, 16, 8)}, normal(21, 8, 16)
    )


@pytest.fixture(scope="module")
def case():
    return prepare("stack", stack_step, SIZES)


def replacements(program, functions):
    """The tanh of each layer and its gradient: ``dy - dy * tanh**2`` as JAX has it."""
    found = []
    for op in program.ops:
        if op.kind != "tanh":
            continue
        [made] = op.results
        reader, dx = gradient(program, made)
        stages = (Stage(((op.id, 0),), (made,)), Stage((reader,), (dx,)))
        assert all(is_in_order(program, stage) for stage in stages)
        found.append(Replacement("tanh", op.id, stages, functions))
    return tuple(found)


def gradient(program, made):
    """The op reads the incoming gradient, and makes ``dy * (1 - y) * (1 + y)``.

    However JAX writes it, it ends in an op that reads nothing but what is elementwise.
    """
    multiplies = [
        o for o, _ in program.users[made] if program.ops[o].kind != "dot_general"
    ]
    reached, incoming, last = {made}, None, None
    stack = list(multiplies)
    while stack:
        op = program.ops[stack.pop(0)]
        if op.kind not in ("multiply", "subtract", "add"):
            continue
        for index, v in enumerate(op.operands):
            producer = program.values[v].producer
            if producer >= 0 and program.ops[producer].kind == "dot_general":
                incoming = (op.id, index)
        last = op
        reached.add(op.results[0])
        stack += [o for o, _ in program.users[op.results[0]]]
    assert incoming is not None and last is not None
    return incoming, last.results[0]


def edited(case, functions, choice, again=False, found=None):
    layout = lay_out(case.frame, choice)
    ins, outs = shardings(case, layout)
    lowering = lower_step(case.step, ins, outs)
    program = case.frame.program
    constrained = dataclasses.replace(
        constraints(layout),
        replaced=found or replacements(program, functions),
        rematerialized=rematerializations(case.frame) if again else (),
    )
    constrain(lowering.module, program, case.mesh, constrained)
    erase_unread(lowering.module)
    return lowering, ins


def results(case, lowering, ins):
    compiled = lowering.lowered.compile()
    arrays = [jax.device_put(x, s) for x, s in zip(case.leaves, ins, strict=True)]
    return jax.tree.leaves(compiled(*arrays))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("preset", ["data_parallel", "fully_sharded"])
def test_the_step_computes_the_same(case, preset, again):
    choice = presets(case.frame)[preset]
    lowering, ins = edited(case, Tanh(), choice, again)
    text = str(lowering.module)
    assert "stablehlo.tanh" not in text
    assert text.count("sdy.manual_computation") == (9 if again else 6)
    assert differences(case, results(case, lowering, ins)) == {}


def test_it_is_the_new_functions_that_run(case):
    choice = presets(case.frame)["data_parallel"]
    lowering, ins = edited(case, Tanh(factor=2.0), choice)
    assert differences(case, results(case, lowering, ins)) != {}


@pytest.mark.parametrize("again", [False, True])
def test_a_part_computes_the_same(case, again):
    """A layer by itself; what others read of it is what the new functions made."""
    frame = case.frame
    segment = find_segments(frame)[1]
    part = cut_part(frame.program, segment.ops)
    choice = presets(frame)["data_parallel"]
    layout = lay_out(frame, Choice(choice.blocks, (Storage.USED,) * len(frame.groups)))
    known = evaluate(case, (*part.inputs, *part.outputs))
    turn = turning_point(frame)
    one = rematerializable(frame.program, segment.ops, turn)
    constrained = dataclasses.replace(
        constraints(layout),
        replaced=replacements(frame.program, Tanh()),
        rematerialized=(one,) if again else (),
    )
    outputs = run_part(case, layout, part, known, constrained)
    for v, got in zip(part.outputs, outputs, strict=True):
        assert to_host(got) == pytest.approx(known[v], rel=1e-5, abs=1e-6)


def test_a_value_that_leaves_a_part_is_the_new_one(case):
    frame = case.frame
    (first, *_) = replacements(frame.program, Tanh(factor=2.0))
    part = cut_part(frame.program, [first.op])
    assert part.outputs == first.stages[0].makes
    layout = lay_out(frame, presets(frame)["data_parallel"])
    constrained = dataclasses.replace(constraints(layout), replaced=(one_stage(first),))
    known = evaluate(case, (*part.inputs, *part.outputs))
    [got] = run_part(case, layout, part, known, constrained)
    assert to_host(got) == pytest.approx(2.0 * known[part.outputs[0]], rel=1e-5)


def one_stage(one):
    """The forward pass alone."""
    return dataclasses.replace(one, stages=one.stages[:1])


def test_in_the_body_of_a_loop():
    case = prepare("scanned", scanned_step, SIZES)
    program = case.frame.program
    [tanh] = [op for op in program.ops if op.kind == "tanh"]
    assert tanh.parent >= 0
    stage = Stage(((tanh.id, 0),), tanh.results)
    found = (Replacement("tanh", tanh.id, (stage,), Tanh()),)
    choice = presets(case.frame)["data_parallel"]
    lowering, ins = edited(case, Tanh(), choice, found=found)
    assert "stablehlo.tanh" not in str(lowering.module)
    assert differences(case, results(case, lowering, ins)) == {}


def test_what_is_read_too_late_is_out_of_order(case):
    program = case.frame.program
    first, *_, last = replacements(program, Tanh())
    assert not is_in_order(program, Stage(last.stages[0].reads, first.stages[0].makes))
