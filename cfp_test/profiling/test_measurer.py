"""Answers of the store, and measurements of the rest."""

import pytest

from cfp.profiling.builder import BuildEnvironment
from cfp.profiling.jobs import Measurer
from cfp.profiling.record import ProfileRecord
from cfp.profiling.runner import place_of_parts
from cfp.profiling.tasks import MeasureOptions


@pytest.fixture
def look(case, store, monkeypatch):
    """Makes what looks jobs up, and a list of what was measured."""
    measured = []

    def run_jobs(place, jobs, store, options, **_):
        retry_failures = options.retry_failures
        records = store.get_many({job.key.digest for job in jobs})
        for job in jobs:
            digest = job.key.digest
            if digest not in records or (retry_failures and not records[digest].ok):
                measured.append(job.label)
                records[digest] = record_of(job, "ok")
        return records

    monkeypatch.setattr("cfp.profiling.jobs.run_jobs", run_jobs)

    def make(measure=True, **options):
        place = place_of_parts(case.program, case.mesh, BuildEnvironment())
        return Measurer(place, store, measure, MeasureOptions(**options))

    return make, measured


def record_of(job, status):
    samples = (1.0,) if status == "ok" else ()
    key = job.key
    return ProfileRecord(
        key=key.digest, parts=key.parts, status=status, samples_ms=samples
    )


@pytest.mark.parametrize("retry", [False, True])
def test_a_failure_that_is_tried_again_is_not_known(case, store, look, retry):
    make, measured = look
    failed, known, new = jobs = [case.job(name) for name in "abc"]
    store.put(record_of(failed, "crashed"))
    store.put(record_of(known, "ok"))
    measurer = make(retry_failures=retry)
    found = measurer(jobs)
    assert found[failed.key.digest].ok == retry
    assert measured == (["a", "c"] if retry else ["c"])
    answered = {known.key.digest} if retry else {known.key.digest, failed.key.digest}
    assert measurer.known == answered
    store.put(found[new.key.digest])
    measurer(jobs)
    assert measurer.known == answered, "what was measured just now was not known"


def test_where_nothing_is_measured_failures_are_known(case, store, look):
    make, measured = look
    store.put(record_of(case.job("a"), "crashed"))
    measurer = make(measure=False, retry_failures=True)
    assert measurer([case.job("a"), case.job("b")]).keys() == measurer.known
    assert len(measurer.known) == 1 and measured == []
