"""A step that is analysed on several meshes is read once, unless it is for a mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import cfp
from cfp.analysis.presets import named_choices, propagated
from cfp.api import run_passes
from cfp.passes import PlanOptions, analyze_step
from cfp.program.step import flatten_step
from cfp_test.programs.registry import PROGRAMS
from cfp_test.support.checking import make_mesh

LINE, SQUARE = make_mesh((("x", 4),)), make_mesh((("x", 2), ("y", 2)))


@pytest.mark.parametrize("name", ["mlp", "scan_mlp"])
def test_a_program_read_on_one_mesh_is_the_same_on_another(name):
    step = flatten_step(*PROGRAMS[name]()[:2], {})
    before = analyze_step(step, LINE)
    named_choices(before.analysis.frame)
    shared = analyze_step(step, SQUARE)
    alone = analyze_step(flatten_step(*PROGRAMS[name]()[:2], {}), SQUARE)
    frame, own = shared.analysis.frame, alone.analysis.frame
    assert frame.program.ops is before.analysis.frame.program.ops
    assert frame.mesh == own.mesh
    assert frame.blocks == own.blocks
    assert shared.analysis.segments == alone.analysis.segments
    assert propagated(frame) == propagated(own)
    assert named_choices(frame) == named_choices(own)


def test_a_region_sharded_by_hand_is_read_for_each_mesh():
    def step(w, x):
        inner = jax.shard_map(
            lambda x: x - x.mean(), mesh=LINE, in_specs=P("x"), out_specs=P("x")
        )
        return w - 0.1 * jnp.mean(inner(x) @ w), x

    args = jnp.ones((8, 8)), jnp.ones((16, 8))
    found = flatten_step(step, args, {})
    first, second = (analyze_step(found, LINE).analysis.frame for _ in range(2))
    assert first.program is not second.program


def test_a_plan_on_the_second_mesh_computes_the_same(tmp_path):
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, value

    args = jnp.ones((8, 8)), jnp.arange(128.0).reshape(16, 8) / 128
    found = flatten_step(step, args, {})
    analyze_step(found, LINE)
    shared = analyze_step(found, SQUARE)
    options = PlanOptions(cache_dir=tmp_path)
    plan = run_passes(shared, options).plan
    assert plan.mesh_axes == (("x", 2), ("y", 2))
    run = cfp.parallelize(step, mesh=SQUARE, plan=plan, quiet=True)
    for got, one in zip(run(*args), step(*args), strict=True):
        assert jnp.allclose(got, one, rtol=1e-5)
