"""Steps planned for one device: nothing is sharded, all else is chosen."""

import jax
import numpy as np
import pytest

import cfp
from cfp_test import toy_targets
from cfp_test.checking import make_mesh
from cfp_test.cli_runner import run_batch
from cfp_test.toy_targets import toy

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
    with pytest.raises(cfp.PlanMismatch, match="expected: one device"):
        cfp.adapt(plan, STEP_FN, *state, mesh=make_mesh((("x", 2),)))


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
