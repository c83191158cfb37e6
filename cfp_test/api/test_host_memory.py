"""State in the memory of the host: where nothing else fits, and only there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import cfp
from cfp.analysis.analyze import analyze, enough_state, movable_state
from cfp.analysis.layout import lay_out
from cfp.analysis.presets import presets
from cfp.checking.check import Check, both_sides
from cfp.context import DetailedSettings
from cfp.cost.memory import host_bytes
from cfp.printable import format_bytes
from cfp.program.shardy import (
    main_function,
    memory_of_move,
    moves_to_memory,
    program_ops,
)
from cfp.program.step import flatten_step
from cfp.program.trace import trace

pytestmark = pytest.mark.usefixtures("compiled_once", "analyzed_once")

WIDTH, LAYERS = 512, 2
MIB = 2**20  # Of each weight.
OPTIMIZER = optax.adamw(1e-3, eps=1e-3)
SETTINGS = DetailedSettings(per_kind=1, in_context=False, race=False)
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)), jnp.float32)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(
        (2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )


def init(layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), (layers, 2))
    shape = WIDTH, WIDTH
    params = [
        {name: 0.05 * jax.random.normal(key, shape) for name, key in named}
        for named in (zip(("up", "down"), pair, strict=True) for pair in keys)
    ]
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def step(state, x):
    def loss(params):
        h = x
        for layer in params:
            h = h + jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = OPTIMIZER.update(
        gradients, state["optimizer"], state["params"]
    )
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer}, value


def planned(mesh, tmp_path, budget, **options):
    how = {"mesh": mesh, "donate_argnums": 0, "cache_dir": tmp_path, "quiet": True}
    how |= {"memory_budget": budget, "settings": SETTINGS, **options}
    return cfp.plan(step, jax.eval_shape(init), X, **how)


@pytest.fixture(scope="module")
def plan(mesh, tmp_path_factory):
    """12 MiB of state, sharded, are 6 on each device; moments are 4 of these."""
    return planned(mesh, tmp_path_factory.mktemp("cache"), 5 * MIB)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def analysed(mesh=None):
    flat = flatten_step(step, (jax.eval_shape(init), X), donate_argnums=0)
    program, _ = trace(flat, mesh or AbstractMesh((2,), ("x",)))
    return flat, analyze(program, (("x", 2),))


def test_a_plan_fits_with_moments_in_the_memory_of_the_host(plan):
    assert plan.in_host and plan.peak_bytes <= 5 * MIB
    names = [plan.arg_names[argument] for argument, _ in plan.in_host]
    assert all("/mu/" in name or "/nu/" in name for name in names)
    kept = plan.search["host_bytes"]
    assert kept == len(names) * MIB / 2
    text = " ".join(repr(plan).split())
    assert f"in host memory between steps: {len(names)} arguments" in text
    assert format_bytes(round(kept)) in text and "else no plan fits" in text


def test_its_state_comes_back_in_the_memory_of_the_host(plan):
    run = plan.compile_bound()
    state, expected = plan.init(init), init()
    plain = jax.jit(step)
    for _ in range(3):
        state, loss = run(state, X)
        expected, wanted = plain(expected, X)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    in_host = {argument for argument, _ in plan.in_host}
    for i, (leaf, want) in enumerate(
        zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    ):
        kind = "pinned_host" if i in in_host else "device"
        assert leaf.sharding.memory_kind == kind
        np.testing.assert_allclose(leaf, want, rtol=1e-3, atol=1e-5)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert plan.in_shardings[0] == shardings == plan.out_shardings[0]


def test_what_fits_otherwise_is_on_the_devices(mesh, tmp_path):
    found = planned(mesh, tmp_path, 64 * MIB)
    assert not found.in_host and "memory of the host" not in repr(found)


def test_all_of_it_is_kept_there_where_less_does_not_do(mesh, tmp_path):
    with pytest.raises(cfp.MemoryBudgetError, match="state in host memory"):
        planned(mesh, tmp_path, MIB)


def test_a_preset_is_what_its_name_says(mesh, tmp_path):
    with pytest.raises(cfp.MemoryBudgetError) as error:
        planned(mesh, tmp_path, 5 * MIB, preset="fully_sharded")
    assert "memory of the host" not in str(error.value)


def test_what_is_not_to_be_chosen_among_stays(mesh, tmp_path):
    with pytest.raises(cfp.MemoryBudgetError) as error:
        planned(mesh, tmp_path, 5 * MIB, choose=("sharding", "storage", "remat"))
    assert "memory of the host" not in str(error.value)


def test_the_fastest_of_meshes_that_all_lack_memory(mesh, tmp_path):
    other = jax.sharding.Mesh(mesh.devices, ("y",))
    state = jax.eval_shape(init)
    variants = [
        cfp.Variant(name=name, fn=step, args=(state, X), mesh=one)
        for name, one in {"x=2": mesh, "y=2": other}.items()
    ]
    how = {"memory_budget": 5 * MIB, "settings": SETTINGS, "quiet": True}
    found = cfp.plan_fastest(variants, donate_argnums=0, cache_dir=tmp_path, **how)
    assert found.plan.in_host
    times = [one.step_ms for one in found.plan.figures.variants]
    assert len(times) - times.count(None) == 1
    [other] = [one for one in found.plan.figures.variants if not one.taken]
    why, tried = other.note, f" State in host memory was tried for {found.name} only."
    assert why.startswith("No plan ") and why.endswith(tried)
    assert other.estimated_ms is None, "an estimate from before its plan failed"


def test_it_is_saved_loaded_and_run(plan, mesh, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh)
    assert loaded.in_host == plan.in_host
    state = loaded.init(init)  # Not bound to its step yet.
    assert kinds(state["optimizer"]) >= {"pinned_host"}
    assert kinds(state["params"]) == {"device"}
    found, _ = loaded.apply(step)(state, X)
    assert kinds(found["optimizer"]) >= {"pinned_host"}


@pytest.mark.parametrize("pairs", [[[0, 0], [0, 1]], [[99, 0]], [[0]], "x"])
def test_a_damaged_file_is_refused(plan, pairs):
    data = {**json.loads(plan.to_json()), "in_host": pairs}
    with pytest.raises(cfp.PlanMismatch, match="in_host"):
        cfp.Plan.from_json(data)


def test_an_export_keeps_it_there(plan, tmp_path):
    plan.export(tmp_path / "step.jax")
    data = bytearray((tmp_path / "step.jax").read_bytes())
    exported = jax.export.deserialize(data)
    where = [*exported.in_shardings_jax(plan.mesh)]
    found = [one.memory_kind for one in where]
    wanted = [one.memory_kind for one in jax.tree.leaves(plan.in_shardings)]
    assert found == wanted and "pinned_host" in found


def test_it_is_checked_against_one_device(plan):
    check = Check(*both_sides(plan), {0: 0})
    check.start([init(), X])
    assert not check.step().failures


def test_a_described_cluster_needs_a_smaller_budget(tmp_path):
    """128 MiB leave 5, if an allocator takes for itself what it may."""
    how = {"mesh": cfp.described("2xh200"), "settings": cfp.PlannerSettings()}
    found = planned(budget=(128 + 5) * MIB, tmp_path=tmp_path, **how)
    assert found.in_host and found.predicted_bytes <= 5 * MIB
    # Transfers are in the estimate: 2 x 2 or 4 MiB at 50 GB/s.
    assert found.predicted_ms > found.search["host_ms"] > 2 * 2 * MIB / 50e6


# ------------------------------------------------------------------- what may be moved


def test_state_that_only_its_update_reads_may_be_there():
    _, analysis = analysed()
    program = analysis.frame.program
    found = movable_state(analysis.frame)
    names = [program.arg_names[argument] for argument, _ in found]
    assert len(names) == 4 * LAYERS and not any("params" in name for name in names)
    assert all(
        program.output_names[result].partition("/")[2]
        == program.arg_names[argument].partition("/")[2]
        for argument, result in found
    )


def test_so_much_is_moved_as_is_lacking_and_then_all():
    _, analysis = analysed()
    every = movable_state(analysis.frame)
    assert [*every.values()] == sorted(every.values(), reverse=True)
    some, rest = enough_state(analysis.frame, MIB)  # Half of each on a device.
    assert [*some] == [*every][:2] and rest == every
    assert enough_state(analysis.frame, 100 * MIB) == [every]


def test_float32_copies_of_parameters_may_be_there():
    def mixed(state, x):
        def loss(w):
            return jnp.mean(jnp.tanh(x.astype(jnp.bfloat16) @ w).astype(jnp.float32))

        value, gradient = jax.value_and_grad(loss)(state["half"])
        master = state["master"] - 0.1 * gradient.astype(jnp.float32)
        return {"half": master.astype(jnp.bfloat16), "master": master}, value

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    state = {"half": weight.update(dtype=jnp.bfloat16), "master": weight}
    flat = flatten_step(mixed, (state, X), donate_argnums=0)
    program, _ = trace(flat, AbstractMesh((2,), ("x",)))
    found = movable_state(analyze(program, (("x", 2),)).frame)
    assert [program.arg_names[one] for one, _ in found] == ["state/master"]


# ----------------------------------------------------------------------- for GPUs


def test_for_gpus_state_is_moved_where_its_update_reads_it():
    """It is on the device for its own update alone, also in the compiler's input."""
    flat, analysis = analysed()
    pairs = [*movable_state(analysis.frame)]
    moved = flat.with_state_in_host(pairs)
    program, lowering = trace(moved, AbstractMesh((2,), ("x",)))
    assert len(program.output_memory) == len(program.outputs)
    ops = program_ops(main_function(lowering.module))
    places = [i for i, op in enumerate(ops) if moves_to_memory(op)]
    there = [i for i in places if memory_of_move(ops[i]) == "device"]
    back = [i for i in places if memory_of_move(ops[i]) == "pinned_host"]
    assert len(there) == len(back) == len(pairs)
    # A move to the device, and what reads it; a move back, and what was moved.
    for i in there:
        readers = [use.owner.operation for use in ops[i].results[0].uses]
        between = ops[i + 1 : 1 + min(ops.index(op) for op in readers)]
        assert all(moves_to_memory(op) or op in readers for op in between)
    live = [sum(i < at for i in there) - sum(i < at for i in back) for at in places]
    assert max(live) <= len(pairs) / 2
    # Its own update is still its own, and is sharded with its parameter.
    moved_analysis = analyze(program, (("x", 2),))
    groups = [len(group.args) for group in moved_analysis.frame.groups]
    assert sorted(groups) == sorted(len(g.args) for g in analysis.frame.groups)
    layout = lay_out(
        moved_analysis.frame, presets(moved_analysis.frame)["fully_sharded"]
    )
    kept, both_ways = host_bytes(layout, range(len(program.args)))
    assert kept == len(pairs) * MIB / 2 and both_ways == 2 * kept
