"""Every hand-written strategy trains as one device does, by the collectives it should.

What a table means to a person is known, and so is what must move for it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_test.handwritten.step import shard_largest, shard_step
from alpa_test.handwritten.tables import TABLES, table_of
from cfp.models import MODELS, logical_names
from cfp.models.layers import attending_by
from cfp.profiling.hlo import collectives_in
from cfp.program.trace import planning_mesh
from cfp_test.models.tiny import TINY, draw_start, quick_jit
from cfp_test.support.covering import at_night

STEPS = 3
TOLERANCE = 1e-4

GATHER = "all-gather"
REDUCE = {"all-reduce", "reduce-scatter"}
EXCHANGE = "all-to-all"

# What each may send, and what of it it must.
EXPECTED = {
    "data_parallel": (REDUCE, {"all-reduce"}),
    "zero1": (REDUCE | {GATHER, EXCHANGE}, {GATHER}),
    "fsdp": (REDUCE | {GATHER, EXCHANGE}, {GATHER}),
    "megatron_tp": (REDUCE, {"all-reduce"}),
    "megatron_tp_sequence": (REDUCE | {GATHER}, {GATHER}),
    "dp_x_tp": (REDUCE, {"all-reduce"}),
    "expert_parallel": (REDUCE | {EXCHANGE}, {"all-reduce", EXCHANGE}),
    "dp_x_ep": (REDUCE | {EXCHANGE}, {"all-reduce", EXCHANGE}),
}
ANY = REDUCE | {GATHER, EXCHANGE, "collective-permute"}

# Models share most of their layers: these run every time, and all of them at night.
ALWAYS = {
    "gpt": {"fsdp", "megatron_tp_sequence", "dp_x_tp"},
    "bert": set(),
    "llama": set(),
    "moe": {"expert_parallel"},
}
CASES = [
    pytest.param(
        model,
        table,
        marks=[] if table.name in ALWAYS[model] else [pytest.mark.nightly],
        id=f"{model}-{table.name}",
    )
    for model, tables in TABLES.items()
    for table in tables
]


def options(model):
    found = {**TINY[model], "batch": 8, "layers": 2 if model == "moe" else 1}
    return {**found, "kv_heads": 4} if model == "llama" else found


def mesh_of(table):
    shape = (4,) if len(table.axes) == 1 else (2, 2)
    return planning_mesh(jax.make_mesh(shape, table.axes, devices=jax.devices()[:4]))


@functools.cache
def on_one_device(model):
    """The first state, the batch, and the losses of one device."""
    step, (state, batch) = draw_start(model, **options(model))
    one, losses, now = quick_jit(step), [], state
    for _ in range(STEPS):
        now, metrics = one(now, batch)
        losses.append(float(metrics["loss"]))
    return state, batch, losses


def check_losses(model, sharded, compiled):
    """Trains, and compares losses with one device's."""
    state, batch, expected = on_one_device(model)
    # The step overwrites its state, and what is placed may share the original's memory.
    state = jax.tree.map(jnp.copy, state)
    state, batch = jax.device_put((state, batch), sharded.shardings)
    losses = []
    for _ in range(STEPS):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("model", "table"), CASES)
def test_trains_as_one_device_does(model, table):
    sharded = shard_step(model, options(model), table, mesh_of(table))
    compiled = sharded.lowered.compile(
        compiler_options={"xla_backend_optimization_level": 0}
    )
    sent = {one.kind for one in collectives_in(compiled.as_text())}
    may, must = EXPECTED.get(table.name, (ANY, {"all-reduce"}))
    assert must <= sent <= may

    assert sharded.whole == ()
    check_losses(model, sharded, compiled)


