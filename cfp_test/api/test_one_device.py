"""Plans for N devices on one that plays them; virtual devices stand in for these."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import cfp
from cfp import context
from cfp.analysis.analyze import analyze
from cfp.checking.verify import verified_text, verify
from cfp.cost import step_time
from cfp.cost.step_time import computation_of, parts_of
from cfp.devices import described
from cfp.errors import DeviceError, TargetError
from cfp.passes import search as searching
from cfp.passes.pipeline import analyze_step
from cfp.passes.profile import profile
from cfp.profiling import runner
from cfp.profiling.compile_pool import default_threads
from cfp.profiling.processes import TOPOLOGY_SETTING
from cfp.profiling.runner import timing_on
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.settings import RUNS_PLAYED, ConstraintLevel, defaults_of
from cfp.view.text import plan_text
from cfp_test.analysis.stacks import ADAM, plain, stack_of
from cfp_test.api.updown import arguments, step

# What one GPU has in its environment that virtual devices lack.
_OF_A_GPU = (
    ("mocked", "1x4x1"),
    ("nccl", "NCCL_NVLS_ENABLE=0"),
    ("allocator", ""),
    ("links", ""),
    ("power_limit", "700.00 W"),
    ("driver", "580.1"),
    ("host", "a processor, 16 cores"),
)


def playing(text, **axes):
    """A described mesh; as many virtual devices stand in for one that plays them."""
    mesh = cfp.described(text, **axes)
    sizes = [size for _, size in mesh.axes]
    names = [name for name, _ in mesh.axes]
    devices = np.array(jax.devices()[: mesh.cluster.count]).reshape(sizes)
    return replace(mesh, stand_in=planning_mesh(Mesh(devices, names)), runs=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("one_device")


@pytest.fixture(scope="module")
def ran(folder):
    """Keys of what ran, with an environment as a GPU has it."""
    keys = []
    run_local, parts = step_time.run_local, context.environment_parts

    def noted(built, job, program, mesh, **options):
        # CPUs are played on, and these run one program at a time.
        assert options["timing"] == timing_on(mesh, **step_time._LIMITS)
        keys.append(built.key.digest)
        return run_local(built, job, program, mesh, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_time, "run_local", noted)
        patch.setattr(context, "environment_parts", lambda d: parts(d) + _OF_A_GPU)
        yield keys


@pytest.fixture(scope="module")
def plan(ran, folder):
    how = {"donate_argnums": 0, "cache_dir": folder}
    return cfp.plan(step, *arguments(), mesh=playing("4xh200"), **how)


def test_all_of_a_plan_says_that_it_is_of_one_device(plan):
    assert plan.rung == "one device"
    assert plan.measured_ms is None and plan.peak_bytes is None
    assert plan.predicted_ms > 0 and plan.predicted_bytes > 0
    rungs = {row.rung for row in plan.race}
    assert "one device" in rungs and rungs <= {"one device", "estimated"}
    assert all(row.time_ms is None and not row.samples_ms for row in plan.race)
    data = json.loads(plan.to_json())
    assert data["rung"] == "one device"
    assert {row["rung"] for row in data["race"]} == rungs
    for text in (repr(plan), plan_text(plan, width=200)):
        assert "predicted on one device" in text and "as compiled" in text
        assert "measured," not in text
    assert "Predicted on one device" in plan_text(plan, width=200)
    assert "whose computation one device ran" in repr(plan).replace("\n    ", " ")


def test_the_presets_are_predicted_and_none_is_faster_than_the_plan(plan):
    times = [row.predicted_ms for row in plan.race if row.rung == "one device"]
    assert plan.predicted_ms == pytest.approx(min(times), rel=0.01)
    rows = {row.name.removesuffix(", arguments constrained") for row in plan.race}
    assert {"data_parallel", "fully_sharded", "tensor_parallel"} <= rows


@pytest.mark.parametrize("budget", [None, 2**40])
def test_presets_that_nothing_around_improves_race_with_all_constrained(
    budget, monkeypatch, tmp_path
):
    """Once: under a budget they do so by their own names."""
    named = {}

    def the_same(analysis, problem, presets):
        named.update(presets)
        return {f"{name}, rest planned": choice for name, choice in presets.items()}

    monkeypatch.setattr(searching, "planned_around", the_same)
    mesh = playing("4xh200")
    analysis = analyze_step(flatten_step(step, arguments()), mesh).analysis
    with context.open_context(mesh, tmp_path, budget) as opened:
        found = searching.search(opened, analysis, profile(opened, analysis))
    keys = [one.key for one in found.candidates]
    assert len(keys) == len({*keys})
    every = ConstraintLevel.EVERYTHING
    constrained = [one for one in found.candidates if one.level is every]
    assert {*named.values()} <= {one.choice for one in constrained}
    around = [one for one in constrained if one.name.endswith("rest planned")]
    assert bool(around) == (budget is None)


def test_its_file_keeps_the_rungs(plan):
    loaded = cfp.Plan.from_json(json.loads(plan.to_json()))
    assert [row.rung for row in loaded.race] == [row.rung for row in plan.race]
    data = json.loads(plan.to_json())
    data["race"][0]["rung"] = "guessed"
    with pytest.raises(cfp.PlanFileError, match="rung"):
        cfp.Plan.from_json(data)


def test_without_a_race_what_a_plan_needs_is_compiled_and_nothing_runs(ran, tmp_path):
    def planned(budget=None, measure=None):
        return cfp.plan(
            step,
            *arguments(),
            mesh=playing("4xh200"),
            donate_argnums=0,
            memory_budget=budget,
            cache_dir=tmp_path,
            settings=cfp.PlannerSettings(race=False, measure=measure),
        )

    before = len(ran)
    free = planned()
    text = repr(free).replace("\n    ", " ")
    assert "on each device, as compiled" in text
    assert "the first that fits when compiled; nothing was run" in text
    assert free.rung == "estimated" and free.measured_ms is None
    # What is estimated to be the fastest needs more than this, as compiled.
    less = free.predicted_bytes - 1
    other = planned(less + defaults_of("gpu").reserve_bytes)
    assert other.predicted_bytes <= less
    assert other.arg_specs != free.arg_specs
    little = 1000 + defaults_of("gpu").reserve_bytes
    with pytest.raises(cfp.MemoryBudgetError, match="compiled"):
        planned(budget=little)
    with pytest.raises(cfp.MemoryBudgetError, match="by prediction"):
        planned(budget=little, measure=False)
    assert len(ran) == before


def test_what_runs_is_one_devices_computation(folder, monkeypatch):
    ran = []
    execute = runner.execute

    def noted(built, kinds, mesh, **options):
        ran.append((built, kinds, mesh.size, options["checked"]))
        return execute(built, kinds, mesh, **options)

    monkeypatch.setattr(runner, "execute", noted)
    how = {"preset": "data_parallel", "donate_argnums": 0, "cache_dir": folder}
    cfp.plan(step, *arguments(48), mesh=playing("4xh200"), **how)
    assert len(ran) == RUNS_PLAYED
    assert len({id(built.compiled) for built, *_ in ran}) == 1
    built, kinds, devices, checked = ran[0]
    assert (devices, checked) == (1, True)
    assert {kind.shape for kind in kinds} == {(256, 512), (512, 256), (12, 256)}
    text = built.compiled.as_text()
    assert "all-reduce" not in text and "dot" in text
    # Samples of one run, or of collectives that did nothing, are under other keys.
    what = dict(built.key.parts)["what"]
    assert what == "computation alone, one sample of each run, what it moves"


def test_other_links_change_predictions_and_run_nothing(ran, folder):
    file = folder / "slow.toml"
    file.write_text('kind = "h200"\ndevices_per_host = 4\nlink_gb_per_s = 5\n')
    how = {"preset": "data_parallel", "donate_argnums": 0, "cache_dir": folder}
    fast = cfp.plan(step, *arguments(), mesh=playing("4xh200"), **how)
    before = len(ran)
    slow = cfp.plan(step, *arguments(), mesh=playing(str(file), x=4), **how)
    assert len(ran) == before
    assert slow.rung == fast.rung == "one device"
    assert slow.predicted_ms > fast.predicted_ms


def test_with_more_devices_only_other_shapes_run(ran, folder):
    how = {"preset": "data_parallel", "donate_argnums": 0, "cache_dir": folder}
    four = cfp.plan(step, *arguments(64), mesh=playing("4xh200"), **how)
    before = len(ran)
    mesh = playing("2x4xh200", x=8)
    eight = cfp.plan(step, *arguments(128), mesh=mesh, **how)
    assert len(ran) == before
    assert eight.predicted_ms > four.predicted_ms  # More is sent, over the network.
    cfp.plan(step, *arguments(256), mesh=mesh, **how)
    assert len({*ran[before:]}) == 1 and len(ran) == before + RUNS_PLAYED


def test_options_that_move_collectives_are_predicted_from_one_computation(
    ran, tmp_path
):
    """Nothing but the schedule differs, so that no sample's noise decides."""
    before = len(ran)
    how = {"preset": "data_parallel", "donate_argnums": 0, "cache_dir": tmp_path}
    plan = cfp.plan(step, *arguments(80), mesh=playing("4xh200"), **how)
    assert len({*ran[before:]}) == 1 and len(ran) == before + RUNS_PLAYED
    rows = {row.name: row for row in plan.race if row.predicted_ms}
    options = defaults_of("gpu").compiler_options
    assert {*rows} >= {"data_parallel", *(f"data_parallel, {one}" for one in options)}
    assert {row.rung for row in rows.values()} == {"one device"}
    # This compiler moves nothing for options of GPUs.
    assert len({row.predicted_ms for row in rows.values()}) == 1
    assert plan.winner == "data_parallel" and not plan.options


