"""Steps planned for one device: nothing is sharded, all else is chosen."""

import jax
import numpy as np
import pytest

import cfp
from cfp.analysis.presets import PRESETS, PROPAGATED, named_choices
from cfp.context import DetailedSettings, _defaults
from cfp.models import build
from cfp.passes import analyze_step
from cfp.program.step import flatten_step
from cfp.search.requests import constraints_of
from cfp.settings import ConstraintLevel, defaults_of
from cfp_test.cli import toy_targets
from cfp_test.cli.cli_runner import run_batch
from cfp_test.cli.toy_targets import toy
from cfp_test.support.checking import make_mesh

STEP_FN, SHAPES = toy()
TOY = f"{toy_targets.__file__}:toy"


@pytest.fixture(scope="module")
def state():
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(SHAPES))))
    return jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape), SHAPES)


@pytest.mark.parametrize("measure", [None, True])
def test_one_device_has_a_plan_and_computes_the_step(state, tmp_path, measure):
    plan = cfp.plan(
        STEP_FN,
        *state,
        mesh=make_mesh((("x", 1),)),
        settings=cfp.PlannerSettings(measure=measure),
        cache_dir=tmp_path,
    )
    assert "for one cpu\n" in str(plan)
    assert {spec for spec in plan.arg_specs for spec in spec} <= {()}
    assert not plan.uneven
    plan.save(tmp_path / "plan.json")
    loaded = cfp.Plan.load(tmp_path / "plan.json")
    found = loaded.compile(STEP_FN, *state)(*state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found,
        STEP_FN(*state),
    )
    with pytest.raises(cfp.PlanMismatch, match="mesh is one device"):
        plan.on(make_mesh((("x", 2),)))


def test_one_device_on_the_command_line(tmp_path):
    on_one = ["--platform", "cpu", "--devices", "1"]
    done = run_batch(
        [
            ["plan", TOY, *on_one, "-o", "plan.json"],
            ["run", TOY, *on_one, "--plan", "plan.json", "--check"],
            ["plan", TOY, "--for", "1xh100", "--json"],
        ],
        tmp_path,
    )
    assert [one.code for one in done] == [0, 0, 0], [one.err for one in done]
    assert "for one cpu" in done[0].out
    assert "Check passed" in done[1].out
    assert '"device_kind": "NVIDIA H100' in done[2].out


@pytest.mark.parametrize("name", [*PRESETS, *PROPAGATED, "x=data,y=tensor+sharded"])
def test_on_one_device_each_preset_is_the_step_itself(name):
    """A script that names one runs on one device, too."""
    mesh = make_mesh((("x", 1),))
    quick = cfp.PlannerSettings(race=False)
    plan = cfp.plan(STEP_FN, *SHAPES, mesh=mesh, preset=name, settings=quick)
    assert plan.winner == "replicated"
    with pytest.raises(cfp.OptionError, match="There is no preset 'x=rows'"):
        cfp.plan(STEP_FN, *SHAPES, mesh=mesh, preset="x=rows", settings=quick)


@pytest.mark.parametrize("name", ["FSDP", "ddp"])
def test_on_one_device_other_names_lead_to_those_of_presets(name):
    with pytest.raises(cfp.OptionError, match=r"Did you mean '(fully|data)_"):
        cfp.plan(STEP_FN, *SHAPES, mesh=make_mesh((("x", 1),)), preset=name)


def test_on_one_device_kernels_and_host_memory_are_chosen():
    fn, args = build("gpt", layers=2)
    one = cfp.described("1xh100")
    plan = cfp.plan(fn, *args, mesh=one, donate_argnums=0)
    attentions, cudnn = (
        [one.kernels for one in plan.segments],
        (("attention", "cudnn"),),
    )
    assert attentions == [(), cudnn, cudnn, ()]
    assert not plan.in_host
    least = cfp.plan(fn, *args, mesh=one, donate_argnums=0, memory_budget="4.2GiB")
    assert least.in_host


def test_on_one_device_nothing_is_constrained_and_no_options_are_for_collectives():
    fn, args = build("gpt", layers=1)
    mesh = make_mesh((("x", 1),))
    step = flatten_step(fn, args, donate_argnums=(0,))
    analysis = analyze_step(step, mesh).analysis
    [choice] = {*named_choices(analysis.frame).values()}
    constrained = constraints_of(analysis, choice, ConstraintLevel.EVERYTHING)
    assert not constrained.values and not constrained.uses

    settings = DetailedSettings()
    rules = [
        _defaults(defaults_of("gpu"), settings, where)
        for where in (mesh, make_mesh((("x", 2),)))
    ]
    assert [len(one.levels) for one in rules] == [1, 3]
    assert [len(one.compiler_options) for one in rules] == [0, 2]
    assert [[*one.slow_to_tune] for one in rules] == [["Triton"], ["Triton"]]


def test_one_cpu_is_planned_for_where_it_is_asked_for(tmp_path):
    """Without GPUs four virtual devices were meant, or a cluster that is described."""
    alone, curves = run_batch(
        [["plan", TOY], ["profile", "--curves", "--devices", "1"]],
        tmp_path,
        XLA_FLAGS="--xla_force_host_platform_device_count=1",
        JAX_PLATFORMS="cpu",
    )
    assert alone.code == curves.code == 2
    assert "one device, a CPU" in alone.err and "--devices 4" in alone.err
    assert "One device has no links to measure" in curves.err
