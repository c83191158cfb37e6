"""Heads in groups on a mesh of two axes: one axis for groups, one for what is in them.

Shapes use: b (batch), q, k (tokens), d (hidden), n (groups), g (heads of a group), e
(features of a head).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.layout import lay_out
from cfp.analysis.presets import presets
from cfp.analysis.strategies import AxisChoice
from cfp.profiling.hlo import collectives_in
from cfp_test.programs.common import normal, squares, training
from cfp_test.support.checking import compile_choice, differences, prepare

SIZES = (("x", 2), ("y", 2))
B, S, D, N, G, E = 2, 16, 32, 2, 4, 8


def step():
    def loss(w, x):
        q = jnp.tensordot(x, w["q"], 1)
        k, v = (jnp.tensordot(x, w[name], 1) for name in "kv")
        q = jnp.tanh(q.reshape(B, S, N, G, E))
        weights = jax.nn.softmax(jnp.einsum("bqnge,bkne->bngqk", q, k), axis=-1)
        mixed = jnp.einsum("bngqk,bkne->bqnge", weights, v)
        mixed = jnp.tanh(mixed.reshape(B, S, N * G, E))
        return squares(x + jnp.tensordot(mixed, w["out"], 2))

    shapes = {"q": (D, N * G, E), "k": (D, N, E), "v": (D, N, E), "out": (N * G, E, D)}
    weights = {name: 0.3 * normal(i, *s) for i, (name, s) in enumerate(shapes.items())}
    return training(loss, weights, normal(9, B, S, D))


@pytest.fixture(scope="module")
def case():
    return prepare("groups", step, SIZES)


def split(frame):
    """Tensor parallelism in which one axis has groups, and the other their heads."""
    choice = presets(frame)["tensor_parallel"]
    blocks = list(choice.blocks)
    for block in frame.blocks:
        rule = frame.program.ops[block.anchor].known_rule
        sizes = [rule.sizes[f] for f in range(len(rule.sizes))]
        if sizes.count(S) == 2:  # Scores, and what they mix.
            axes = AxisChoice(sizes.index(N, 1)), AxisChoice(sizes.index(G))
            blocks[block.index] = axes
    return replace(choice, blocks=tuple(blocks))


def test_groups_and_their_heads_are_sharded_without_moving_them(case):
    """A head stays where it was made; gradients of a group's key are summed."""
    frame = case.frame
    choice = split(frame)
    layout = lay_out(frame, choice)
    program = frame.program
    found = {layout.spec(op.results[0]) for op in program.ops if op.kind == "reshape"}
    heads, groups = ((), (), ("x", "y"), ()), ((), (), ("x",), ("y",), ())
    assert {heads, groups} <= found
    run = compile_choice(case, choice)
    assert not differences(case, run())
    sent = collectives_in(run.compiled.as_text())
    assert {one.kind for one in sent} == {"all-reduce"}
    stream, keys = 4 * B * S * D, 4 * B * S * E
    assert sorted({one.bytes for one in sent if one.group_size == 4}) == [stream]
    assert sum(one.bytes * one.count for one in sent if one.group_size == 2) <= 2 * keys
