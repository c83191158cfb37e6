"""Decoding with a cache of keys and values: sharded by rows, and by heads."""

import re

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.analysis.layout import lay_out
from cfp.analysis.presets import presets
from cfp_test.analysis.generating import (
    GENERATING,
    HEADS,
    ROWS,
    WIDTH,
    donating,
)
from cfp_test.programs.interface import decoding_step
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import compile_choice, differences, prepare
from cfp_test.support.covering import cover_values

MESHES = {"x4": (("x", 4),), "x2y2": (("x", 2), ("y", 2))}
COLLECTIVE = r" (all-\w+|reduce-scatter|collective-permute)(-start)?\("


def caches_of(case, layout):
    """For each cache among the arguments its shape and its sharding."""
    program = case.frame.program
    return [
        (program.shape(program.args[i]), layout.arg_spec(i))
        for i, name in enumerate(program.arg_names)
        if "cache" in name
    ]


@pytest.mark.parametrize("name", GENERATING)
def test_rows_that_a_loop_generates_need_no_collective(name):
    """A device has its rows of every cache, as by hand, in whichever way it is kept."""
    case = prepare(name, GENERATING[name], MESHES["x4"])
    choice = presets(case.frame)["data_parallel"]
    run = compile_choice(case, choice)
    assert not re.search(COLLECTIVE, run.compiled.as_text())
    assert differences(case, run()) == {}
    caches = caches_of(case, lay_out(case.frame, choice))
    assert bool(caches) == (name != "behind a prompt")
    for shape, spec in caches:
        rows = shape.index(ROWS)
        assert spec == tuple(("x",) if d == rows else () for d in range(len(shape)))
    needed = sum(x.nbytes // (4 if ROWS in x.shape else 1) for x in case.leaves)
    assert run.compiled.memory_analysis().argument_size_in_bytes <= needed


@pytest.mark.parametrize(
    "name", ["written first", "read first", "scanned layers", "carried layers"]
)
def test_heads_that_a_loop_generates_stay_where_they_are(name):
    """Also of weights that an outer loop hands to an inner one."""
    case = prepare(name, GENERATING[name], MESHES["x4"])
    choice = presets(case.frame)["tensor_parallel"]
    run = compile_choice(case, choice)
    text = run.compiled.as_text()
    layout = lay_out(case.frame, choice)
    for shape, spec in caches_of(case, layout):
        heads = shape.index(HEADS)
        assert spec == tuple(("x",) if d == heads else () for d in range(len(shape)))
    # What is sent are rows of activations, and the scores' maxima: no cache, no weight.
    sent = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-\w+)(?:-start)?\(", text)
    assert sent and {*sent} <= {f"{ROWS},{WIDTH}", f"{ROWS},4"}
    assert differences(case, run()) == {}


@pytest.mark.parametrize("name", GENERATING)
def test_what_updates_nothing_has_no_update_to_shard(name):
    """State that is written and read, or handed back as it is."""
    frame = prepare(name, GENERATING[name], MESHES["x4"]).frame
    assert "zero1" not in presets(frame)
    assert not any(group.has_update for group in frame.groups)


def test_a_loop_is_planned_as_by_hand(tmp_path):
    generate, args, options = donating()
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    plan = cfp.plan(
        generate, *args, mesh=mesh, cache_dir=tmp_path, quiet=True, **options
    )
    rows = jax.sharding.PartitionSpec("x")
    _, caches, token, _ = plan.in_shardings
    assert {leaf.spec for leaf in jax.tree.leaves((caches, token))} == {rows}
    assert not re.search(COLLECTIVE, plan.compile(generate, *args).as_text())
    assert "update sharded" not in str(plan)
    assert "parameters as used" in str(plan)


@cover_values(name=["decoding", "batched_decoding"], mesh=MESHES)
def test_heads_are_sharded_and_right(name, mesh):
    case = prepare(name, PROGRAMS[name], MESHES[mesh])
    run = compile_choice(case, presets(case.frame)["tensor_parallel"])
    text = run.compiled.as_text()
    rows = case.expected[0].shape[0]
    # A device has its heads of the cache, and no cache is gathered.
    local = r"f32\[\d+,8,(\d),4\]"
    assert {int(heads) for heads in re.findall(local, text)} <= {1, 2}, rows
    assert differences(case, run()) == {}


def test_a_budget_that_sharded_heads_fit_is_kept(tmp_path):
    serve, *_ = decoding_step(length=65536)

    def generate(params, cache, row, position):
        def one(carry, _):
            cache, row, position = carry
            cache, row = serve(params, cache, row, position)
            return (cache, row, position + 1), row

        return jax.lax.scan(one, (cache, row, position), None, length=16)

    row = jax.ShapeDtypeStruct((1, 1024), jnp.float32)
    weights = dict.fromkeys("qkv", jax.ShapeDtypeStruct((1024, 16, 64), jnp.float32))
    weights["o"] = jax.ShapeDtypeStruct((16, 64, 1024), jnp.float32)
    cache = jax.ShapeDtypeStruct((1, 65536, 16, 64), jnp.float32)
    position = jax.ShapeDtypeStruct((1,), jnp.int32)
    # Caches of 537 MB: no device may hold all, each holds a quarter. What the
    # allocator may add takes 134 MB.
    plan = cfp.plan(
        generate,
        *(weights, {"k": cache, "v": cache}, row, position),
        mesh=cfp.described("4xh200"),
        memory_budget="600MB",
        cache_dir=tmp_path,
        donate_argnums=1,
    )
    assert plan.predicted_bytes <= 600e6
