"""Plans whose best few are compiled for slices of TPUs, without any."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.cost import elsewhere
from cfp.cost.described import kind, slice_of
from cfp.errors import CfpError
from cfp.printable import format_bytes
from cfp.profiling.hlo import collectives_in
from cfp_test.support.checking import make_mesh

needs_libtpu = pytest.mark.skipif(
    find_spec("libtpu") is None, reason='takes libtpu: pip install -e ".[tpu]"'
)
WIDTH = 512


def step(w, x):
    def loss(w):
        return jnp.mean(jnp.tanh(x @ w["up"]) @ w["down"])

    gradients = jax.grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradients)


def arguments(rows: int = 512, width: int = WIDTH):
    weights = {name: jax.ShapeDtypeStruct((width, width), "f4") for name in DOWN_UP}
    return weights, jax.ShapeDtypeStruct((rows, width), "f4")


DOWN_UP = ("down", "up")


def planned(text, folder, *args, **how):
    settings = cfp.PlannerSettings(compile=True)
    where = {"mesh": cfp.described(text), "cache_dir": folder, "quiet": True}
    return cfp.plan(
        step,
        *(args or arguments()),
        **where,
        donate_argnums=0,
        settings=settings,
        **how,
    )


def test_devices_that_are_there_are_no_described_ones(tmp_path):
    how = {"settings": cfp.PlannerSettings(compile=True), "cache_dir": tmp_path}
    mesh = make_mesh((("x", 2),))
    with pytest.raises(cfp.CfpError, match="compile=True is for described devices"):
        cfp.plan(lambda x: 2 * x, jnp.ones(8), mesh=mesh, **how)


def test_a_missing_compiler_is_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(elsewhere, "find_spec", lambda name: None)
    with pytest.raises(CfpError, match=r"libtpu.*cfp\[tpu\]"):
        planned("v5e:2x4", tmp_path)
    with pytest.raises(CfpError, match=r"l40s.*target_config"):
        elsewhere.check_compiler(kind("l40s"))


def test_a_compiler_that_dies_is_a_record(monkeypatch, tmp_path):
    """So is one that takes too long: the plan has the next one, or says why."""
    monkeypatch.setattr(elsewhere, "check_compiler", lambda kind: None)
    monkeypatch.setattr("cfp.cost.elsewhere.check_compiler", lambda kind: None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(cfp.CfpError, match="the compiler ended with"):
        planned("v5e:2x4", tmp_path)


def test_collectives_of_tpus_are_counted_once():
    """One beside fusions is in each; a scatter is an all-reduce by its own name."""
    gather = (
        "all-gather(%p), channel_id=7, replica_groups=mesh['x'=8] {'x'}, "
        'frontend_attributes={chain_id="0"}'
    )
    found = collectives_in(
        "HloModule m, is_scheduled=true, num_partitions=8\n\n"
        "%all-reduce-scatter.1 (i: f32[64]) -> f32[8] {\n"
        "  %all-reduce.1 = f32[64]{0:T(128)} all-reduce(%i), channel_id=1, "
        "replica_groups={{0,1,2,3,4,5,6,7}}\n}\n\n"
        "%beside.1 (p: f32[8]) -> f32[64] {\n"
        f"  %all-gather.1 = f32[64]{{0:T(128)}} {gather}\n}}\n\n"
        "%beside.2 (p: f32[8]) -> f32[64] {\n"
        f"  %all-gather.2 = f32[64]{{0:T(128)}} {gather}\n}}\n\n"
        "ENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %a = f32[64]{0} fusion(%p), kind=kCustom, calls=%beside.1\n"
        "  %b = f32[64]{0} fusion(%a), kind=kCustom, calls=%beside.2\n"
        "  %c = f32[8]{0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1\n}\n"
    )
    kinds = {(one.kind, one.bytes, one.group_size, one.count) for one in found}
    assert kinds == {("all-gather", 256, 8, 1), ("reduce-scatter", 256, 8, 1)}


def test_collectives_in_a_loop_of_a_tpu_count_as_often_as_it_turns():
    """Its text has no trip counts, but a condition with the bound of the counter."""
    text = (
        "HloModule m, is_scheduled=true, num_partitions=8\n\n"
        "%other (p: (s32[], f32[8])) -> pred[] {\n"
        "  %p = (s32[]{:T(128)}, f32[8]{0}) parameter(0)\n"
        "  ROOT %sum = f32[]{:T(128)} add(%p#1, %p#1)\n}\n\n"
        "%ends (q: (s32[], f32[8])) -> pred[] {\n"
        "  %turns = s32[]{:T(128)} constant(12)\n"
        "  %q = (s32[]{:T(128)}, f32[8]{0}) parameter(0)\n"
        "  ROOT %lt = pred[]{:T(512)} compare(%q#0, %turns), direction=LT\n}\n\n"
        "%body (r: (s32[], f32[8])) -> (s32[], f32[8]) {\n"
        "  %sum.1 = f32[8]{0} all-reduce(%r#1), replica_groups={{0,1,2,3,4,5,6,7}}\n"
        "}\n\n"
        "ENTRY %main (a: f32[8]) -> f32[8] {\n"
        "  %all = f32[16]{0} all-reduce(%a), replica_groups={{0,1,2,3,4,5,6,7}}\n"
        "  %w = (s32[], f32[8]) while(%t), condition=%ends, body=%body, metadata={}\n"
        "}\n"
    )
    found = collectives_in(elsewhere._with_trip_counts(text))
    assert {one.bytes: one.count for one in found} == {32: 12, 64: 1}


@needs_libtpu
def test_the_best_few_are_compiled_for_a_slice(tmp_path):
    plan = planned("v5e:2x4", tmp_path)
    assert plan.measured_ms is None and plan.rung == "estimated"
    compiled = [row for row in plan.race if row.note.startswith("compiled, not run")]
    assert len(compiled) >= 2 and any("all-" in row.note for row in compiled)
    # State in shards, or whole on each.
    assert 2 * 4 * WIDTH**2 / 8 < plan.peak_bytes < 64 * 2**20


@needs_libtpu
def test_state_sharded_along_one_axis_of_a_slice_is_summed_along_the_other(tmp_path):
    mesh = cfp.described("v6e:4x4", x=4, y=4)
    how = {"mesh": mesh, "cache_dir": tmp_path, "quiet": True, "donate_argnums": 0}
    settings = cfp.PlannerSettings(compile=True)
    plan = cfp.plan(step, *arguments(), preset="hsdp", settings=settings, **how)
    [row] = [row for row in plan.race if row.name == "hsdp"]
    assert row.note.startswith("compiled, not run")
    assert {axis for axes in plan.arg_specs[0] for axis in axes} == {"y"}
    # Of the gradient that is a product pieces are summed across, and not all of it.
    size = 4 * WIDTH**2
    assert f"1 reduce-scatter of {format_bytes(size)}" in row.note
    assert f"1 all-reduce of {format_bytes(size // 4)}" in row.note


@needs_libtpu
def test_nothing_fits_that_the_compiler_refuses(tmp_path):
    """The state alone takes 18 GiB of each of four devices."""
    large = arguments(rows=8, width=96 * 2**10)
    with pytest.raises(cfp.MemoryBudgetError) as caught:
        planned("v5e:2x2", tmp_path, *large)
    assert caught.value.smallest_feasible_bytes > 15.75 * 2**30


@needs_libtpu
def test_a_plan_of_a_slice_is_used_on_it_and_refused_on_others(tmp_path):
    plan = planned("v5e:2x4", tmp_path)
    plan.save(tmp_path / "plan.json")
    script = (
        "import sys, cfp\n"
        "from cfp.cost.elsewhere import topology_mesh\n"
        "from cfp_test.cost.test_elsewhere import arguments, step\n"
        "mesh = topology_mesh(cfp.described(sys.argv[2]))\n"
        "plan = cfp.Plan.load(sys.argv[1], mesh=mesh).bind(step, *arguments())\n"
        "print('loaded', len(plan.compile_bound().as_text()))\n"
    )
    environment = os.environ | elsewhere._ENVIRONMENT
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    said = {}
    for text in ("v5e:2x4", "v6e:2x4"):
        command = [sys.executable, "-c", script, str(tmp_path / "plan.json"), text]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        said[text] = done.returncode, done.stdout + done.stderr
    assert said["v5e:2x4"][0] == 0 and "loaded" in said["v5e:2x4"][1], said
    differ = "for 8 of TPU v5 lite 2x4 (v5e:2x4), and these are 8 of TPU v6 lite 2x4"
    assert differ in said["v6e:2x4"][1]
    assert said["v6e:2x4"][0] != 0


def test_the_slice_of_devices_is_what_they_span():
    class Chip:
        device_kind = "TPU v5"

        def __init__(self, *coords):
            self.coords = coords

    chips = [Chip(x, y, z) for x in (2, 3) for y in (0, 1) for z in range(4)]
    assert slice_of(chips) == "TPU v5 2x2x4"
    assert slice_of(jax.devices()) == ""
