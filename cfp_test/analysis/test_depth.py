"""Deep programs are planned: no walk recurses over the depth of a program."""

import sys
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.analyze import analyze, program_flops
from cfp.analysis.layout import constraints, lay_out
from cfp.analysis.presets import named_choices
from cfp.analysis.segments import _Cutter
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.support.checking import make_mesh

MESH = (("x", 4),)
WIDTH, LAYERS = 64, 200


def layered(layer):
    """A step that trains a layer's weights, the layer written out 200 times."""

    def step(weights, x, mask):
        def loss(weights):
            y, carried = x, mask
            for w in weights:
                y, carried = layer(w, y, carried)
            return jnp.mean((carried @ y) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step


def plain(w, x, carried):
    return jnp.tanh(x @ w["up"]) @ w["down"] + x, carried


def behind_barriers(w, x, carried):
    """Each layer hands all it knows on through a barrier, as rematerialization does."""
    x, carried, w = jax.lax.optimization_barrier((x, carried, w))
    return plain(w, x, carried)


def turned(w, x, carried):
    """Each layer transposes and converts what it hands on."""
    other = jnp.bfloat16 if carried.dtype == jnp.float32 else jnp.float32
    return plain(w, x, carried.T.astype(other))


def looped(w, x, carried):
    """Each layer is a loop of its own."""

    def turn(x, _):
        return plain(w, x, carried)[0], None

    return jax.lax.scan(turn, x, None, length=2)[0], carried


def arguments():
    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return [{"up": shape, "down": shape}] * LAYERS, shape, shape


def test_two_hundred_layers_are_planned(tmp_path):
    plan = cfp.plan(
        layered(plain), *arguments(), mesh=make_mesh(MESH), cache_dir=tmp_path
    )
    assert len(plan.arg_specs) == 2 * LAYERS + 2
    assert len(plan.segments) >= LAYERS


@pytest.fixture
def little_stack():
    """Lets calls nest half as deep as there are layers."""
    limit, depth, frame = sys.getrecursionlimit(), 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back

    @contextmanager
    def limited():
        sys.setrecursionlimit(depth + LAYERS // 2)
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)

    return limited


@pytest.mark.parametrize("layer", [plain, behind_barriers, turned, looped])
def test_no_walk_recurses_over_depth(layer, little_stack):
    mesh = make_mesh(MESH)
    program, _ = trace(flatten_step(layered(layer), arguments()), mesh)
    with little_stack():
        analysis = analyze(program, MESH)
        for choice in named_choices(analysis.frame).values():
            assert constraints(lay_out(analysis.frame, choice)).values
        assert program_flops(program)


def test_segments_of_many_stages(little_stack):
    """Each of the stages has two layers alike, and each layer reads the one before."""
    count = 2 * 60
    before = [1 << unit >> 1 for unit in range(count)]
    marks = [unit // 2 for unit in range(count)]
    with little_stack():
        cuts = _Cutter(marks, before, [False] * count).cut(0, count)
    assert cuts == [(unit, unit + 1) for unit in range(count)]
