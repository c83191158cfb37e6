"""Collectives of blocks and parameters of segments, as plans tell them."""

import json
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.profiling.hlo import collectives_in
from cfp.targets import resolve
from cfp.view.words import parameters_text, storage_text
from cfp_test.cost import recurrent
from cfp_test.support.checking import make_mesh


def test_the_gradient_of_a_table_is_told_with_its_lookup():
    """The ops that make it stand in the backward pass of a layer."""
    plan = cfp.plan(
        recurrent.step,
        *recurrent.arguments(64),
        mesh=cfp.described("8xh100"),
        preset="zero1",
        quiet=True,
    )
    sent = [
        sum(move.total_bytes for move in one.moves if move.kind == "reduce-scatter")
        for one in sorted(plan.rows, key=lambda one: one.block)
    ]
    width, words = recurrent.WIDTH, recurrent.WORDS
    kernels = [4 * width * width] * (3 * recurrent.LAYERS)
    assert sent == [4 * words * width, *kernels]


def toy_step(params, x):
    def loss(params):
        return ((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2).mean()

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def test_a_parameter_that_is_stored_whole_is_gathered_after_a_sharded_update(tmp_path):
    """As in the compiled program, in which reduce-scatters are all-reduces on CPUs."""

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    params = {"up": shape(32, 128), "down": shape(128, 32)}
    plan = cfp.plan(
        toy_step,
        *(params, shape(64, 32)),
        mesh=make_mesh((("x", 4),)),
        preset="zero1",
        cache_dir=tmp_path,
        quiet=True,
    )
    size = 4 * 32 * 128
    for row in plan.rows:
        sent = {move.kind: move.total_bytes for move in row.moves}
        assert sent == {"reduce-scatter": size, "all-gather": size}
    text = plan.compile(toy_step, params, shape(64, 32)).as_text()
    found = Counter()
    for one in collectives_in(text):
        found[one.kind] += one.count * one.bytes
    assert found["all-gather"] == 2 * size and "reduce-scatter" not in found


@pytest.fixture(scope="module")
def tied():
    """A plan of a model whose head reads the embedding's table."""
    words = "--tied --layers 2 --hidden 64 --seq 32 --vocab 256"
    target = resolve("gpt", words.split())
    how = {"mesh": cfp.described("4xh100"), "preset": "fully_sharded", "quiet": True}
    return cfp.plan(target.step, *target.args, **how)


def test_a_head_tied_to_an_embedding_says_how_its_parameters_are_stored(tied):
    """They belong to the segment of the embedding."""
    embedding, *_, head = tied.segments
    assert embedding.parameters and not head.parameters
    stored, last = storage_text(tied, 0), len(tied.segments) - 1
    assert storage_text(tied, last) == f"{stored}, tied to another segment"
    assert cfp.Plan.from_json(json.loads(tied.to_json())).segments == tied.segments
    assert storage_text(replace(tied, rows=()), last) == "none updated"
    assert parameters_text("none updated") == "no parameters updated"
    assert parameters_text(stored) == f"parameters {stored}"
    positions = [one.argument for one in embedding.parameters]
    text = storage_text(replace(tied, pinned=tuple(positions[:1])), 0)
    assert text == f"{stored}, 1 pinned"
    every = replace(tied, pinned=tuple(positions))
    assert storage_text(every, 0) == "pinned, update sharded"


def test_a_lookup_in_the_cast_of_a_tied_table_reads_the_table():
    """Beside parameters of its own; one cast, of the head's block, serves both."""

    def step(params, x):
        def loss(params):
            table = params["table"].astype(jnp.bfloat16)
            found = table[x] + params["shift"].astype(jnp.bfloat16)
            for weight in params["weights"]:
                found = jnp.tanh(found @ weight.astype(jnp.bfloat16))
            return (found @ table.T).astype(jnp.float32).var()

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    params = {"table": jnp.ones((512, 64)), "shift": jnp.ones((16, 64))}
    params["weights"] = [jnp.ones((64, 64))] * 3
    tokens = jax.ShapeDtypeStruct((8, 16), "int32")
    how = {"mesh": cfp.described("4xh100"), "preset": "data_parallel", "quiet": True}
    plan = cfp.plan(step, params, tokens, **how)
    lookup, *_, head = plan.rows
    assert lookup.name == "table#1" and head.name == "table#2"
    assert lookup.arguments == ("params/shift", "params/table", "x")
    assert storage_text(plan, lookup.segment) == "as used, some tied to another segment"
    assert storage_text(plan, head.segment) == "as used"