def test_when_time_is_over_the_whole_program_is_not_compiled(
    ran, tmp_path, monkeypatch
):
    few = {**step_time._LIMITS, "min_samples": 3, "max_samples": 3}
    monkeypatch.setattr(step_time, "_LIMITS", few)  # Too few to tell what ties.
    ran.clear()
    step, args = stack_of(plain, 10, ADAM)
    settings = cfp.PlannerSettings(seconds=0.0)
    how = {"cache_dir": tmp_path, "settings": settings}
    plan = cfp.plan(step, *args, mesh=playing("4xh200"), **how)
    assert plan.rung == "one device" and plan.predicted_ms > 0
    # One program of some repeats, from which all follows, and what threads had begun.
    assert 1 <= len(ran) <= default_threads("cpu")
    assert "winner_seconds" not in plan.search


def test_on_arrival_it_is_verified(plan, folder):
    mesh = planning_mesh(Mesh(np.array(jax.devices()[:4]), ("x",)))
    flat = flatten_step(step, arguments(), donate_argnums=0)
    program, lowering = trace(flat, mesh)
    analysis = analyze(program, (("x", 4),))
    where = {"mesh": mesh, "cache_dir": folder}
    # Virtual devices stand in for those that the plan is for, also here.
    here = {**plan.environment, "device_kind": jax.devices()[0].device_kind}
    plan = replace(plan, environment=here)
    found = verify(plan, analysis, flat, lowering.out_tree, **where)
    assert found.best.rung == "measured" and found.measured_ms > 0
    assert "on one device: off by" in "\n".join(verified_text(found))


