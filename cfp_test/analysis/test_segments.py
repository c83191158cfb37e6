"""Segments: what repeats is found without hints, unrolled or in a loop."""

import jax
import jax.numpy as jnp
import pytest

from cfp import models
from cfp.analysis.analyze import analyze
from cfp.analysis.strategies import block_strategies, describe
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp_test.models.tiny import TINY
from cfp_test.programs.common import normal, squares, training
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

SIZES = (("x", 4),)
MESH = make_mesh(SIZES)


def analysis_of(fn, args):
    program, _ = trace(flatten_step(fn, args, {}), MESH)
    return analyze(program, SIZES)


def of_model(name, **options):
    return analysis_of(*models.build(name, **{**TINY[name], **options}))


def kinds(analysis):
    return [segment.kind for segment in analysis.segments]


def contents(analysis, index):
    """Lists the blocks of a segment: their strategies, and how often they run."""
    frame = analysis.frame
    found = []
    for b in analysis.segments[index].blocks:
        block = frame.blocks[b]
        op = frame.program.ops[block.anchor]
        strategies = block_strategies(frame.program, block, frame.mesh)
        found.append((op.repeat, [describe(op, frame.mesh, s) for s in strategies]))
    return found


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        *(("gpt", False), ("llama", True)),
        *at_night((name, remat) for name in ("moe", "bert") for remat in (False, True)),
        *at_night([("gpt", True), ("llama", False)]),
    ],
)
def test_a_loop_over_layers_is_one_segment_like_the_layer(name, remat):
    # Once with numbers of two digits in the names of layers.
    layers = 11 if name == "gpt" and not remat else 6 if name == "moe" else 3
    unrolled = of_model(name, layers=layers, scan=False, remat=remat)
    scanned = of_model(name, layers=layers, scan=True, remat=remat)
    period = 2 if name == "moe" else 1  # a dense and an expert layer in turn
    trips = layers // period
    assert kinds(scanned) == [0, 1, 2]
    assert kinds(unrolled) == [0, *(list(range(1, period + 1)) * trips), period + 1]
    looped = contents(scanned, 1)
    assert {repeat for repeat, _ in looped} == {trips}
    layer = [block for i in range(1, period + 1) for block in contents(unrolled, i)]
    assert [strategies for _, strategies in looped] == [s for _, s in layer]


def test_depth_adds_segments_and_no_kinds():
    few, many = of_model("gpt", layers=3), of_model("gpt", layers=5)
    assert len(many.segments) == len(few.segments) + 2
    assert len(many.representatives) == len(few.representatives)


def _mlp(width, seed):
    return {"a": normal(seed, 16, width), "b": normal(seed + 1, width, 16)}


def _apply(w, x):
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


def test_one_odd_layer_in_the_middle():
    params = [_mlp(48 if i == 3 else 32, 2 * i) for i in range(6)]

    def loss(p, x):
        x = x @ p["in"]
        for w in p["layers"]:
            x = _apply(w, x)
        return squares(x)

    params = {"in": normal(49, 16, 16), "layers": params}
    analysis = analysis_of(*training(loss, params, normal(50, 8, 16)))
    assert kinds(analysis) == [0, 1, 1, 1, 2, 1, 1]


def test_encoder_and_decoder():
    encoder = [_mlp(32, 2 * i) for i in range(3)]
    decoder = [{**_mlp(32, 20 + 2 * i), "c": normal(40 + i, 16, 16)} for i in range(4)]

    def loss(p, batch):
        x, y = batch[0] @ p["x"], batch[1] @ p["y"]
        for w in p["encoder"]:
            x = _apply(w, x)
        for w in p["decoder"]:
            y = _apply(w, y + x @ w["c"])
        return squares(y)

    params = {"x": normal(52, 16, 16), "y": normal(53, 16, 16)}
    params |= {"encoder": encoder, "decoder": decoder}
    batch = (normal(50, 8, 16), normal(51, 8, 16))
    found = analysis_of(*training(loss, params, batch))
    # Whether a decoder's layer ends or begins with what it reads of the encoder is
    # all the same.
    assert len(found.representatives) == 3
    assert sorted(len(s.blocks) for s in found.segments) == [2, 2, 2, 2, 3, 3, 3, 3]


def test_a_loop_inside_of_a_layer_is_not_cut_out():
    params = [{**_mlp(32, 3 * i), "h": normal(3 * i + 2, 16, 16)} for i in range(3)]

    def loss(p, x):
        for w in p:

            def step(h, row, w=w):
                h = jnp.tanh(row + h @ w["h"])
                return h, h

            _, x = jax.lax.scan(step, jnp.zeros((8, 16)), x)
            x = _apply(w, x)
        return squares(x)

    analysis = analysis_of(*training(loss, params, normal(50, 5, 8, 16)))
    assert kinds(analysis) == [0, 0, 0]
    assert [len(s.blocks) for s in analysis.segments] == [3, 3, 3]


def test_a_loop_between_other_layers():
    params = {
        "in": normal(0, 16, 16),
        "layers": jax.tree.map(lambda *w: jnp.stack(w), *[_mlp(32, i) for i in (1, 3)]),
        "out": normal(5, 16, 16),
    }

    def loss(p, x):
        x = x @ p["in"]
        x, _ = jax.lax.scan(lambda x, w: (_apply(w, x), None), x, p["layers"])
        return squares(x @ p["out"])

    analysis = analysis_of(*training(loss, params, normal(50, 8, 16)))
    assert kinds(analysis) == [0, 1, 2]
    assert [len(s.blocks) for s in analysis.segments] == [1, 2, 1]


def test_layers_that_all_read_one_condition():
    """As where each layer's gains are made of the time and the class of an image."""
    layers = [{**_mlp(32, 3 * i), "gain": normal(3 * i + 2, 8, 16)} for i in range(3)]

    def loss(p, batch):
        x, condition = batch
        condition = jnp.tanh(condition @ p["condition"])
        for w in p["layers"]:
            x = x + _apply(w, x * (condition @ w["gain"]))
        return squares(x @ p["out"])

    params = {
        "condition": normal(40, 4, 8),
        "layers": layers,
        "out": normal(41, 16, 4),
    }
    batch = (normal(50, 8, 16), normal(51, 8, 4))
    analysis = analysis_of(*training(loss, params, batch))
    assert kinds(analysis) == [0, 1, 1, 1, 2]
    assert [len(s.blocks) for s in analysis.segments] == [1, 3, 3, 3, 1]
