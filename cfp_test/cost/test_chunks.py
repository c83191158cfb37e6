"""Estimated memory of attention in chunks, beside that of compiled programs."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Choice, Storage
from cfp.analysis.presets import presets
from cfp.analysis.roles import axis_walk
from cfp.analysis.strategies import AxisChoice
from cfp.cost.costs import Costs, segment_candidate
from cfp.kernels import chunked
from cfp.kernels.functions import Way
from cfp.kernels.matches import AttentionProposal, find
from cfp.kernels.problem import AttentionProblem
from cfp.profiling.builder import BuildEnvironment, Built, build
from cfp.profiling.collectives import Rates
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.choices import kernel_variants
from cfp.search.requests import whole_job
from cfp.settings import Replacing
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import cover_values

BATCH, HEADS, HEAD_DIM, CHUNK, DEVICES = 4, 4, 16, 128, 4
HIDDEN = HEADS * HEAD_DIM


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    with patch.object(chunked, "CHUNK", CHUNK):
        yield


def step(params, x):
    def loss(params):
        q, k, v = (
            jnp.einsum("bsh,hnd->bsnd", x, params[name]) for name in ("q", "k", "v")
        )
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k) * HEAD_DIM**-0.5
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        mixed = jnp.einsum("bnqk,bknd->bqnd", weights, v)
        return jnp.square(jnp.einsum("bqnd,ndh->bqh", mixed, params["out"]) - x).mean()

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def arguments(tokens):
    shapes = {name: (HIDDEN, HEADS, HEAD_DIM) for name in ("q", "k", "v")}
    shapes["out"] = (HEADS, HEAD_DIM, HIDDEN)
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    return params, jax.ShapeDtypeStruct((BATCH, tokens, HIDDEN), jnp.float32)


def tokens_spread(frame):
    """Parameters fully sharded, and of each sequence the tokens: in scores, queries."""
    [(_, size)] = frame.mesh
    choices = axis_walk(frame, "data", size, 1)
    program = frame.program
    queries = {}
    for op, match in find(program).found.items():
        rule = program.ops[op].rule
        place = match.letters.index(match.meaning.tokens)
        queries[op] = AxisChoice(rule.major(rule.results[0][place]))
    strategies = [
        (queries.get(block.anchor, one),)
        for block, one in zip(frame.blocks, choices, strict=True)
    ]
    return Choice(tuple(strategies), (Storage.SHARDED,) * len(frame.groups))


def estimated_and_compiled(tokens, name, kernel="chunked"):
    """Bytes that a device needs besides arguments, by estimate and as compiled."""
    mesh = make_mesh((("x", DEVICES),))
    flat = flatten_step(step, arguments(tokens), donate_argnums=0)
    analysis = analyze(trace(flat, mesh)[0], tuple(mesh.shape.items()))
    frame = analysis.frame
    known = presets(frame)
    choice = tokens_spread(frame) if name == "queries" else known[name]
    costs = Costs(analysis, Rates.default([]))
    replacing = Replacing(kernels=("chunked",))
    [segment] = analysis.segments
    plain = segment_candidate(analysis, segment.index, choice)
    [one] = [
        one
        for one in kernel_variants(analysis, segment.kind, plain, replacing)
        if one.kernels == (("attention", kernel),)
    ]
    estimated = costs.temp_bytes(segment.kind, one)
    estimated += costs.least_bytes(segment.kind, one).residual_bytes
    choice = replace(choice, kernels=((segment.index, one.kernels),))
    job = whole_job(analysis, choice, (), name)
    built = build(frame.program, mesh, job, BuildEnvironment())
    assert isinstance(built, Built)
    return estimated, built.temp_bytes


@cover_values(
    tokens=[128, 512, 320],
    way=[
        ("data_parallel", "chunked"),
        ("tensor_parallel", "chunked"),
        ("queries", "chunked"),
        ("queries", "chunked ring"),
    ],
)
def test_attention_in_chunks_needs_about_what_is_estimated(tokens, way):
    estimated, compiled = estimated_and_compiled(tokens, *way)
    assert 0.85 * compiled <= estimated <= 1.35 * compiled


PROBLEM = AttentionProblem(
    batch=4,
    queries=512,
    keys=512,
    heads=8,
    kv_heads=4,
    head_dim=16,
    dtype="float32",
    scale=0.25,
    causal=True,
)


@pytest.mark.parametrize("is_backward", [False, True])
def test_axes_divide_what_they_shard(is_backward):
    def needs(*roles, **changes):
        problem = replace(PROBLEM, **changes)
        match = SimpleNamespace(problem=problem)
        one = AttentionProposal(match, Way("chunked", roles))
        return one.working_bytes({"x": 2}, is_backward)

    whole = needs()
    assert needs(("x", "batch")) == needs(("x", "heads")) == whole // 2
    # Keys are gathered, and of a ring one part is there, with what follows it.
    gathered, ring = needs(("x", "all_gather")), needs(("x", "ring"))
    assert whole // 2 < gathered < whole
    assert is_backward or gathered == ring == needs(queries=256)
    # A chunk has a size of its own, and tokens fill chunks.
    assert needs(queries=511, keys=400) == whole
    scores = 4 * 8 * CHUNK * CHUNK * 4
    assert needs(queries=1, keys=1) < scores < whole
