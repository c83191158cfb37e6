"""The guide to keeping a plan: each part in a process of its own, in one folder."""

import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp.plan.parts import _may_be_renamed
from cfp_test.cli.cli_runner import ROOT, environment
from cfp_test.race import deep
from cfp_test.support.forking import quick_python
from cfp_test.support.waiting import GUARD_SECONDS

PAGE = (ROOT / "docs" / "keep-a-plan.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

# JAX compiles nothing; loading what was compiled is no compile.
NO_COMPILE = """
import jax
def refuse(*_, **__):
    raise AssertionError("compiled")
jax.stages.Lowered.compile = refuse
"""
STEP = """
import os, sys
import jax, jax.numpy as jnp
import cfp
from train import make_state, make_train_step
"""
PARALLELIZED = """
mesh = jax.make_mesh((4,), ("x",))
step = cfp.parallelize(make_train_step(), mesh=mesh, donate_argnums=0, quiet=True)
shapes = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
state, loss = step(shapes, jnp.ones((32, 64)))
state, loss = step(state, jnp.ones((32, 64)))
print(float(loss), float(state["up"].sum()), step.plan.search["race_cached"])
"""


def run(program, folder, python="", **more):
    flags = {
        "XLA_FLAGS": FLAGS,
        "JAX_PLATFORMS": "cpu",
        "CFP_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": f"{ROOT}:{folder}",
    }
    done = subprocess.run(
        [python or quick_python(), "-c", program],
        cwd=folder,
        env=environment(**flags, **more),
        timeout=GUARD_SECONDS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder after all parts of the guide have run there, one after another."""
    path = tmp_path_factory.mktemp("kept")
    first, *rest = BLOCKS
    assert first.startswith("# train.py\n") and len(rest) == 6
    (path / "train.py").write_text(first)
    for block in rest:
        run(block, path)
    return path


def test_every_part_of_the_guide_runs(folder):
    names = {path.name for path in folder.iterdir()}
    assert names >= {"plan.json", "nnx.json", "checkpoint"}


@pytest.fixture(scope="module")
def first(folder):
    """The output of the first process, which planned and kept its executables."""
    return run(STEP + PARALLELIZED, folder).split()


def test_the_environment_names_a_plan(folder):
    program = f"""{STEP}
step = cfp.parallelize(make_train_step())
step(make_state(jax.random.key(0)), jnp.ones((32, 64)))
saved = cfp.Plan.load("plan.json")
assert step.plan.arg_specs == saved.arg_specs and step.plan.search == saved.search
"""
    run(program, folder, CFP_PLAN="plan.json")


def test_what_the_plan_of_the_environment_overrides_is_said(folder):
    program = f"""{STEP}
import warnings
step = cfp.parallelize(make_train_step(), memory_budget="1GiB")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    step(make_state(jax.random.key(0)), jnp.ones((32, 64)))
print([str(one.message) for one in said if "CFP_PLAN" in str(one.message)])
"""
    said = run(program, folder, CFP_PLAN="plan.json")
    assert said.count("which ignores memory_budget.") == 1


def test_errors_say_that_the_environment_named_the_plan(folder):
    program = f"""{STEP}
evaluate = cfp.parallelize(lambda batch: batch.sum())
try:
    evaluate(jnp.ones((32, 64)))
except cfp.CfpError as error:
    print(type(error).__name__, error)
"""
    fits_not = run(program, folder, CFP_PLAN="plan.json")
    assert "or plan again" in fits_not
    assert "The plan is plan.json, since CFP_PLAN names it" in fits_not
    not_there = run(program, folder, CFP_PLAN="nope.json")
    assert not_there.startswith("NoSuchFile There is no plan nope.json.")
    assert "since CFP_PLAN names it" in not_there


def test_a_plan_fits_a_step_whose_arguments_have_other_names(folder):
    program = f"""{STEP}
made = make_train_step()
step = cfp.parallelize(lambda s, b: made(s, b), plan="plan.json")
step(make_state(jax.random.key(0)), jnp.ones((32, 64)))
"""
    run(program, folder)


def test_arguments_that_changed_places_are_not_renamed():
    swapped = ["batch/x", "state/w"], ["state/w", "batch/x"]
    assert not _may_be_renamed(*swapped)
    assert not _may_be_renamed(["a", "b"], ["b", "a"])
    assert _may_be_renamed(["a", "b"], ["a", "c"])
    assert _may_be_renamed(["m/w", "m/b", "x"], ["n/w", "n/b", "x"])
    assert not _may_be_renamed(["m/w", "m/b", "x"], ["n/w", "x", "n/b"])


def test_a_second_process_finds_plan_and_executable(folder, first):
    """It compiles nothing, and its results are equal in every bit."""
    program = NO_COMPILE + STEP + PARALLELIZED
    second = run(program, folder, python=sys.executable).split()
    assert first[:2] == second[:2] and second[2] == "0.0"


def test_a_damaged_executable_is_compiled_again(folder, first):
    for path in (folder / "cache" / "executables").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert run(STEP + PARALLELIZED, folder).split()[:2] == first[:2]


@pytest.mark.usefixtures("first")
def test_what_others_can_write_is_not_loaded(folder):
    """An executable is code: one that others may have written is not run."""
    kept = [*(folder / "cache" / "executables").iterdir()]
    for path in kept:
        path.chmod(0o666)
    try:
        with pytest.raises(AssertionError, match="compiled"):
            run(NO_COMPILE + STEP + PARALLELIZED, folder)
    finally:
        for path in kept:
            path.chmod(0o600)


# ------------------------------------------------------------------ in this process


def step_fn(state, x, scale=2.0):
    return state + x.sum() * scale, x * state.sum()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("loaded")
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    args = jnp.ones((8, 8)), jnp.ones((16, 4))
    plan = cfp.plan(
        step_fn,
        *args,
        mesh=mesh,
        donate_argnums=0,
        preset="fully_sharded",
        cache_dir=path,
        settings=cfp.PlannerSettings(race=False),
    )
    plan.save(path / "plan.json")
    return cfp.Plan.load(path / "plan.json"), args


def test_bind_takes_what_plan_takes(loaded):
    plan, args = loaded
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[4:])
    bound = plan.bind(step_fn, *args, mesh=mesh, donate_argnums=0, quiet=False)
    assert bound.in_shardings[0].mesh.devices.flat[0] == jax.devices()[4]
    assert bound.donated == plan.donated == (True, False)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"memory_budget": "1GiB"}, "memory_budget is an option of planning"),
        ({"donate": 0}, "Neither the step nor plan.bind has an argument 'donate'"),
        ({"donate_argnames": "x"}, "names x. Leave out donate_argnums"),
    ],
    ids=["planning", "unknown", "donation"],
)
def test_bind_says_so_of_other_keywords(loaded, more, words):
    plan, args = loaded
    kind = cfp.PlanMismatch if "donate_argnums" in words else cfp.OptionError
    with pytest.raises(kind, match=words):
        plan.bind(step_fn, *args, **more)


def test_a_plan_may_donate_less_than_it_is_asked_to(loaded):
    plan, args = loaded
    for donated in ((True, False), (False, False)):
        less = replace(plan, donated=donated)
        assert less.bind(step_fn, *args, donate_argnums=(0, 1)).donated == donated


def test_bind_says_so_of_the_keyword_that_the_step_does_not_have(loaded):
    def step(state, x, settings):
        return step_fn(state, x)

    plan, args = loaded
    with pytest.raises(cfp.OptionError, match="has an argument 'donate'"):
        plan.bind(step, *args, settings=None, donate=0)


def test_a_bound_plan_has_the_mesh_that_it_runs_on(loaded):
    """Refuses to be bound where its devices are not there."""
    plan, args = loaded
    assert plan.mesh is None
    mesh = plan.bind(step_fn, *args).mesh
    assert dict(mesh.shape) == {"x": 4} and [*mesh.devices.flat] == jax.devices()[:4]
    run = cfp.parallelize(step_fn, plan=plan, donate_argnums=0)
    run(jnp.array(args[0]), args[1])
    assert run.plan.mesh == mesh
    elsewhere = replace(plan, environment={"platform": "cuda"})
    with pytest.raises(
        cfp.PlanMismatch, match="4 devices of cuda, and these are 4 of cpu"
    ):
        elsewhere.bind(step_fn, *args)


def test_a_loaded_plan_takes_the_first_devices(loaded):
    plan, (state, x) = loaded
    made, scaled = plan.apply(step_fn)(jnp.array(state), x)
    assert {d.id for d in made.sharding.device_set} == {0, 1, 2, 3}
    np.testing.assert_array_equal(made, state + x.sum() * 2)
    np.testing.assert_array_equal(scaled, x * state.sum())
    run = cfp.parallelize(step_fn, plan=plan, donate_argnums=0)
    np.testing.assert_array_equal(run(jnp.array(state), x)[1], scaled)


def counted():
    """A step like `step_fn`, and how often its Python code ran."""
    runs = []

    def step(state, x):
        runs.append(None)
        return step_fn(state, x)

    return step, runs


def test_a_step_that_was_bound_is_not_traced_again(loaded):
    plan, (state, x) = loaded
    step, runs = counted()
    bound = plan.bind(step, state, x)
    apply = bound.apply(step)
    made, _ = apply(jnp.array(state), x)
    made, _ = apply(made, x=x)
    np.testing.assert_array_equal(made, state + x.sum() * 4)
    assert len(runs) == 1
    # Another plan, and another function, trace; bound anew, a function does not.
    plan.apply(step)(jnp.array(state), x)
    assert len(runs) == 2
    other, others = counted()
    bound.apply(other)(jnp.array(state), x)
    assert len(runs) == 2 and len(others) == 1
    bound.bind(step, state, x)
    assert len(runs) == 2


def test_a_bound_step_is_traced_again_under_another_configuration(loaded):
    plan, (state, x) = loaded
    step, runs = counted()
    apply = plan.bind(step, state, x).apply(step)
    with jax.default_matmul_precision("highest"):
        apply(jnp.array(state), x)
        assert len(runs) == 2
        inside = plan.bind(step, state, x).apply(step)
        made, _ = inside(jnp.array(state), x)
        np.testing.assert_array_equal(made, state + x.sum() * 2)
        assert len(runs) == 3
    apply(jnp.array(state), x)
    assert len(runs) == 3


def test_a_call_with_other_arguments_is_refused_as_before(loaded):
    plan, (state, x) = loaded
    step, _ = counted()
    apply = plan.bind(step, state, x).apply(step)
    with pytest.raises(cfp.PlanMismatch):
        apply(jnp.ones((4, 8)), x)
    with pytest.raises(cfp.OptionError, match="Neither the step nor"):
        apply(jnp.array(state), x=x, y=x)
    made, _ = apply(jnp.array(state), x)
    np.testing.assert_array_equal(made, state + x.sum() * 2)


def test_another_step_is_refused_by_each_call(loaded):
    plan, (state, x) = loaded

    def other(state, x):
        return state * x.sum(), x * state.sum()

    apply = plan.bind(other, state, x).apply(other)
    for _ in range(2):
        with pytest.raises(cfp.PlanMismatch):
            apply(jnp.array(state), x)


def test_a_plan_decides_alone(loaded):
    with pytest.raises(TypeError, match="together with preset"):
        cfp.parallelize(step_fn, plan=loaded[0], preset="zero1")


def test_what_is_compiled_for_a_loaded_plan_is_said(tmp_path, monkeypatch):
    """With the seconds it took, where they are known; what is kept is no compile."""
    monkeypatch.setenv("CFP_CACHE_DIR", str(tmp_path / "first"))
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    args = jnp.ones((8, 4)), jnp.ones((4,))
    settings = cfp.PlannerSettings()
    plan = cfp.plan(step_fn, *args, mesh=mesh, settings=settings, quiet=True)
    assert plan.search["compile_seconds"] > 0
    known = replace(plan, search={**plan.search, "compile_seconds": 41.0})
    known.save(tmp_path / "plan.json")
    monkeypatch.setenv("CFP_CACHE_DIR", str(tmp_path / "second"))
    loaded = cfp.Plan.load(tmp_path / "plan.json")
    said = "compiling 'step_fn' under its plan, which took 0:41 when it was planned"
    bound, told = loaded.bind(step_fn, *args), []
    bound.compile_bound(told.append)
    assert told == [said]
    told.clear()
    bound.compile_bound(told.append)
    assert told == []
    settings = cfp.PlannerSettings(progress=told.append)
    how = {"plan": loaded, "cache_dir": tmp_path / "third", "settings": settings}
    cfp.parallelize(step_fn, **how)(*args)
    assert told == [said]


def test_a_saved_plan_finds_the_executable_that_its_planning_kept(
    tmp_path, monkeypatch
):
    """Programs depend on no order of a file's constraints, nor on the step's name."""
    monkeypatch.setenv("CFP_CACHE_DIR", str(tmp_path))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    settings = cfp.PlannerSettings(race=False)
    how = {"mesh": mesh, "settings": settings, "quiet": True, "donate_argnums": 0}
    plan = cfp.plan(deep.step, *deep.arguments(), preset="zero1", **how)
    values, uses = (
        dict(reversed(one.items()))
        for one in (plan.constraints.values, plan.constraints.uses)
    )
    other = replace(plan.constraints, values=values, uses=uses)
    replace(plan, constraints=other).compile_bound()
    plan.save(tmp_path / "plan.json")
    loaded, told = cfp.Plan.load(tmp_path / "plan.json"), []
    for step in deep.step, lambda *args: deep.step(*args):
        loaded.bind(step, *deep.arguments()).compile_bound(told.append)
    assert told == []
