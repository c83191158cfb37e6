"""Choices that the compiler's propagation makes of sharded arguments."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Storage, lay_out
from cfp.analysis.presets import (
    BY_HAND,
    FROM_ARGUMENTS,
    activations,
    named_choices,
    presets,
    propagated,
)
from cfp.analysis.strategies import AxisChoice
from cfp.models import build
from cfp.profiling.builder import Built
from cfp.profiling.builder import build as build_job
from cfp.profiling.hlo import collectives_in
from cfp.program.constrain import partition_spec
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.requests import whole_job
from cfp.settings import ConstraintLevel
from cfp_test.support.covering import at_night, cover_pairs

MESHES = [{"x": 4}, {"x": 2, "y": 2}]
SIZES = {
    "layers": 1,
    "batch": 8,
    "seq": 16,
    "hidden": 64,
    "heads": 4,
    "vocab": 256,
    "dtype": "float32",
}
ZOO = {
    "gpt": SIZES,
    "llama": SIZES,
    # Every other layer is one of experts.
    "moe": {**SIZES, "layers": 2, "experts": 4, "expert_group_size": 64},
}


def analysed(step, args, sizes, donated=0):
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        devices=jax.devices()[:4],
        axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
    )
    flat = flatten_step(step, args, donate_argnums=donated)
    program, _ = trace(flat, mesh)
    return analyze(program, tuple(mesh.shape.items())), mesh, flat


def compiled(analysis, mesh, choice, level):
    """A choice's whole program, compiled at a constraint level."""
    job = whole_job(analysis, choice, (), "test", level)
    built = build_job(analysis.frame.program, mesh, job)
    assert isinstance(built, Built)
    return built


def shardings_of(analysis, mesh, choice):
    """Lists shardings of arguments and results, in the step's order."""
    layout = lay_out(analysis.frame, choice)
    positions = range(len(analysis.frame.program.args))
    every = map(layout.arg_spec, positions), layout.output_specs()
    return [
        [NamedSharding(mesh, partition_spec(spec)) for spec in specs] for specs in every
    ]


def counted(collectives):
    return sorted((c.kind, c.bytes, c.count) for c in collectives)


