"""Exported steps run without cfp; shardings are printed to paste."""

import jax
import jax.numpy as jnp
import pytest

import cfp
from cfp.errors import PlanMismatch
from cfp.profiling.hlo import collectives_in
from cfp.view.text import python_text
from cfp_test.cli.cli_runner import run_batch, run_exported
from cfp_test.cli.toy_targets import toy

STEP, SHAPES = toy()
SETTINGS = cfp.PlannerSettings(race=False)
RUN = """
import sys
import jax.numpy as jnp
weights = {{"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}}
args = weights, jnp.ones((16, 32)), jnp.zeros((16, 32))
{running}
assert not any(name.partition(".")[0] == "cfp" for name in sys.modules)
assert all(a.is_deleted() == (i < 2) for i, a in enumerate(leaves))
print(float(results[-1]), [list(one.sharding.spec) for one in results[:-1]])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported")
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    how = {"donate_argnums": 0, "settings": SETTINGS, "cache_dir": path}
    plan = cfp.plan(STEP, *SHAPES, mesh=mesh, preset="fully_sharded", **how)
    plan.save(path / "plan.json")
    return path


def test_an_export_runs_without_cfp_as_it_is_printed(folder):
    target = f"{toy.__code__.co_filename}:toy"
    [done] = run_batch([["export", "plan.json", target, "-o", "step.jax"]], folder)
    assert done.code == 0, done.err
    saved, _, running = done.out.partition("\n\n")
    assert saved == "Saved step.jax"
    loss, specs = run_exported(RUN.format(running=running), folder).split(maxsplit=1)
    weights = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}
    _, wanted = STEP(weights, jnp.ones((16, 32)), jnp.zeros((16, 32)))
    assert float(loss) == pytest.approx(float(wanted["loss"]), rel=1e-5)
    assert specs.strip() == "[['x'], ['x']]"


def test_it_has_the_collectives_of_the_plan(folder):
    plan = cfp.Plan.load(folder / "plan.json").bind(STEP, *SHAPES, donate_argnums=0)
    plan.export(folder / "made" / "step.jax")
    data = bytearray((folder / "made" / "step.jax").read_bytes())
    exported = jax.export.deserialize(data)
    where = exported.in_shardings_jax(plan.mesh)
    leaves = [
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)
        for one, sharding in zip(jax.tree.leaves(SHAPES), where, strict=True)
    ]
    run = jax.jit(exported.call, donate_argnums=(0, 1)).lower(*leaves).compile()
    ours = plan.compile_bound().as_text()
    assert collectives_in(run.as_text()) == collectives_in(ours) != ()


def test_a_step_that_calls_the_host_is_refused(folder):
    def step(x):
        jax.debug.callback(lambda total: None, x.sum())
        return x + 1

    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    x = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    how = {"settings": SETTINGS, "cache_dir": folder}
    plan = cfp.plan(step, x, mesh=mesh, preset="data_parallel", **how)
    with pytest.raises(PlanMismatch, match="calls Python functions of this process"):
        plan.export(folder / "never.jax")
    assert not (folder / "never.jax").exists()


def test_shardings_are_printed_with_their_lines(folder):
    plan = cfp.Plan.load(folder / "plan.json")
    text = python_text(plan)
    found = {}
    exec(compile(text, "shardings", "exec"), found)
    assert found["MESH"] == {"x": 4}
    specs = [tuple(spec) for spec in found["ARGUMENTS"].values()]
    assert [*found["ARGUMENTS"]] == list(plan.arg_names)
    assert specs[:2] == [("x",), ("x",)] and len(found["RESULTS"]) == 3
    assert "'weights/up': P('x'),  # float32[32,64], donated\n" in text
    count = sum(site.count for site in plan.sites)
    inside = plan.constraints
    assert count == len(inside.values) + len(inside.uses) > 0
    assert all(site.source.startswith("toy_targets.py:") for site in plan.sites)
