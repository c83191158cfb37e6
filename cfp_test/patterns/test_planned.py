"""Plans that compute cross-entropies over parts of the vocabulary, end to end."""

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cfp
from cfp.analysis.analyze import analyze
from cfp.cli.options import settings
from cfp.cost.choice import segment_candidate
from cfp.cost.costs import Costs
from cfp.models.registry import build
from cfp.planner_settings import DetailedSettings
from cfp.presets.presets import presets
from cfp.profiling.rates import Rates
from cfp.program.step import flatten_step
from cfp.program.trace import trace
from cfp.search.choices import kernel_variants
from cfp.settings import Replacing
from cfp.view.text import explain_text, plan_text
from cfp_test.models.tiny import TINY
from cfp_test.support.checking import make_mesh
from cfp_test.support.named_kernels import name_of

pytestmark = pytest.mark.usefixtures("compiled_once")

WORDS = 2048


def step(params, batch):
    def loss(params):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        return optax.softmax_cross_entropy_with_integer_labels(
            hidden @ params["head"], batch["labels"]
        ).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "in": jax.random.normal(keys[0], (16, 16)),
        "head": jax.random.normal(keys[1], (16, WORDS)),
    }
    labels = jax.random.randint(keys[2], (64, 16), 0, WORDS)
    return params, {"x": jax.random.normal(keys[3], (64, 16, 16)), "labels": labels}


def test_where_memory_is_short_it_is_planned_raced_saved_loaded_and_applied(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params, batch = arguments()

    def planned(**how):
        return cfp.plan(
            step,
            params,
            batch,
            mesh=mesh,
            memory_budget="1.6MB",  # Of the logits alone a device has 2 MiB.
            cache_dir=tmp_path / "cache",
            settings=DetailedSettings(**how),
        )

    with pytest.raises(cfp.MemoryBudgetError):
        planned(cross_entropy=0)
    plan = planned(cross_entropy=8)
    with pytest.raises(cfp.MemoryBudgetError):
        planned(cross_entropy=0)  # What was compiled is remembered, and not asked for.
    [one] = json.loads(plan.to_json())["replaced"]
    assert (one["name"], one["how"][0]) == ("cross-entropy", "vocabulary/8")
    assert plan.peak_bytes is not None and plan.peak_bytes < 1_600_000
    assert any(row.name == plan.winner and row.samples_ms for row in plan.race)
    assert planned().constraints == plan.constraints  # Where memory is short it is
    assert "cross-entropy in 8 parts of the vocabulary" in " ".join(repr(plan).split())
    plan.save(tmp_path / "plan.json")
    applied = cfp.Plan.load(tmp_path / "plan.json", mesh=mesh).apply(step)
    for found, right in zip(
        jax.tree.leaves(applied(params, batch)),
        jax.tree.leaves(step(params, batch)),
        strict=True,
    ):
        np.testing.assert_allclose(found, right, rtol=2e-4, atol=2e-5)


def of_no_cross_entropy(params, batch):
    def loss(params):
        return (jnp.tanh(batch["x"] @ params["in"]) @ params["head"]).mean()

    return jax.grad(loss)(params)


@pytest.mark.explained("Attention as written, cross-entropy as written")
def test_a_cross_entropy_in_parts_that_was_asked_for_and_is_not_there_is_told():
    mesh = cfp.described("4xh200")
    args = jax.eval_shape(arguments)

    def planned(function, **how):
        settings = DetailedSettings(race=False, **how)
        return cfp.plan(function, *args, mesh=mesh, quiet=True, settings=settings)

    plan = planned(step, cross_entropy=4)
    assert not plan.constraints.replaced
    [left] = plan.figures.left
    assert re.fullmatch(
        r"in 4 parts of the vocabulary, tried: the step is predicted at [\d.]+ ms "
        r"with it, [\d.]+ ms without",
        left.reason,
    )
    assert f"Cross-entropy as written: {left.reason}" in plan_text(plan, width=200)
    plan = planned(of_no_cross_entropy, cross_entropy=4)
    why = "cfp recognizes none in this step"
    assert f"cross-entropy as written: {why}" in " ".join(repr(plan).split())
    assert f"Cross-entropy as written: {why}." in " ".join(explain_text(plan).split())
    assert planned(of_no_cross_entropy).figures.left == ()


def test_a_segment_may_have_both_and_then_holds_less_than_with_either():
    options = {**TINY["gpt"], "layers": 1}
    flat = flatten_step(*build("gpt", **options))
    program, _ = trace(flat, make_mesh((("x", 4),)))
    analysis = analyze(program, (("x", 4),))
    costs = Costs(analysis, Rates.default(analysis.frame.mesh))
    choice = presets(analysis.frame)["data_parallel"]
    kernels = Replacing(attention=("chunked",), cross_entropy=4)
    held = {}
    for kind, index in enumerate(analysis.representatives):
        plain = segment_candidate(analysis, index, choice)
        own = {
            name_of(one.kernels): costs.least_bytes(kind, one).residual_bytes
            for one in (plain, *kernel_variants(analysis, kind, plain, kernels))
        }
        if "chunked+vocabulary/4" in own:
            held = own
    assert set(held) == {"", "chunked", "vocabulary/4", "chunked+vocabulary/4"}
    less = [held[""] - held[name] for name in ("chunked", "vocabulary/4")]
    assert min(less) > 0
    assert held[""] - held["chunked+vocabulary/4"] == sum(less)


def test_the_command_line_asks_for_it():
    ctx = SimpleNamespace(params={"cross_entropy": 8}, obj=None)
    assert settings(ctx, per_kind=4, quick=False).cross_entropy == 8
    ctx.params["cross_entropy"] = 1
    with pytest.raises(cfp.CfpError, match="Expected 2 to 9,999 parts"):
        settings(ctx, per_kind=4, quick=False)
