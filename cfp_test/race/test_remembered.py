"""Choices that were compiled before are known to need what they need."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import pytest

import cfp
from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.context import DetailedSettings
from cfp.profiling.record import ProfileRecord
from cfp.profiling.store import ProfileStore
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.race.compile import remembered
from cfp.search.requests import whole_job
from cfp.settings import ConstraintLevel
from cfp_test.program.stacks import stack_step

pytestmark = pytest.mark.usefixtures("compiled_once", "analyzed_once")

STEP, ARGS = stack_step()
HERE = (("device", "some"),)


@pytest.fixture(scope="module")
def mesh():
    return planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))


@pytest.fixture(scope="module")
def analysis(mesh):
    program, _ = trace(flatten_step(STEP, ARGS, {}), mesh)
    return analyze(program, tuple(mesh.shape.items()))


@pytest.fixture
def known(analysis, tmp_path):
    """Keeps records of whole programs, and tells what is remembered of them."""
    by_name = presets(analysis.frame)

    def job(name, *how):
        choice = replace(by_name[name], remat=(1,))
        return whole_job(analysis, choice, HERE, name, *how)

    def keep(one, peak, ms, **changes):
        record = ProfileRecord(
            key=one.key.digest,
            parts=one.key.parts,
            status="ok",
            samples_ms=(ms,),
            argument_bytes=peak,
            choice=one.choice,
        )
        store.put(replace(record, **changes))

    with ProfileStore(tmp_path / "profiles.sqlite") as store:
        yield keep, job, lambda: remembered(analysis, store, job("zero1"))


def test_what_was_compiled_comes_back(analysis, known):
    keep, job, found = known
    assert found() == []
    keep(job("data_parallel"), 20, 1.0)
    keep(job("tensor_parallel", ConstraintLevel.ARGUMENTS), 30, 3.0)
    refused = {"status": "out_of_memory", "samples_ms": ()}
    keep(job("fully_sharded"), 10, 0.0, **refused)
    by_name = presets(analysis.frame)
    again = {name: replace(choice, remat=(1,)) for name, choice in by_name.items()}
    assert [(c.choice, c.level, r.peak_bytes) for c, r in found()] == [
        (again["data_parallel"], ConstraintLevel.EVERYTHING, 20),
        (again["tensor_parallel"], ConstraintLevel.ARGUMENTS, 30),
        (again["fully_sharded"], ConstraintLevel.EVERYTHING, 10),
    ]
    assert all(c.options == {} for c, _ in found())


def test_options_of_the_compiler_come_back_too(known):
    keep, job, found = known
    options = {"xla_backend_optimization_level": "1"}
    keep(job("data_parallel", ConstraintLevel.EVERYTHING, options), 10, 1.0)
    # A record may come from elsewhere: options that may do harm are not followed.
    harmful = {"xla_dump_to": "/tmp/anywhere"}
    keep(job("tensor_parallel", ConstraintLevel.EVERYTHING, harmful), 10, 1.0)
    assert [(c.options, r.peak_bytes) for c, r in found()] == [(options, 10)]


def test_what_is_of_no_use_is_left_out(known):
    keep, job, found = known
    crash = {"status": "crashed", "samples_ms": ()}
    keep(job("tensor_parallel"), 10, 1.0, **crash)
    keep(job("fully_sharded"), 10, 1.0, choice="")
    ran_out = {"status": "out_of_memory", "samples_ms": (), "run_seconds": 1.0}
    keep(job("zero1"), 10, 1.0, **ran_out)
    assert found() == []


@pytest.mark.parametrize("how", [{}, {"donate_argnums": 0}])
def test_sizes_of_other_donated_arguments_are_left_out(analysis, known, mesh, how):
    """Without donation the same choice needs more: its size says nothing."""
    keep, _, found = known
    step = flatten_step(STEP, ARGS, {}, **how)
    program, _ = trace(step, mesh)
    other = analyze(program, tuple(mesh.shape.items()))
    choice = presets(other.frame)["data_parallel"]
    keep(whole_job(other, choice, HERE, "data_parallel"), 10, 1.0)
    assert len(found()) == (not how)


def changed(data, change):
    """A record's text with another level, other options, or another choice."""
    outside = {name: change[name] for name in change.keys() & data.keys()}
    inside = {name: change[name] for name in change.keys() - data.keys()}
    return json.dumps({**data, **outside, "choice": data["choice"] | inside})


def test_choices_of_another_version_are_left_out(known):
    keep, job, found = known
    data = json.loads(job("data_parallel").choice)
    whole = data["choice"]
    for name, change in (
        ("fully_sharded", {"blocks": whole["blocks"][1:]}),
        ("zero1", {"storage": [*whole["storage"], "used"]}),
        ("tensor_parallel", {"blocks": [[{"inner": 99, "exit": -1}]] * 99}),
    ):
        keep(job(name), 10, 1.0, choice=changed(data, change))
    assert found() == []


@pytest.mark.parametrize(
    "change",
    [
        {"remat": [99]},
        {"remat": 1},
        {"remat": [[1]]},
        {"level": "half of it"},
        {"kernels": [[0, "chunked"]]},
        {"kernels": [[99, [["attention", "chunked"]]]]},
        {"kernels": [[0, [["attention", "abacus"]]]]},
        {"kernels": [[0, []]]},
        {"options": ["some"]},
        {"storage": ["somewhere else"]},
        {"blocks": [[{"inner": 0, "exit": -1, "another": 1}]]},
        {"blocks": [[{"inner": [0]}]]},
        None,
    ],
)
def test_what_cannot_be_read_is_left_out(known, change):
    """A store is shared with other versions of cfp, and its text can be anything."""
    keep, job, found = known
    keep(job("zero1"), 10, 1.0)
    one = job("data_parallel")
    whole = json.loads(one.choice)
    keep(one, 10, 1.0, choice=changed(whole, change) if change else "{}")
    assert [r.key for _, r in found()] == [job("zero1").key.digest]


def test_more_memory_is_no_worse(mesh, tmp_path):
    """A winner under little memory races where there is more of it."""

    def plan(budget, **settings):
        return cfp.plan(
            STEP,
            *ARGS,
            mesh=mesh,
            memory_budget=budget,
            cache_dir=tmp_path,
            settings=DetailedSettings(
                measure=True, per_kind=3, in_context=False, **settings
            ),
        )

    free = plan(None)
    with pytest.raises(cfp.MemoryBudgetError) as caught:
        plan(1024)
    least = caught.value.smallest_feasible_bytes
    small = plan(least)
    assert small.peak_bytes <= least
    large = plan(2 * free.peak_bytes)
    again = plan(2 * free.peak_bytes)
    assert again.search["race_cached"] == 1.0
    assert again.winner == large.winner
    peaks = {row.peak_bytes for row in large.race if row.time_ms is not None}
    assert small.peak_bytes in peaks
    # Without a race it is found, too.
    assert plan(least, race=False).peak_bytes <= least