_TEXT = """HloModule step, num_partitions={n}

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a.{k} = f32[] parameter(0)
  %b.{k} = f32[] parameter(1)
  ROOT %add.{k} = f32[] add(%a.{k}, %b.{k})
}}

ENTRY %main (p: f32[{rows},8]) -> f32[{rows},8] {{
  %p.{k} = f32[{rows},8]{{1,0}} parameter(0), sharding={{devices=[{n},1]<=[{n}]}}
  %table.{k} = s32[{n}]{{0}} constant({{{table}}})
  %mul.{k} = f32[{rows},8]{{1,0}} multiply(%p.{k}, %p.{k}), metadata={{op_name="{k}, x"}}
  ROOT %all.{k} = f32[{rows},8]{{1,0}} all-reduce(%mul.{k}), channel_id={k}, replica_groups={{{{{table}}}}}, to_apply=%sum
}}
"""  # noqa: E501


def _text(devices, rows=4, number=1):
    table = ",".join(map(str, range(devices)))
    return _TEXT.format(n=devices, k=number, rows=rows, table=table)


def test_a_computation_is_the_same_for_any_number_of_devices():
    assert computation_of(_text(64)) == computation_of(_text(1024, number=7))
    assert computation_of(_text(64)) != computation_of(_text(64, rows=8))
    other = _text(64).replace("multiply(", "divide(")
    assert computation_of(_text(64)) != computation_of(other)
    rewired = _text(64).replace("multiply(%p.1, %p.1)", "multiply(%p.1, %table.1)")
    assert computation_of(_text(64)) != computation_of(rewired)


def test_attributes_are_taken_apart_outside_of_brackets():
    text = "), dimensions={0,1}, replica_groups={{0,1},{2,3}}, to_apply=%sum"
    assert [part for part in parts_of(text) if part] == [
        "dimensions={0,1}",
        "replica_groups={{0,1},{2,3}}",
        "to_apply=%sum",
    ]


@pytest.fixture
def unplayed(monkeypatch):
    """Undoes what playing sets for the whole process."""
    before = jax.config.values.get(TOPOLOGY_SETTING)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    yield
    jax.config.update(TOPOLOGY_SETTING, before)


def test_with_its_devices_started_a_process_cannot_play(unplayed):
    with pytest.raises(DeviceError, match="before anything asks JAX") as caught:
        cfp.described("4xh200").on_one_device()
    assert "4 devices, of which one is here" in str(caught.value)


def test_a_gpu_of_another_kind_does_not_play(unplayed, monkeypatch):
    here = planning_mesh(Mesh(np.array(jax.devices()[:4]), ("x",)))
    monkeypatch.setattr(described, "mocked_mesh", lambda axes: here)
    with pytest.raises(DeviceError, match="another kind") as caught:
        cfp.described("4xh200").on_one_device()
    assert "one NVIDIA H200" in str(caught.value)


def test_without_a_compiler_for_gpus_there_is_one_message(monkeypatch):
    monkeypatch.setattr(described, "cuda_plugin", lambda: None)
    with pytest.raises(DeviceError, match="Nothing here compiles for GPUs"):
        cfp.described("4xh200").by_compiler()
    with pytest.raises(TargetError, match="no description of that kind"):
        cfp.described("8xl40s").by_compiler()


@pytest.mark.parametrize(
    ("names", "plugin", "can"),
    [
        ("NVIDIA H200\n", "xla_cuda12", True),
        ("NVIDIA H100 80GB HBM3\n", "xla_cuda12", False),
        ("NVIDIA H200\nNVIDIA H200\n", None, False),
        ("", "xla_cuda12", False),
    ],
)
def test_what_can_play(monkeypatch, names, plugin, can):
    monkeypatch.setattr(described, "ask_driver", lambda *words: names)
    monkeypatch.setattr(described, "cuda_plugin", lambda: plugin)
    assert described.can_play("NVIDIA H200") is can
