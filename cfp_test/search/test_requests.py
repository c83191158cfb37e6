"""Costs of a candidate that rematerializes its forward pass."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from cfp.analysis.analyze import analyze
from cfp.analysis.presets import presets
from cfp.cost.costs import Costs
from cfp.cost.memory import can_rematerialize
from cfp.models import build as build_model
from cfp.profiling.builder import Built, build
from cfp.profiling.collectives import Rates
from cfp.profiling.record import ProfileRecord
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.search.choices import estimate_kinds
from cfp.search.requests import RequestBuilder, rematerialize, whole_job
from cfp_test.models.tiny import TINY
from cfp_test.program.stacks import stack_step
from cfp_test.search.made_up import estimated

MS = {"alone": 10.0, "neighbour": 9.0, "pair": 17.0}
BYTES = {"alone": 400, "neighbour": 300, "pair": 700}


@pytest.fixture(scope="module")
def mesh():
    return planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))


@pytest.fixture(scope="module")
def analysis(mesh):
    step, args = stack_step()
    program, _ = trace(flatten_step(step, args, {}), mesh)
    return analyze(program, tuple(mesh.shape.items()))


@pytest.fixture(scope="module")
def made(mesh, analysis):
    """A candidate with a neighbour, and the same rematerialized."""
    estimates = estimate_kinds(analysis, Rates.default(mesh))
    costs = Costs(analysis, Rates.default(mesh))
    maker = RequestBuilder(costs, presets(analysis.frame), estimates, ())
    for base in maker.first(1, 0):
        index = analysis.representatives[base.kind]
        if len({job.key for job in base.jobs}) == 3 and can_rematerialize(
            analysis.frame, analysis.segments[index]
        ):
            return base, rematerialize(analysis, (), base, "again", {})
    raise AssertionError("no segment has a neighbour of another kind")


def records_of(base, again, pair_again):
    """Made-up times and memory of all their jobs."""
    jobs = {
        "alone": base.jobs[0],
        "neighbour": base.jobs[1],
        "pair": base.jobs[2],
        "pair again": again.jobs[2],
    }
    ms, size = pair_again
    figures = {name: (MS.get(name, ms), BYTES.get(name, size)) for name in jobs}
    return {
        job.key.digest: ProfileRecord(
            key=job.key.digest,
            parts=job.key.parts,
            status="ok",
            samples_ms=(figures[name][0],),
            temp_bytes=figures[name][1],
        )
        for name, job in jobs.items()
    }


def test_it_is_measured_beside_the_same_neighbour_and_not_alone(made):
    base, again = made
    assert again.candidate == replace(base.candidate, remat=True)
    assert again.jobs[1] == base.jobs[1] and again.jobs[0] == base.jobs[0]
    assert base.jobs[2].constraints.rematerialized == ()
    assert len(again.jobs[2].constraints.rematerialized) == 1
    new = {job.key.digest for job in again.jobs} - {j.key.digest for j in base.jobs}
    assert new == {again.own_job.key.digest} == {again.jobs[2].key.digest}
    assert base.own_job == base.jobs[0]


@pytest.mark.parametrize(
    ("size", "kept"),
    [
        (350, 50),  # What it adds to the neighbour's,
        (310, 20),  # but at least what others read,
        (690, 390),  # whatever the compiler should have let go,
        (900, 400),  # and at most all that the same needs alone.
    ],
)
def test_it_keeps_what_it_adds_to_its_neighbour(made, size, kept):
    base, again = made
    if base.jobs[1].key == base.jobs[0].key:
        pytest.fail("a neighbour of another kind is needed for these figures")
    records = records_of(base, again, (20.0, size))
    assert again.residual_bytes(records, least=20) == kept


def test_it_takes_longer_by_what_the_pair_does(made):
    base, again = made
    records = records_of(base, again, (20.0, 0))
    plain_ms = base.time_ms(records)
    assert again.time_ms(records) == plain_ms + 3.0
    assert again.alone_ms(records) == MS["alone"] + 3.0
    # Never less: that is noise.
    records = records_of(base, again, (16.0, 0))
    assert again.time_ms(records) == plain_ms


def without(records, job):
    """Records in which a job failed."""
    record = records[job.key.digest]
    failed = replace(record, status="out_of_memory", samples_ms=())
    return {**records, record.key: failed}


def test_without_the_pair_nothing_is_known_of_it(made):
    base, again = made
    records = records_of(base, again, (20.0, 0))
    assert again.is_measured(records)
    for job in (again.jobs[2], again.jobs[1], base.jobs[0]):
        failed = without(records, job)
        assert again.outcome(failed) == failed[job.key.digest]
        del failed[job.key.digest]
        assert again.outcome(failed) is None
    failed = without(records, again.jobs[2])
    assert base.is_measured(failed)


def test_a_pair_that_runs_only_with_it_tells_its_time(made):
    base, again = made
    records = without(records_of(base, again, (25.0, 0)), base.jobs[2])
    moved_ms = again.reshard_ms
    time_ms = again.time_ms(records)
    assert time_ms == pytest.approx(25.0 - MS["neighbour"] - moved_ms)


def test_a_failure_of_any_of_its_programs_is_known(made):
    base, again = made
    records = records_of(base, again, (20.0, 0))
    assert not base.has_failed(records) and not base.has_failed({})
    for job in base.jobs:
        assert base.has_failed(without(records, job))


def test_what_is_too_large_alone_is_measured_alone_computed_again(made, analysis):
    base, _ = made
    known = records_of(base, base, (20.0, 0))
    for job in base.jobs:
        again = rematerialize(analysis, (), base, "again", without(known, job))
        assert again.jobs == (again.own_job,) and again.jobs[0] != base.jobs[0]
        assert len(again.jobs[0].constraints.rematerialized) == 1


def test_no_compiled_program_needs_less_than_the_least(mesh, analysis):
    costs = Costs(analysis, Rates.default(mesh))
    segments = analysis.segments
    again = tuple(s.index for s in segments if can_rematerialize(analysis.frame, s))
    assert again
    least = {}
    for name, choice in presets(analysis.frame).items():
        lean = replace(choice, remat=again)
        job = whole_job(analysis, lean, (), name)
        built = build(analysis.frame.program, mesh, job)
        assert isinstance(built, Built), built.reason
        least[name] = costs.least_peak_bytes(choice)
        assert 0 < least[name] <= built.peak_bytes
    assert least["fully_sharded"] < least["zero1"] < least["data_parallel"]


def test_a_segment_beside_a_neighbour_is_corrected_by_the_same_price(analysis, mesh):
    """The search adds for a reshard what was subtracted before."""
    estimates = estimate_kinds(analysis, Rates.default(mesh))
    costs = Costs(analysis, Rates.default(mesh))
    maker = RequestBuilder(costs, presets(analysis.frame), estimates, ())
    items = [i for i in maker.first(100, 4) if i.reshard_ms]
    assert items
    for item in items:
        alone, neighbour, pair = (job.key.digest for job in item.jobs)
        records = {
            key: ProfileRecord(key=key, parts=(), status="ok", samples_ms=(ms,))
            for key, ms in ((neighbour, 100.0), (pair, 250.0), (alone, 100.0))
        }
        wanted = max(150.0 - item.reshard_ms, 40.0)
        assert item.time_ms(records) == pytest.approx(wanted)
        near, other = item.neighbour
        index = analysis.representatives[item.kind]
        both = {index: item.candidate, near: other}
        left, right = sorted(both)
        costs = Costs(analysis, Rates.default(mesh))
        found = costs.reshardings_ms(left, right, [both[left]], [both[right]])[0][0]
        assert found == pytest.approx(item.reshard_ms)


def test_layers_in_turn_are_measured_in_one_pair_of_both_kinds():
    """A B A B: the pair of A and B under a preset serves both; kinds go by share."""
    step, args = build_model("moe", **TINY["moe"])
    analysis, estimates = estimated(step, args, (("x", 2),), donate_argnums=0)
    costs = Costs(analysis, Rates.default((("x", 2),)))
    known = presets(analysis.frame)
    maker = RequestBuilder(costs, {"one": known["fully_sharded"]}, estimates, ())
    items = maker.first(1, 0)
    kinds = [item.kind for item in items]
    assert kinds == sorted(kinds, key=lambda kind: -maker._shares[kind])
    layers = [kind for kind in set(kinds) if segments_of(analysis, kind) > 1]
    mine = [item for item in items if item.kind in layers]
    assert len(layers) == 2 and len(mine) == 2
    assert len({item.jobs[2].key.digest for item in mine}) == 1
    assert {mine[0].jobs[0].key, mine[0].jobs[1].key} == {
        mine[1].jobs[1].key,
        mine[1].jobs[0].key,
    }


def test_segments_under_other_options_have_other_records():
    step, args = build_model("moe", **TINY["moe"])
    analysis, estimates = estimated(step, args, (("x", 2),), donate_argnums=0)
    costs = Costs(analysis, Rates.default((("x", 2),)))
    known = {"one": presets(analysis.frame)["fully_sharded"]}
    plain = RequestBuilder(costs, known, estimates, ())
    options, keys = {"xla_b": "1", "xla_a": "2"}, []
    for maker in (plain, replace(plain, options=options)):
        items = maker.first(1, 0)
        items += [rematerialize(analysis, (), one, "", {}) for one in items[:1]]
        jobs = [job for one in items for job in one.jobs]
        assert all(job.options == tuple(sorted(maker.options.items())) for job in jobs)
        keys.append({job.key.digest for job in jobs})
    assert keys[0].isdisjoint(keys[1])


def segments_of(analysis, kind):
    return sum(segment.kind == kind for segment in analysis.segments)