def decoder(batch=8, seq=16, hidden=32, wide=256, heads=4, vocab=64):
    """A layer of attention and a wide MLP between an embedding and a head."""

    def loss(p, tokens, constrain):
        x = constrain(p["embed"][tokens])
        q, k, v = (
            (x @ p[n]).reshape(batch, seq, heads, hidden // heads) for n in "qkv"
        )
        weights = jax.nn.softmax(jnp.einsum("bqnd,bknd->bnqk", q, k))
        mixed = jnp.einsum("bnqk,bknd->bqnd", weights, v).reshape(x.shape)
        x = constrain(x + mixed @ p["o"])
        x = constrain(x + jax.nn.gelu(x @ p["up"]) @ p["down"])
        logits = jax.nn.log_softmax(x @ p["head"])
        return -jnp.take_along_axis(logits, tokens[..., None], 2).mean()

    def step(params, tokens, constrain=lambda x: x):
        value, grads = jax.value_and_grad(loss)(params, tokens, constrain)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = {
        "embed": (vocab, hidden),
        **dict.fromkeys("qkvo", (hidden, hidden)),
        "up": (hidden, wide),
        "down": (wide, hidden),
        "head": (hidden, vocab),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    params = {
        name: 0.1 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return step, (params, jax.random.randint(keys[-1], (batch, seq), 0, vocab))


@pytest.mark.parametrize("sizes", MESHES)
def test_weights_larger_than_activations_stay_and_others_are_gathered(sizes):
    step, args = decoder()
    analysis, *_ = analysed(step, args, sizes)
    frame = analysis.frame
    choice = propagated(frame)[BY_HAND]
    assert set(choice.storage) == {Storage.LARGEST}
    assert choice not in presets(frame).values()
    ways = {}
    for block, strategy in zip(frame.blocks, choice.blocks, strict=True):
        op = frame.program.ops[block.anchor]
        for value, dims in zip(op.operands, op.rule.operands, strict=False):
            value = frame.program.values[value]
            if value.producer < 0 and value.id in frame.program.args:
                name = frame.program.arg_names[frame.program.args.index(value.id)]
                ways[name] = op.rule, dims, set(strategy)
    for name in ("q", "k", "v", "o"):
        rule, dims, [one] = ways[f"params/{name}"]
        assert one.inner not in {f for dim in dims for f in dim}, "its weight is whole"
        assert one.inner in rule.results[0][0], "the batch is sharded"
    rule, dims, [up] = ways["params/up"]
    assert up == AxisChoice(rule.major(dims[1])), "by columns"
    rule, dims, [down] = ways["params/down"]
    assert down.inner == rule.major(dims[0]), "by rows"
    assert down.exit in rule.results[0][0], "scattered to the batch"


@pytest.mark.parametrize("sizes", MESHES)
def test_activations_are_what_several_blocks_read(sizes):
    step, args = decoder()
    analysis, *_ = analysed(step, args, sizes)
    program = analysis.frame.program
    found = activations(analysis.frame)
    shapes = {program.values[v].shape for v in found}
    assert shapes == {(8, 16, 32)}, "the residual stream, and its cotangents"
    assert {spec[0] for spec in found.values()} == {tuple(sizes)}


@pytest.mark.parametrize("sizes", MESHES)
def test_with_activations_constrained_it_is_what_is_sharded_by_hand(sizes):
    step, args = decoder()
    analysis, mesh, _ = analysed(step, args, sizes)
    axes = tuple(sizes)

    def by_hand(leaf):
        widest = max(range(leaf.ndim), key=lambda d: leaf.shape[d])
        spec = [None] * widest + [axes if len(axes) > 1 else axes[0]]
        return NamedSharding(mesh, PartitionSpec(*spec))

    batch = NamedSharding(mesh, PartitionSpec(axes))
    shardings = jax.tree.map(by_hand, args[0])
    jitted = jax.jit(
        lambda p, t: step(p, t, lambda x: jax.lax.with_sharding_constraint(x, batch)),
        in_shardings=(shardings, batch),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    wanted = collectives_in(jitted.lower(*args).compile().as_text())
    choice = propagated(analysis.frame)[BY_HAND]
    mine = shardings_of(analysis, mesh, choice)[0]
    theirs = jax.tree.leaves((shardings, batch))
    for one, other, leaf in zip(mine, theirs, jax.tree.leaves(args), strict=True):
        assert one.is_equivalent_to(other, leaf.ndim)
    built = compiled(analysis, mesh, choice, ConstraintLevel.ACTIVATIONS)
    assert counted(built.collectives) == counted(wanted)


@pytest.mark.parametrize(
    ("model", "name", "sizes"),
    [
        ("llama", BY_HAND, MESHES[0]),
        ("gpt", FROM_ARGUMENTS, MESHES[1]),
        *at_night([("gpt", BY_HAND, MESHES[1])]),
        *at_night((model, BY_HAND, MESHES[0]) for model in ("gpt", "moe")),
        *at_night(
            (model, name, MESHES[1])
            for model in ("llama", "moe")
            for name in (BY_HAND, FROM_ARGUMENTS)
        ),
    ],
    ids=str,
)
def test_with_arguments_constrained_it_is_jit_with_those_shardings(model, sizes, name):
    step, args = build(model, **ZOO[model])
    analysis, mesh, flat = analysed(step, args, sizes)
    choice = named_choices(analysis.frame)[name]
    built = compiled(analysis, mesh, choice, ConstraintLevel.ARGUMENTS)
    ins, outs = shardings_of(analysis, mesh, choice)
    # Every matrix is sharded along its largest dim; of attention's output [heads,
    # head_dim, hidden], which is as large either way, along its first.
    layout = lay_out(analysis.frame, choice)
    seen = set()
    for group in analysis.frame.groups:
        if sum(size > 1 for size in group.shape) > 1:
            spec = layout.arg_spec(group.args[0])
            widest = max(range(len(group.shape)), key=lambda d: group.shape[d])
            square = prod(group.shape[:widest]) == group.shape[widest]
            seen.add(square)
            assert spec[0 if square else widest] == tuple(sizes)
    assert seen == {True, False}
    job = whole_job(analysis, choice, (), "test", ConstraintLevel.ARGUMENTS)
    program = analysis.frame.program
    held = {op for op, _ in job.constraints.uses}
    assert all(program.ops[op].rule.held for op in held)
    if len(sizes) > 1:
        # Left to itself there, XLA sums wrong pairs in some products.
        assert not job.constraints.values
        assert {program.ops[op].kind for op in held} == {"dot_general"}
        return
    assert not held
    jitted = jax.jit(
        lambda *leaves: jax.tree.leaves(flat.flat_fn(*leaves)),
        in_shardings=tuple(ins),
        out_shardings=outs,
        donate_argnums=tuple(i for i, d in enumerate(flat.donated) if d),
        keep_unused=True,
    )
    text = jitted.lower(*flat.avals).compile().as_text()
    assert counted(built.collectives) == counted(collectives_in(text))


@cover_pairs(name=[BY_HAND, FROM_ARGUMENTS], sizes=MESHES, level=ConstraintLevel)
def test_it_computes_what_one_device_does(name, sizes, level):
    step, args = decoder()
    analysis, mesh, _ = analysed(step, args, sizes)
    choice = propagated(analysis.frame)[name]
    built = compiled(analysis, mesh, choice, level)
    program, leaves = analysis.frame.program, jax.tree.leaves(args)
    part = whole_job(analysis, choice, (), "test", level).part
    ins, _ = shardings_of(analysis, mesh, choice)
    given = [program.args.index(value) for value in part.inputs]
    put = [jax.device_put(jnp.array(leaves[p]), ins[p]) for p in given]
    found = dict(zip(part.outputs, built.compiled(*put), strict=True))
    for value, wanted in zip(
        program.outputs, jax.tree.leaves(step(*args)), strict=True
    ):
        np.testing.assert_allclose(found[value], wanted, rtol=2e-4, atol=1e-5)


def test_without_state_there_is_nothing_to_propagate():
    def predict(weights, x):
        return jnp.tanh(x @ weights)

    args = (jnp.ones((16, 16)), jnp.ones((8, 16)))
    analysis, *_ = analysed(predict, args, {"x": 4}, donated=())
    assert propagated(analysis.frame) == {}
    assert named_choices(analysis.frame) == presets(analysis.frame)


@pytest.mark.parametrize("sizes", [{"x": 4, "y": 1}, {"y": 1, "x": 4}])
def test_an_axis_of_one_device_changes_nothing(sizes):
    """Shardy takes such axes out of meshes, of which it then keeps one of each kind."""
    step, args = decoder()
    found = []
    for axes in ({"x": 4}, sizes):
        devices = jax.devices()[:4]
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)
        program, _ = trace(flatten_step(step, args, {}), mesh)
        frame = analyze(program, tuple(axes.items())).frame
        choices = propagated(frame)
        layouts = {name: lay_out(frame, one) for name, one in choices.items()}
        count = range(len(program.args))
        found.append(
            {name: [*map(one.arg_spec, count)] for name, one in layouts.items()}
        )
    assert found[0] and found[0] == found[1]
