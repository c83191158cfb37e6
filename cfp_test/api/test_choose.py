"""Plans of fewer kinds of choices: what is left out stays as it is without a plan."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cfp
from cfp.analysis.layout import Storage
from cfp.analysis.presets import presets
from cfp.context import PlannerSettings, dimensions_of, open_context
from cfp.errors import CfpError
from cfp.models import build
from cfp.passes import analyze_step, profile, search
from cfp.program.step import flatten_step
from cfp.settings import Dimension, defaults_of
from cfp_test.cli.cli_runner import run_batch
from cfp_test.models.tiny import TINY

SUBSETS = [
    names
    for count in (1, 2, 3)
    for names in itertools.combinations(("sharding", "storage", "remat"), count)
]

# One of them, two, and all.
DAILY = [
    pytest.param(one, marks=() if one in SUBSETS[::2] else pytest.mark.nightly)
    for one in SUBSETS
]


@pytest.fixture(scope="module")
def analyzed():
    step, args = build("gpt", **{**TINY["gpt"], "layers": 3})
    mesh = cfp.described("4xh100")
    return analyze_step(flatten_step(step, args, {}), mesh, None)


def options_of(analyzed, tmp_path, choose):
    """All options of a search by estimates, and what it finds."""
    settings = PlannerSettings(choose=choose)
    with open_context(analyzed.mesh, tmp_path, None, settings) as context:
        profiles = profile(context, analyzed.analysis)
        found = search(context, analyzed.analysis, profiles)
    return [o.candidate for row in found.problem.options for o in row], found


@pytest.fixture(scope="module")
def least_ms(analyzed, tmp_path_factory):
    """The fastest by prediction where everything is chosen among."""
    _, every = options_of(analyzed, tmp_path_factory.mktemp("every"), None)
    return min(one.predicted_ms for one in every.candidates)


@pytest.mark.parametrize("choose", DAILY, ids=",".join)
def test_only_what_is_chosen_among_differs_between_options(
    analyzed, least_ms, tmp_path, choose
):
    candidates, found = options_of(analyzed, tmp_path, choose)
    plain = presets(analyzed.analysis.frame)["data_parallel"]
    shared = {
        tuple(plain.blocks[b] for b in segment.blocks)
        for segment in analyzed.analysis.segments
    }
    assert candidates
    if "sharding" not in choose:
        assert {one.strategies for one in candidates} <= shared
    else:
        assert len({one.strategies for one in candidates}) > len(shared)
    modes = {one.storage for one in candidates}
    assert (modes == {Storage.USED}) == ("storage" not in choose)
    assert not any(one.kernels for one in candidates)
    if "remat" not in choose:
        assert not any(one.remat for one in candidates)
    assert found.candidates[0].predicted_ms >= least_ms * (1 - 1e-9)


def test_without_remat_nothing_is_rematerialized_where_memory_decides(
    analyzed, tmp_path
):
    needed = min(one.residual_bytes for one in _layers(analyzed, tmp_path, None, None))
    budget = defaults_of("gpu").reserve_bytes + needed
    names = ("sharding", "storage")
    able = _layers(analyzed, tmp_path, (*names, "remat"), budget)
    unable = _layers(analyzed, tmp_path, names, budget)
    assert any(one.candidate.remat for one in able)
    assert not any(one.candidate.remat for one in unable)


def _layers(analyzed, tmp_path, choose, budget):
    """The options of all kinds, by estimates."""
    settings = PlannerSettings(choose=choose)
    with open_context(analyzed.mesh, tmp_path, budget, settings) as context:
        found = profile(context, analyzed.analysis)
    return [option for row in found.problem.options for option in row]


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(CfpError, match="Did you mean 'sharding'"):
        cfp.plan(lambda x: x, jax.numpy.ones(4), choose=("shardings",))
    with pytest.raises(CfpError, match="Did you mean 'remat'"):
        PlannerSettings(choose=("rematerialization",))
    with pytest.raises(CfpError, match="choose is empty"):
        PlannerSettings(choose=())


@pytest.mark.parametrize("value", ["5", -1, None, float("nan")])
@pytest.mark.parametrize("name", ["seconds", "per_kind"])
def test_what_is_no_number_is_refused(name, value):
    with pytest.raises(cfp.CfpError, match=f"got {name}={value!r}"):
        PlannerSettings(**{name: value})


def test_numbers_of_numpy_are_taken():
    made = PlannerSettings(per_kind=np.int64(3), seconds=np.float32(2))
    assert (made.per_kind, made.seconds) == (3, 2.0)


def test_what_asks_for_a_dimension_that_is_left_out_is_refused():
    for asked in (
        {"kernels": ("cudnn",)},
        {"compiler_options": {"a": {"xla_a": "1"}}},
    ):
        with pytest.raises(CfpError, match="which choose leaves out") as error:
            PlannerSettings(choose=("sharding",), **asked)
        [name] = re.findall(r"Add (\S+) to", str(error.value))
        PlannerSettings(choose=("sharding", name), **asked)
    PlannerSettings(choose=("sharding",), kernels=())


def test_names_are_read_with_hyphens_too():
    assert dimensions_of("host-memory") == {Dimension.HOST_MEMORY}
    assert dimensions_of(str(one) for one in Dimension) == set(Dimension)
    with pytest.raises(CfpError) as caught:
        dimensions_of("compiler_option")
    there_are = ", ".join(one.replace("_", "-") for one in Dimension)
    assert f"Did you mean 'compiler-options'? There are: {there_are}." in str(
        caught.value
    )


def test_the_command_takes_names(tmp_path):
    small = "--layers 1 --hidden 16 --heads 2 --seq 16 --vocab 64 --batch 8".split()
    plan = ["plan", "gpt", *small, "--for", "4xh100"]
    one_axis, refused, unknown = run_batch(
        [
            [*plan, "--choose", "sharding,storage"],
            [*plan, "--choose", "sharding", "--microbatches", "1,2"],
            [*plan, "--choose", "sharding,kernel"],
        ],
        tmp_path,
    )
    assert one_axis.code == 0, one_axis
    assert "x=4" in one_axis.out and "y=2" not in one_axis.out
    assert refused.code == unknown.code == 2
    assert "Add microbatches to --choose" in " ".join(refused.err.split())
    assert "Did you mean 'kernels'?" in " ".join(unknown.err.split())


@pytest.mark.parametrize("choose", [None, ("storage", "kernels")])
def test_a_step_that_data_parallelism_cannot_shard_is_planned(choose, tmp_path):
    """A preset that stands for data parallelism there has another name."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])

    def step(weights):
        return weights - 0.1 * jnp.tanh(weights @ weights)

    weights = jnp.ones((16, 16)) / 16
    how = {} if choose is None else {"choose": choose}
    plan = cfp.plan(step, weights, mesh=mesh, cache_dir=tmp_path, quiet=True, **how)
    np.testing.assert_allclose(plan.apply(step)(weights), step(weights), rtol=1e-5)
