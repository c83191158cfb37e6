"""Tensor parallelism where there are fewer heads of keys and values than devices.

Shapes use: b (batch), s (tokens), d (hidden), h (heads), n (heads of keys and values),
g (query heads that share one), e (features of a head).
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfp.analysis.analyze import analyze
from cfp.analysis.layout import Layout, lay_out
from cfp.analysis.presets import presets
from cfp.profiling.builder import Built
from cfp.profiling.builder import build as build_job
from cfp.profiling.hlo import collectives_in
from cfp.program.constrain import partition_spec
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.requests import whole_job
from cfp.settings import ConstraintLevel
from cfp_test.programs.common import normal, squares, training
from cfp_test.support.checking import make_mesh
from cfp_test.support.covering import at_night

SIZES = (("x", 4),)
B, S, D, H, E = 2, 64, 32, 8, 8
KV_HEADS = 2
Weights = Mapping[str, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q = q.reshape(B, S, k.shape[2], -1, E)
    weights = jax.nn.softmax(jnp.einsum("bqngd,bknd->bngqk", q, k), axis=-1)
    return jnp.einsum("bngqk,bknd->bqngd", weights, v).reshape(B, S, H, E)


def repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def rotated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Concatenated features hide how they were sharded."""
    q, k = (jnp.concatenate(jnp.split(x, 2, axis=-1)[::-1], -1) for x in (q, k))
    return grouped(q, k, v)


FORMS: Mapping[str, Attend] = {
    "grouped": grouped,
    "repeated": repeated,
    "rotated": rotated,
    "jax.nn": jax.nn.dot_product_attention,
}


def layer(attend: Attend, kv_heads: int):
    """A training step of one layer, and its arguments."""

    def loss(w: Weights, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w[name]) for name in "qkv")
        x = x + jnp.einsum("bshe,hed->bsd", attend(q, k, v), w["out"])
        return squares(x + jax.nn.gelu(x @ w["up"]) @ w["down"])

    shapes = {
        "q": (D, H, E),
        "k": (D, kv_heads, E),
        "v": (D, kv_heads, E),
        "out": (H, E, D),
        "up": (D, 4 * D),
        "down": (4 * D, D),
    }
    weights = {name: 0.1 * normal(i, *s) for i, (name, s) in enumerate(shapes.items())}
    return training(loss, weights, normal(9, B, S, D))


# What a person writes: query heads are sharded, keys and values are not.
BY_HAND = {
    "q": (None, "x"),
    "k": (),
    "v": (),
    "out": ("x",),
    "up": (None, "x"),
    "down": ("x",),
}


def planned(attend: Attend, kv_heads: int):
    """The step, its mesh, its analysis and what tensor parallelism makes of it."""
    step, args = layer(attend, kv_heads)
    mesh, flat = make_mesh(SIZES), flatten_step(step, args, {})
    program, _ = trace(flat, mesh)
    analysis = analyze(program, SIZES)
    choice = presets(analysis.frame)["tensor_parallel"]
    return flat, args, mesh, analysis, choice


@pytest.mark.parametrize(
    ("form", "kv_heads"),
    [*((form, KV_HEADS) for form in FORMS), ("grouped", 1)],
)
def test_query_heads_are_sharded_and_those_of_keys_are_whole(form, kv_heads):
    *_, analysis, choice = planned(FORMS[form], kv_heads)
    layout, program = lay_out(analysis.frame, choice), analysis.frame.program
    found = {
        name.removeprefix("state/params/"): partition_spec(layout.arg_spec(i))
        for i, name in enumerate(program.arg_names)
        if name.startswith("state/params/")
    }
    assert found == {name: PartitionSpec(*spec) for name, spec in BY_HAND.items()}


def sent(text: str) -> int:
    """Bytes of all collectives of a compiled program."""
    return sum(one.bytes * one.count for one in collectives_in(text))


def by_hand(attend: Attend, layout: Layout, mesh: Mesh) -> int:
    """Bytes that the step sends where a person also constrains what attention reads."""

    def constrained(x: jax.Array, *spec: str | None) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(x, sharding)

    def constrained_attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = constrained(q, None, None, "x"), constrained(k), constrained(v)
        return constrained(attend(q, k, v), None, None, "x")

    step, args = layer(constrained_attend, KV_HEADS)
    flat = flatten_step(step, args, {})
    every = map(layout.arg_spec, range(len(flat.avals))), layout.output_specs()
    ins, outs = (
        [NamedSharding(mesh, partition_spec(spec)) for spec in specs] for specs in every
    )
    jitted = jax.jit(
        lambda *leaves: jax.tree.leaves(flat.flat_fn(*leaves)),
        in_shardings=tuple(ins),
        out_shardings=outs,
    )
    return sent(jitted.lower(*flat.avals).compile().as_text())


@pytest.mark.parametrize("form", ["grouped", *at_night(["repeated", "jax.nn"])])
def test_with_arguments_constrained_it_sends_no_more_than_by_hand(form):
    flat, args, mesh, analysis, choice = planned(FORMS[form], KV_HEADS)
    level = ConstraintLevel.ARGUMENTS
    job = whole_job(analysis, choice, (), "test", level)
    built = build_job(analysis.frame.program, mesh, job)
    assert isinstance(built, Built)
    layout = lay_out(analysis.frame, choice)
    assert sent(built.compiled.as_text()) <= by_hand(FORMS[form], layout, mesh)
    leaves = flat.flatten(args, {})
    expected = jax.jit(flat.flat_fn)(*leaves)
    placed = jax.device_put(leaves, list(built.compiled.input_shardings[0]))
    found = built.compiled(*placed)
    for mine, theirs in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_no_scores_are_reduced():
    *_, mesh, analysis, choice = planned(grouped, KV_HEADS)
    job = whole_job(analysis, choice, (), "test", ConstraintLevel.EVERYTHING)
    built = build_job(analysis.frame.program, mesh, job)
    assert isinstance(built, Built)
    found = collectives_in(built.compiled.as_text())
    reduced = {c.bytes for c in found if c.kind == "all-reduce"}
    assert reduced == {4 * B * S * D}, "the residual stream"