@pytest.mark.parametrize(
    "model", ["gpt", pytest.param("llama", marks=pytest.mark.nightly)]
)
def test_largest_dims_with_a_kernel_train_as_one_device_does(model):
    """Written attention is computed by the kernel, and nothing else is changed."""
    called = []

    def kernel(query, key, value, causal):
        called.append((query.shape, causal))
        return jax.nn.dot_product_attention(query, key, value, is_causal=causal)

    state, *_ = on_one_device(model)
    mesh = planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))
    with attending_by(kernel):
        sharded = shard_largest(model, options(model), mesh)
    sizes = options(model)
    [(shape, causal)] = set(called)
    assert shape[:3] == (sizes["batch"], sizes["seq"], sizes["heads"]) and causal
    for leaf, one in zip(
        jax.tree.leaves(state.params),
        jax.tree.leaves(sharded.shardings[0].params),
        strict=True,
    ):
        if leaf.ndim > 1:
            split = next(d for d, name in enumerate(one.spec) if name == "x")
            assert leaf.shape[split] == max(leaf.shape)
    compiled = sharded.lowered.compile(
        compiler_options={"xla_backend_optimization_level": 0}
    )
    check_losses(model, sharded, compiled)


@functools.cache
def shardings_of(model, name):
    table = table_of(model, name)
    return shard_step(model, options(model), table, mesh_of(table)).shardings


def shards(model, name, path):
    """Counts the pieces that a parameter and its moments are cut into: a pair."""
    state, _ = shardings_of(model, name)
    found = []
    for tree in (state.params, state.opt_state[0].mu):
        for key in path.split("/"):
            tree = tree[key]
        names = [n for n in tree.spec if n is not None]
        found.append(int(np.prod([tree.mesh.shape[n] for n in names], dtype=int)))
    return tuple(found)


@pytest.mark.parametrize(
    ("model", "name", "path", "pieces"),
    [
        ("gpt", "data_parallel", "layer_0/mlp/up/kernel", (1, 1)),
        ("gpt", "zero1", "layer_0/mlp/up/kernel", (1, 4)),
        ("gpt", "fsdp", "layer_0/mlp/up/kernel", (4, 4)),
        ("gpt", "megatron_tp", "layer_0/mlp/up/kernel", (4, 4)),
        ("gpt", "megatron_tp", "layer_0/attention_norm/scale", (1, 1)),
        ("llama", "hsdp", "layer_0/mlp/gate", (2, 2)),
        ("moe", "expert_parallel", "layer_1/moe/expert_up/kernel", (4, 4)),
        ("moe", "expert_parallel", "layer_0/mlp/up/kernel", (1, 1)),
        *at_night(
            [
                ("bert", "fsdp_x_tp", "layer_0/mlp/down/kernel", (4, 4)),
                ("moe", "expert_parallel_fsdp", "layer_0/mlp/up/kernel", (4, 4)),
                ("moe", "ep_x_tp", "layer_1/moe/expert_up/kernel", (4, 4)),
            ]
        ),
    ],
)
def test_state_is_cut_as_the_strategy_says(model, name, path, pieces):
    assert shards(model, name, path) == pieces


def test_what_does_not_split_stays_whole():
    table = table_of("llama", "megatron_tp")
    given = {**options("llama"), "kv_heads": 2}
    sharded = shard_step("llama", given, table, mesh_of(table))
    assert sharded.whole == ("kv_heads",)
    attention = sharded.shardings[0].params["layer_0"]["attention"]
    assert attention["key"].is_fully_replicated
    assert not attention["query"].is_fully_replicated


def test_refuses_a_batch_that_does_not_split_and_a_foreign_mesh():
    table = table_of("gpt", "data_parallel")
    with pytest.raises(ValueError, match="does not split 6 sequences"):
        shard_step("gpt", {**options("gpt"), "batch": 6}, table, mesh_of(table))
    with pytest.raises(ValueError, match="written for a mesh with the axes"):
        shard_step("gpt", options("gpt"), table, mesh_of(table_of("gpt", "hsdp")))
    with pytest.raises(ValueError, match="no hand-written strategy 'ep_x_tp'"):
        table_of("gpt", "ep_x_tp")


def test_tables_speak_of_dims_that_there_are():
    known = {
        name
        for model in MODELS
        for spec in jax.tree.leaves(logical_names(model, **options(model))[0])
        for name in spec
    }
    for tables in TABLES.values():
        assert len({table.name for table in tables}) == len(tables)
        for table in tables:
            assert table.params.keys() <= known
            assert {*table.params.values(), *table.activations.values()} <= {
                None,
                *table.axes,
                table.axes,
            }
