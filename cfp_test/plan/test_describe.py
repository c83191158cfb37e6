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
    assert not head.parameters and head.shared[0] in embedding.parameters
    assert not head.parameters and head.shown_storage is head.shared[0].storage
    stored = storage_text(embedding)
    assert storage_text(head) == f"{stored}, tied to another segment"
    assert cfp.Plan.from_json(json.loads(tied.to_json())).segments == tied.segments
    assert storage_text(replace(head, shared=())) == "none updated"
    assert parameters_text("none updated") == "no parameters updated"
    assert parameters_text(stored) == f"parameters {stored}"
    positions = [one.argument for one in embedding.parameters]
    text = storage_text(embedding, positions[:1])
    assert text == f"{stored}, 1 pinned"
    assert storage_text(embedding, positions) == "pinned, update sharded"


@pytest.mark.parametrize("damage", ["stored otherwise", "twice", "unknown", "own too"])
def test_what_a_segment_shares_is_as_its_owner_has_it(tied, damage):
    data = json.loads(tied.to_json())
    embedding, *_, head = data["segments"]
    shared = head["shared"]
    if damage == "stored otherwise":
        shared[0]["storage"] = "used"
    elif damage == "twice":
        shared.append(shared[0])
    elif damage == "unknown":
        own = [one["argument"] for s in data["segments"] for one in s["parameters"]]
        shared[0]["argument"] = min({*range(len(data["arg_names"]))} - {*own})
    else:
        embedding["shared"] = [data["segments"][1]["parameters"][0]]
    with pytest.raises(cfp.PlanMismatch, match="damaged plan, in segments"):
        cfp.Plan.from_json(data)
