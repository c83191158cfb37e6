"""What a candidate costs that computes its forward pass again."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from cfp.analysis.analyze import analyze
from cfp.presets import presets
from cfp.profiling.rates import Rates
from cfp.profiling.record import ProfileRecord
from cfp.program.step import flatten_step
from cfp.program.trace import planning_mesh, trace
from cfp.search.measure import can_recompute
from cfp.search.shortlist import estimate_kinds
from cfp.search.wanted import WantedMaker, computed_again
from cfp_test.program.test_recompute import stack_step

MS = {"alone": 10.0, "alone again": 15.0, "carrier": 9.0, "pair": 17.0}
BYTES = {"alone": 500, "alone again": 400, "carrier": 300, "pair": 700}


@pytest.fixture(scope="module")
def made():
    """A candidate with a neighbour, and the same computed again."""
    step, args = stack_step()
    mesh = planning_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]))
    program, _ = trace(flatten_step(step, args, {}), mesh)
    analysis = analyze(program, tuple(mesh.shape.items()))
    estimates = estimate_kinds(analysis, Rates.default(mesh))
    maker = WantedMaker(analysis, presets(analysis.frame), estimates, ())
    for base in maker.first(1, 0):
        index = analysis.representatives[base.kind]
        if base.pair_job and can_recompute(analysis.frame, analysis.segments[index]):
            return base, computed_again(analysis, (), base, "again")
    raise AssertionError("no segment has a neighbour")


def records_of(base, again, pair_again):
    """Made-up times and memory of all their jobs."""
    jobs = {
        "alone": base.job,
        "carrier": base.carrier_job,
        "pair": base.pair_job,
        "alone again": again.job,
        "pair again": again.pair_job,
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


def test_it_is_measured_beside_the_same_neighbour(made):
    base, again = made
    assert again.candidate == replace(base.candidate, remat=True)
    assert again.carrier_job == base.carrier_job
    assert base.pair_job.constraints.recompute == ()
    [one] = again.pair_job.constraints.recompute
    assert one == again.job.constraints.recompute[0]
    keys = {job.key.digest for job in (*base.jobs, *again.jobs)}
    assert len(keys) == 4 + (base.carrier_job.key != base.job.key)


@pytest.mark.parametrize(
    ("size", "kept"),
    [
        (350, 50),  # What it adds to the neighbour's,
        (310, 20),  # but at least what others read,
        (690, 390),  # whatever the compiler should have let go,
        (900, 400),  # and at most all that it needs alone.
    ],
)
def test_it_keeps_what_it_adds_to_its_neighbour(made, size, kept):
    base, again = made
    if base.carrier_job.key == base.job.key:
        pytest.fail("a neighbour of another kind is needed for these figures")
    records = records_of(base, again, (20.0, size))
    assert again.kept_bytes(records, least=20) == kept


def test_it_takes_longer_by_what_the_pair_does(made):
    base, again = made
    plain_ms = base.time_ms(records_of(base, again, (17.0, 0)))
    assert again.time_ms(records_of(base, again, (20.0, 0))) == plain_ms + 3.0
    # Never less: that is noise.
    assert again.time_ms(records_of(base, again, (16.0, 0))) == plain_ms
    records = records_of(base, again, (20.0, 0))
    failed = replace(
        records[again.pair_job.key.digest], status="crashed", samples_ms=()
    )
    records[failed.key] = failed
    assert again.time_ms(records) == plain_ms + MS["alone again"] - MS["alone"]
