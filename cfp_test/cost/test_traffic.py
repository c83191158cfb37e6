"""Bytes that fused kernels move, of attentions written in several ways."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from cfp.analysis.contractions import is_contraction
from cfp.cost.memory import SHIFT_BYTES, moved_bytes
from cfp.platform import make_mesh
from cfp.program.graph import Program
from cfp.program.step import flatten_step
from cfp.program.trace import trace

BATCH, TOKENS, HEADS, WIDTH = 2, 256, 4, 8
SCORES_BYTES = 2 * BATCH * HEADS * TOKENS * TOKENS  # In bfloat16.


def _program(step, *args) -> Program:
    return trace(flatten_step(step, args), make_mesh((("x", 2),)))[0]


def _library(scores):
    return jax.nn.softmax(scores, -1)


def _written_out(scores):
    shifted = scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(shifted)
    return weights / weights.sum(-1, keepdims=True)


def _masked(scores):
    seen = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    return _library(jnp.where(seen, scores, -1e30))


def _scaled(scores):
    return _library(scores / 8.0 + 1.0)


def _scores_moved(weights_of, differentiated):
    """Times that scores, or what is as large, are read or written without products."""

    def attend(q, k, v):
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k).astype(jnp.float32)
        weights = weights_of(scores).astype(v.dtype)
        return jnp.einsum("bnqk,bknd->bqnd", weights, v)

    def step(q, k, v, cotangent):
        if not differentiated:
            return attend(q, k, v)
        return jax.vjp(attend, q, k, v)[1](cotangent)

    shape = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, WIDTH), jnp.bfloat16)
    program = _program(step, *(shape,) * 4)
    moved = moved_bytes(program)
    found = sum(moved.get(op.id, 0) for op in program.ops if not is_contraction(op))
    return found / SCORES_BYTES


@pytest.mark.parametrize("weights_of", [_library, _written_out, _masked, _scaled])
def test_a_softmax_moves_its_scores_three_times_each_way(weights_of):
    # XLA's kernels, as compiled for an H200: one reads scores for their maximum, one
    # reads them and writes weights; behind, one reads two of them and writes a third.
    forward = _scores_moved(weights_of, differentiated=False)
    assert forward == pytest.approx(3, rel=0.1)
    both = _scores_moved(weights_of, differentiated=True)
    assert both == pytest.approx(6, rel=0.15)


def test_elementwise_ops_are_one_kernel():
    def step(x, w):
        return jnp.tanh(jnp.exp(x) * 2.0 + 1.0) @ w

    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    w = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    program = _program(step, x, w)
    moved = moved_bytes(program)
    others = [moved.get(op.id, 0) for op in program.ops if not is_contraction(op)]
    assert sum(others) == 2 * 4 * 512 * 256


def test_what_many_read_is_written_once():
    def step(x, ws):
        total, layers = x, []
        for w in ws:
            total = total + jnp.tanh(total @ w)
            layers.append(total)
        return sum(one.sum() for one in layers)

    size, count = 128, 6
    shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
    program = _program(step, shape, [shape] * count)
    moved = moved_bytes(program)
    others = sum(moved.get(op.id, 0) for op in program.ops if not is_contraction(op))
    # Each layer reads two and writes one, and its sum reads one; a few are read again.
    assert 3 * count <= others / (4 * size * size) <= 5 * count


ELEMENTS = 512 * 1024


def _bernoulli(key, y):
    return jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0.0)


def _noise(key, y):
    return y + jax.random.normal(key, y.shape)


def _uniform(key, y):
    return y * jax.random.uniform(key, y.shape, y.dtype)


def _stochastic_rounding(key, y):
    """Adds random bits below those that are kept."""
    bits = jax.lax.bitcast_convert_type(y, jnp.uint32)
    low = jax.random.bits(key, y.shape) >> 16
    return jax.lax.bitcast_convert_type((bits + low) >> 16 << 16, jnp.float32)


@pytest.mark.parametrize("use", [_bernoulli, _noise, _uniform, _stochastic_rounding])
def test_random_numbers_are_made_where_they_are_read(use):
    """As GPUs have them: for virtual CPU devices JAX writes rounds as a loop."""

    def moved(use):
        def step(x, w, key):
            return jnp.tanh(use(jax.random.wrap_key_data(key), x @ w)).sum()

        mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,))
        shapes = ((512, 256), jnp.float32), ((256, 1024), jnp.float32)
        args = [jax.ShapeDtypeStruct(*one) for one in (*shapes, ((2,), jnp.uint32))]
        program, _ = trace(flatten_step(step, args), mesh)
        return sum(moved_bytes(program).values())

    more = moved(use) - moved(lambda key, y: y)
    assert 0.0 < more <= 64 * SHIFT_BYTES * ELEMENTS


def test_a_loop_writes_a_layer_of_what_it_keeps_and_reads_no_constants():
    """The stack is updated in place, and a mask is made where it is read."""
    layers, rows, width = 8, 256, 64

    def step(weights, x):
        seen = jnp.tril(jnp.ones((rows, rows), bool))

        def layer(x, w):
            scores = jnp.where(seen, x @ w @ x.T, 0.0)
            return jnp.tanh(scores @ x), x

        return jax.lax.scan(layer, x, weights)[1]

    shapes = (layers, width, width), (rows, width)
    program = _program(step, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    moved, size = moved_bytes(program), 4 * rows * width
    kept = [op for op in program.ops if op.kind == "dynamic_update_slice"]
    assert [moved[op.id] for op in kept] == pytest.approx([2 * size], rel=1e-3)
    # Scores are read once and written once; the mask is not read.
    masked = [op for op in program.ops if op.kind == "select" and op.repeat > 1]
    assert [moved[op.id] for op in masked] == pytest.approx([2 * 4 * rows**2], rel=1e-3)
